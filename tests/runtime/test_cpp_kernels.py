"""Inductor's C++ kernels: several are compiled as one library, to the same numbers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch._inductor import async_compile, codecache
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError

from fxpar._fast import cpp_kernels
from fxpar._fast.cpp_kernels import kernels_in_libraries
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
