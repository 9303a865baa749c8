"""Inductor's C++ kernels: several are compiled as one library, to the same numbers."""

from __future__ import annotations

import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, codecache, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import VecAVX2, VecISA
from torch._inductor.exc import CppCompileError

from fxpar._fast import cpp_kernels
from fxpar._fast.cpp_kernels import kernels_in_libraries, probes_remembered
from tests.helpers.patched import needs_patches

pytestmark = needs_patches

TYPES = ["const float*", "float*", "const int64_t"]


def source(value: str, header: str = "") -> str:
    """A kernel, as Inductor writes them."""
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
{header}
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0,
                       const int64_t ks0)
{{
    #pragma omp simd
    for(int64_t x0=0; x0<ks0; x0+=1) {{ out_ptr0[x0] = {value}; }}
}}
"""


def loaded(*sources: str) -> dict[str, Any]:
    """A module that Inductor generated, as it is when it was loaded."""
    compiler = AsyncCompile()
    scope = {f"f{i}": compiler.cpp_pybinding(TYPES, x) for i, x in enumerate(sources)}
    compiler.wait(scope)
    return scope


def library(function: Any) -> str:
    return function.__self__.__spec__.origin


def test_kernels_share_a_library() -> None:
    own_header = source("std::sqrt(in_ptr0[x0])", "#include <complex>")
    with kernels_in_libraries(), kernels_in_libraries():
        module = loaded(
            source("2 * in_ptr0[x0]"), own_header, source("3 * in_ptr0[x0]")
        )
    twice, root, thrice = module.values()
    assert library(twice) == library(thrice) != library(root)
    x, out = torch.tensor([1.0, 4.0, 9.0]), torch.zeros(3)
    for function, want in ((twice, 2 * x), (root, x.sqrt()), (thrice, 3 * x)):
        function(x, out, 2)
        assert torch.equal(out[:2], want[:2]) and not out[2]
    # As of kernels by themselves, what is fed wrongly is an error.
    with pytest.raises(RuntimeError, match="requires 3 args"):
        twice(x, out)
    # Outside, Inductor compiles as it does.
    (alone,) = loaded(own_header).values()
    assert library(alone) == library(root)


def test_a_library_that_is_there_needs_no_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers, precompile = [], codecache._precompile_header

    def counted(header: str, *args: Any, **kwargs: Any) -> str:
        headers.append(header)
        return precompile(header, *args, **kwargs)

    monkeypatch.setattr(codecache, "_precompile_header", counted)
    text = source(f"{time.time_ns()}.5f * in_ptr0[x0]")
    libraries = []
    for _ in range(2):
        codecache.CppPythonBindingsCodeCache.cache.clear()  # as in another process
        with kernels_in_libraries():
            module = loaded(text)
        libraries.append(library(module["f0"]))
    assert len(headers) == 1 and len(set(libraries)) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_are_compiled_beside_what_comes_next(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, compile_cpp = threading.Event(), codecache._worker_compile_cpp
    here = threading.get_ident()

    def slowly(*args: Any) -> None:
        if threading.get_ident() != here:  # torch 2.11 compiles a header at once
            assert may_go.wait(60.0)
        compile_cpp(*args)

    monkeypatch.setattr(codecache, "_worker_compile_cpp", slowly)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: threads)
    x, out = torch.tensor([4.0]), torch.zeros(1)
    with kernels_in_libraries():
        first = loaded(source(f"{threads} + 5 * in_ptr0[x0]"))
        second = loaded(source(f"{threads} + 7 * in_ptr0[x0]"))  # not behind the first
        may_go.set()
        late = first["f0"]
        late(x, out, 1)  # waits
        assert out.item() == threads + 20 and first["f0"] is not late
    late(x, out.zero_(), 1)
    assert out.item() == threads + 20
    second["f0"](x, out, 1)
    assert out.item() == threads + 28
    assert library(first["f0"]) != library(second["f0"])


def test_a_kernel_that_does_not_compile_is_an_error_at_the_end() -> None:
    with pytest.raises(CppCompileError, match="unheard_of"), kernels_in_libraries():
        loaded(source("unheard_of(in_ptr0[x0])"))


@pytest.mark.skipif(not hasattr(VecISA, "_probe_load"), reason="torch 2.11")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other instructions")
def test_no_instructions_are_tried_behind_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, works = [], {"first": False, "second": True, "third": True}

    class Kind(str):
        def __bool__(self) -> bool:
            tried.append(str(self))
            return works[self]

    kinds = [Kind(name) for name in ("unknown", *works)]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", kinds)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: list(works))
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: ["every"])
    monkeypatch.setattr(cpp_kernels, "_INSTRUCTIONS", cpp_kernels._Instructions())
    with probes_remembered(), probes_remembered():
        for _ in range(2):
            assert cpu_vec_isa.valid_vec_isa_list() == ["second"]
            assert tried == ["first", "second"]
        assert cpp_kernels.instructions() == "second"
        cpp_kernels.take_instructions("third")  # as another rank found, which was busy
        assert cpu_vec_isa.valid_vec_isa_list() == ["third"]
        assert tried == ["first", "second"]
        cpp_kernels.take_instructions("unknown")  # to this machine
        assert cpu_vec_isa.valid_vec_isa_list() == ["second"]
        with torch._inductor.config.patch({"cpp.simdlen": 256}):  # the user chooses
            assert cpu_vec_isa.valid_vec_isa_list() == ["every"]
    assert cpu_vec_isa.valid_vec_isa_list() == ["every"]


@pytest.mark.skipif(not hasattr(VecISA, "_probe_load"), reason="torch 2.11")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other instructions")
def test_one_thread_at_a_time_tries_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kind(str):
        tried = 0
        flags = ""

        def __bool__(self) -> bool:
            Kind.tried += 1
            before, Kind.flags = Kind.flags, Kind.flags + " -mmore"  # as torch does
            time.sleep(0.1)
            Kind.flags = before
            return True

    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Kind("best")])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["best"])
    monkeypatch.setattr(cpp_kernels, "_INSTRUCTIONS", cpp_kernels._Instructions())
    with probes_remembered(), ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(cpu_vec_isa.valid_vec_isa_list)]
        time.sleep(0.05)
        asked.append(threads.submit(cpu_vec_isa.valid_vec_isa_list))
        assert [each.result() for each in asked] == [["best"], ["best"]]
    assert (Kind.tried, Kind.flags) == (1, "")


@pytest.mark.parametrize(
    ("text", "goes"),
    [
        (source("1"), True),
        (source("1", "#define N 2"), False),  # it would hold for the kernels behind
        (source("1", "#include <complex>"), False),
        (source("1") + source("2"), False),
    ],
)
def test_which_kernels_go_with_others(text: str, goes: bool) -> None:
    assert cpp_kernels._can_share_file(text) == goes


@pytest.mark.skipif(not hasattr(VecISA, "_probe_load"), reason="torch 2.11")
def test_instructions_are_tried_once(tmp_path, monkeypatch) -> None:
    tried, outcomes = [], {"works": True, "fails": False}

    def probe(self: VecISA, path: str) -> bool:
        tried.append(path)
        return outcomes[path.rsplit("/")[-1]]

    monkeypatch.setattr(VecISA, "_probe_load", probe)
    monkeypatch.setattr(cpp_kernels, "_INSTRUCTIONS", cpp_kernels._Instructions())
    isa = VecAVX2()
    for _ in range(2):  # two starts
        with probes_remembered(), probes_remembered():
            assert isa._probe_load(f"{tmp_path}/works")
            assert not isa._probe_load(f"{tmp_path}/fails")
    assert tried == [f"{tmp_path}/{name}" for name in ("works", "fails", "fails")]
    monkeypatch.setattr(platform, "node", lambda: "another machine")
    with probes_remembered():
        assert isa._probe_load(f"{tmp_path}/works")
        cpp_kernels.take_instructions(str(isa))  # as another rank found
        assert isa._probe_load(f"{tmp_path}/fails")
    assert len(tried) == 4
    assert VecISA._probe_load is probe
