"""Run a test where Triton is an interpreter, which it is for a whole process or never.

Tests marked ``interpreted`` run in a process with TRITON_INTERPRET=1 that stays, one
for all of them. Where this process has TRITON_INTERPRET=1 they run right here, as any
other test, so that a breakpoint works:

    TRITON_INTERPRET=1 pytest --pdb tests/fusion/kernels/test_interpreted.py
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import pytest


def is_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def call(item: pytest.Function) -> None:
    """Call a marked test: in this process, or in the one that stays."""
    __tracebackhide__ = True
    names = item._fixtureinfo.argnames
    values = {name: item.funcargs[name] for name in names}
    if is_interpreter():
        prepare()
        item.obj(**values)
        return
    test = item.function.__module__, item.function.__name__
    seconds = 3000.0 if item.get_closest_marker("slow") else 300.0
    _pool().run(call_there, *test, values, timeout=seconds)


def run_interpreted(fn: Callable[..., Any], *args: Any, seconds: float = 600.0) -> Any:
    """What a function returns in the process where Triton is an interpreter."""
    if is_interpreter():
        prepare()
        return fn(*args)
    name = fn.__module__, getattr(fn, "__name__", "")
    (result,) = _pool().run(call_there, *name, {}, args, timeout=seconds)
    return result


@functools.cache
def _pool() -> Any:
    # Imports torch, which pytest's own process, that has no tests, need not wait for.
    from tests.helpers.spawn import Pool

    pool = Pool(1, env={"TRITON_INTERPRET": "1"}, group=False)
    atexit.register(pool.close)
    return pool


def call_there(
    module: str, name: str, values: dict[str, Any], args: tuple[Any, ...] = ()
) -> Any:
    """Call a function by name, in the process that stays."""
    _rewrite_asserts()
    prepare()
    return getattr(importlib.import_module(module), name)(*args, **values)


@functools.cache
def _rewrite_asserts() -> None:
    """Let a failed assert of a test show its values, as under pytest."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config()).mark_rewrite("tests.fusion")


@functools.cache
def prepare() -> None:
    """Let kernels' outputs begin as NaN, and the interpreter round as devices do."""
    import torch

    from fxpar.fusion.kernels import run_kernels
    from tests.helpers.kernels.compare_kernels import poisoned, round_as_devices

    run_kernels.empty = poisoned
    round_as_devices()
    patch_once()
    torch.set_num_threads(1)


def patch_once() -> None:
    """Let the interpreter put its functions into ``triton.language`` once for a kernel:
    it would for each call of a device function, a quarter of the time of a kernel."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set[Any]()

    def patch_what_is_not(fn: Any) -> Any:
        languages = {x for x in (tl, tl.core) if x in modules_of(fn)}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        patched.update(languages)
        return scope

    interpreter._patch_lang = patch_what_is_not


@functools.cache
def modules_of(fn: Callable[..., Any]) -> frozenset[types.ModuleType]:
    """The modules that a function may name."""
    names = fn.__globals__.values()
    return frozenset(x for x in names if isinstance(x, types.ModuleType))
