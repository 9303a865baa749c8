"""Code that another rank compiled, by its key in AOTAutograd's cache.

In: a graph, and the key under which the rank that compiled it left it. Out: the
callable that it has; None where nothing lies under the key. Inductor's lowerings, a
quarter of a second of imports, are left alone: what is loaded asks for names of a few
modules that come with them, and is given these late. On CPUs; where nothing is loaded,
compiling (``aot.compile_fx``) finds out by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import fx

from fxpar._torch import aot
from fxpar._torch.cpp_kernels import BEHIND_ALL, kernels_in_libraries
from fxpar._torch.inductor_shortcuts import unread_texts

# Kernels that Inductor calls by the names that torch has for them.
KERNELS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm")


# Who imports lowerings meanwhile would be given the stand-ins, and keep them.
NO_STAND_INS = threading.RLock()


class _NothingThere(Exception):
    """Nothing lies under a key."""


@contextlib.contextmanager
def keys_noted() -> Iterator[list[str]]:
    """Context that gives the keys in AOTAutograd's cache of what is compiled inside."""
    from torch._functorch._aot_autograd import autograd_cache

    keys: list[str] = []
    ask = autograd_cache.autograd_cache_key

    def key_of(*args: Any, **kwargs: Any) -> Any:
        key, *more = ask(*args, **kwargs)
        keys.append(key)
        return key, *more

    with mock.patch.object(autograd_cache, "autograd_cache_key", key_of):
        yield keys


def can_load() -> bool:
    """Whether this torch's cache gives what lies in it as 2.13's does, together with
    the settings that it is to be run by; 2.11's gives a function alone."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    takes = inspect.signature(AOTAutogradCache.try_load).parameters
    return aot.can_compile_backward() and "compiler_config_extra" in takes


def load(
    gm: fx.GraphModule, examples: Sequence[Any], key: str
) -> Callable[..., Any] | None:
    """What another rank's ``compile_fx`` gave for this graph, with fixed sizes."""
    from torch._functorch._aot_autograd import autograd_cache

    _late_debug()
    cache = autograd_cache.AOTAutogradCache
    ask: Any = cache.try_load

    def try_load(*args: Any, **kwargs: Any) -> Any:
        compiled, config = ask(*args, **kwargs)
        if compiled is None:
            raise _NothingThere
        return compiled, config

    with (
        NO_STAND_INS,
        mock.patch.object(cache, "try_load", staticmethod(try_load)),
        mock.patch.object(autograd_cache, "autograd_cache_key", lambda *_: (key, [])),
        late_modules(),
        unread_texts(),
        kernels_in_libraries(BEHIND_ALL),
        contextlib.suppress(_NothingThere),
    ):
        return _compiled(gm, aot.with_symbols(gm, examples))
    return None


def _compiled(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """As Inductor's ``compile_fx``, of what lies in AOTAutograd's cache."""
    import torch._functorch.config as functorch_config
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import compiled_autograd
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.output_code import OutputCode
    from torch._inductor.virtualized import V

    def refuse(*_: Any) -> Any:
        raise _NothingThere

    mode = detect_fake_mode(fakes)
    # As ``compile_fx`` sets them, ours and Inductor's.
    settings = {"enable_autograd_cache": True, "unlift_effect_tokens": True}
    with (
        functorch_config.patch({**settings, aot.NOW: True}),
        enable_python_dispatcher(),
        V.set_fake_mode(mode),
        tracing(TracingContext.try_get() or TracingContext(mode)),
        compiled_autograd._disable(),
    ):
        compiled = aot_module_simplified(
            cast(Any, gm),
            fakes,
            fw_compiler=SerializableAOTDispatchCompiler(OutputCode, refuse),
            decompositions={},
            keep_inference_input_mutations=True,
            ignore_shape_env=True,
        )
    disabled: Any = torch._dynamo.disable(compiled)
    return cast(Callable[..., Any], disabled)


def _late_debug() -> None:
    """Where code looks into ``torch._inductor.debug`` when it runs: a module with the
    one switch it looks at, off, until somebody imports the one that can set it."""
    import torch._inductor

    if not hasattr(torch._inductor, "debug"):
        switches = {"RECORD_GRAPH_EXECUTION": False}
        late: Any = _LateModule("torch._inductor.debug", switches)
        torch._inductor.debug = late


@contextlib.contextmanager
def late_modules() -> Iterator[None]:
    """Context in which modules that import Inductor's lowerings stand for themselves,
    with the names that code of Inductor's asks for when it is loaded. One that is asked
    for another name is imported."""
    from torch._inductor import utils

    names: dict[str, dict[str, Any]] = {
        "torch._inductor.select_algorithm": {"extern_kernels": _Kernels()},
        "torch._inductor.codegen.memory_planning": {"_align": utils._align},
        # Asked whether tests of torch's look at the code.
        "torch._inductor.graph": {
            "GraphLowering": SimpleNamespace(save_output_code=None)
        },
    }
    late = {
        name: _LateModule(name, has)
        for name, has in names.items()
        if name not in sys.modules
    }
    sys.modules.update(late)
    try:
        yield
    finally:
        for module in late.values():
            module.leave()


class _LateModule(types.ModuleType):
    """A module with some of its names, imported when it is asked for another."""

    def __init__(self, name: str, has: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(has)

    def leave(self) -> None:
        """Let the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)


class _Kernels:
    """Inductor's ``extern_kernels``: those of torch by their names; of others, those
    that its lowerings bring, which are then imported."""

    def __getattr__(self, name: str) -> Any:
        if name in KERNELS:
            return getattr(torch, name)
        module = importlib.import_module("torch._inductor.select_algorithm")
        return getattr(module.extern_kernels, name)
