"""Compiles several of Inductor's C++ kernels as one library.

In: the kernels of a module that Inductor generated, which it hands to the compiler one
by one when the module is loaded. Out: the same functions. Most of the time of a
compiler's call is for headers (0.4 of 0.65 s), which kernels of one library share.
Libraries are stored in Inductor's cache, by their text, and are found again there.
Never: a kernel with a header of its own in a library.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import os
import platform
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from fxpar._fast.python_memory import collect_young
from fxpar._fast.switch import shortcut
from fxpar.units import digest

# The size of a library in characters of kernels: small enough that several are compiled
# at once where there are cores.
LIBRARY = 40_000

# The names under which torch counts the seconds of waiting for a module's kernels:
# while it is loaded, as torch's own, or when all modules of a program are.
LOADING, BEHIND_ALL = "async_compile.wait", "fxpar.wait_for_kernels"

_ENTRY = re.compile(r'(extern "C"\s+void\s+)kernel\(')
_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
_INCLUDE = re.compile(r"^\s*#include.*$", re.MULTILINE)


class CppKernel(NamedTuple):
    """Is a kernel that is to be compiled with others."""

    types: tuple[str, ...]  # the types of its arguments in C++
    source: str


@contextlib.contextmanager
def kernels_in_libraries(phase: str = LOADING) -> Iterator[None]:
    """Compile the kernels of modules that are loaded inside together, overlapping with
    what is done next; all are compiled when the context ends. ``phase``: the name under
    which torch counts the seconds of waiting for them."""
    from torch._dynamo.utils import dynamo_timed

    if _BEGUN.get() is not None:  # inside such a context of this thread already
        yield
        return
    begun: list[Callable[[], None]] = []
    token = _BEGUN.set(begun)
    try:
        with libraries():
            yield
    finally:
        _BEGUN.reset(token)
    with dynamo_timed(phase):
        for put in begun:
            put()


# Functions that wait, called when the context of this thread ends; None outside of it.
_BEGUN: contextvars.ContextVar[list[Callable[[], None]] | None]
_BEGUN = contextvars.ContextVar("_BEGUN", default=None)


@shortcut
def libraries() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which modules that are loaded hand over kernels by their
    text."""
    from torch._inductor.async_compile import AsyncCompile

    alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if _BEGUN.get() is not None and _can_share_file(source_code):
            return CppKernel(tuple(argtypes), source_code)
        return alone(self, argtypes, source_code)

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        kernels = {k: x for k, x in scope.items() if isinstance(x, CppKernel)}
        begun = _BEGUN.get()
        if begun is not None:
            begun.append(_put_when_compiled(scope, kernels))
        wait(self, scope)

    return mock.patch.multiple(
        AsyncCompile, cpp_pybinding=cpp_pybinding, wait=wait_for_all
    )


def _put_when_compiled(
    scope: dict[str, Any], kernels: Mapping[str, CppKernel]
) -> Callable[[], None]:
    """Begin to compile kernels of a module. The function that is returned waits for
    them and puts their functions in the module's ``scope``, as the first call of one
    does."""
    functions = _begun(list(kernels.values()))

    @functools.cache
    def put() -> None:
        scope.update(zip(kernels, functions(), strict=True))

    def late(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            put()
            return scope[name](*args)

        return call

    scope.update({name: late(name) for name in kernels})
    return put


@shortcut
@contextlib.contextmanager
def probes_remembered() -> Iterator[None]:
    """Skip trials of vector instructions that once worked on this machine, and of all
    after the best that work: torch starts a process for each kind, at every start, and
    a compiler for each at the first."""
    from torch._inductor import cpu_vec_isa

    isa, name = cpu_vec_isa.VecISA, "_probe_load"
    probe = getattr(isa, name)

    def remembered(self: Any, output_path: str) -> bool:
        worked = Path(f"{output_path}.{_machine()}.works")
        if worked.exists() or str(self) == _INSTRUCTIONS.name:
            return True
        works = bool(probe(self, output_path))
        if works:
            with contextlib.suppress(OSError):
                worked.touch()
        return works

    every = cpu_vec_isa.valid_vec_isa_list

    def best() -> list[Any]:
        # Torch tries further flags in the one object that it has for a kind: another
        # thread may keep these, and compile with them what is never found again.
        with _TRYING:
            return _best_instructions(every)

    with (
        mock.patch.object(isa, name, remembered),
        mock.patch.object(isa, "_remembers", True, create=True),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", best),
    ):
        yield


_TRYING = threading.RLock()


@dataclass
class _Instructions:
    """Holds the vector instructions that kernels of this process are compiled for."""

    name: str = ""  # empty until some were tried, or another rank reported them


_INSTRUCTIONS = _Instructions()


def instructions() -> str:
    """Return the vector instructions that were tried first and work; empty if none
    were."""
    return _INSTRUCTIONS.name


def take_instructions(name: str) -> None:
    """Compile kernels for the instructions that another rank found to work. A rank that
    tries them itself, on a machine that is busy, may get another result: it would then
    compile anew what the other has compiled."""
    _INSTRUCTIONS.name = name or _INSTRUCTIONS.name


def _best_instructions(every: Callable[[], list[Any]]) -> list[Any]:
    """Return the kind of vector instructions that was taken, if this machine has it,
    else the first that works here, alone; all of ``every()`` where the user chooses
    one, or on machines other than x86."""
    from torch._inductor import config, cpu_vec_isa

    chosen = config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
    if chosen or platform.machine() not in ("x86_64", "AMD64"):
        return every()
    flags = set(cpu_vec_isa.x86_isa_checker())
    kinds = cpu_vec_isa.supported_vec_isa_list
    here = [isa for isa in kinds if set(str(isa).split()) <= flags]
    same = [isa for isa in here if str(isa) == _INSTRUCTIONS.name]
    best = same or list(itertools.islice(filter(None, here), 1))
    _INSTRUCTIONS.name = str(best[0]) if best else ""
    return best


def probe_in_background() -> None:
    """Begin to try vector instructions in another thread, so that Inductor, which asks
    for them late, need not wait. Does nothing where some are known to work, and outside
    of ``probes_remembered``: the two would try the same."""
    from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

    if instructions() or not hasattr(VecISA, "_remembers"):
        return
    settings = contextvars.copy_context()
    threading.Thread(target=settings.run, args=(pick_vec_isa,), daemon=True).start()


def _machine() -> str:
    """Return a name for this machine's processor and this torch."""
    from torch._inductor.cpu_vec_isa import x86_isa_checker

    facts = platform.node(), platform.machine(), sorted(x86_isa_checker())
    return digest(repr((*facts, torch.__version__, torch.__file__)))


def _can_share_file(source: str) -> bool:
    """Return whether a kernel needs no header of its own, and defines no macro."""
    lines = (line.strip() for line in source.splitlines())
    says = (x for x in lines if x.startswith("#") and not x.startswith("#pragma"))
    return set(says) <= {_PREFIX} and len(_ENTRY.findall(source)) == 1


def _begun(kernels: Sequence[CppKernel]) -> Callable[[], list[Callable[..., Any]]]:
    """Begin to compile kernels. Return a function that returns their functions, in
    order."""
    batches, jobs = list(_batches(kernels)), list[_Job]()
    with _compiling_threads() as submit:

        def begin(work: Callable[[], Any]) -> _Job:
            jobs.append(_Job(work, submit(work)))
            return jobs[-1]

        libraries = [_library(batch, begin) for batch in batches]

    def functions() -> list[Callable[..., Any]]:
        for job in reversed(jobs):
            job.take_over()
        if not all(job.future.done() for job in jobs):
            collect_young()
        each = zip(batches, libraries, strict=True)
        return [
            _function(library(), i)
            for batch, library in each
            for i in range(len(batch))
        ]

    return functions


@dataclass(frozen=True)
class _Job:
    """Is a library that is to be compiled, as torch waits for it."""

    work: Callable[[], Any]  # compiles it
    future: Future[Any]  # the future of a thread that will run ``work``

    def take_over(self) -> None:
        """Compile it here, unless a thread has begun to: a waiting thread has nothing
        better to do."""
        if self.future.cancel():
            self.work()

    def result(self) -> None:
        if not self.future.cancelled():
            self.future.result()


@contextlib.contextmanager
def _compiling_threads() -> Iterator[Callable[..., Any]]:
    """Yield a function that submits work to compiling threads: as many as Inductor may
    use, or one if it may use none of its own."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() > 1:
        yield AsyncCompile.submit
        return
    alone = ThreadPoolExecutor(1)
    yield alone.submit
    alone.shutdown(wait=False)


def _batches(kernels: Iterable[CppKernel]) -> Iterator[list[CppKernel]]:
    batch: list[CppKernel] = []
    for kernel in kernels:
        batch.append(kernel)
        if sum(len(each.source) for each in batch) >= LIBRARY:
            yield batch
            batch = []
    if batch:
        yield batch


def _library(kernels: Sequence[CppKernel], submit: Any) -> Callable[[], Any]:
    """Begin to compile a library, unless it is stored already. Return a function that
    returns its ``path`` and its ``key``."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    class Library(Bindings):
        @classmethod
        def _get_uncompiled_header(cls, device: str) -> Any:
            # Torch preprocesses it first, 0.3 s in each process.
            return None if is_begun else super()._get_uncompiled_header(device)

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            return SimpleNamespace(path=path)  # torch adds its key

    bound = [_bound(kernel, i) for i, kernel in enumerate(kernels)]
    headers = dict.fromkeys([_PREFIX, *_INCLUDE.findall(Bindings.suffix_template)])
    macro = "#define PY_SSIZE_T_CLEAN"  # comes before the headers
    text = "\n".join([macro, *map(str.strip, headers), *bound])
    # Exists once a process began to compile the library; it need not have ended well.
    begun = Path(cache_dir(), "fxpar", f"{digest(text, 64)}.library")
    is_begun = begun.exists()
    with contextlib.suppress(OSError):
        begun.parent.mkdir(parents=True, exist_ok=True)
        begun.touch()
    compiled: Callable[[], Any] = Library.load_async(text, submit_fn=submit)
    return compiled


def _bound(kernel: CppKernel, i: int) -> str:
    """Return the text of a kernel of a library and of its binding to Python, under
    names of its own."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    name = f"kernel_{i}"
    types = (each.replace("const ", "") for each in kernel.types)
    arguments = (f"parse_arg<{each}>(args, {n})" for n, each in enumerate(types))
    binding = Bindings.suffix_template.format(
        arg_len=len(kernel.types),
        call_entry_func=f"{name}({', '.join(arguments)}); Py_RETURN_NONE;",
        entry_func=name,
        extra_parse_arg="",
    )
    source = _ENTRY.sub(rf"\1{name}(", kernel.source)
    return f"namespace of_{name} {{\n{source}\n{binding}\n}}"


def _function(library: Any, i: int) -> Callable[..., Any]:
    """Return a function of a library: each is a module of Python in the same file."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    name = f"kernel_{i}"
    entry: Any = type(name, (Bindings,), {"entry_function": name})
    return getattr(entry._load_library_inner(library.path, library.key), name)
