"""Shortcuts of Dynamo: what it looks up, imports or computes for nothing is left out.

In: a frame that Dynamo traces for fxpar. Out: the same graph and guards, in less time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fxpar._torch.known_sizes import sizes_known


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Context of a trace in which all are taken."""
    with (
        unread_names(),
        untimed_guards(),
        late_local_map(),
        unmade_values(),
        sizes_known(),
    ):
        yield


@contextlib.contextmanager
def unread_names() -> Iterator[None]:
    """Context in which Dynamo does not look up in which function a line of the user's
    stands: torch (2.13) parses whole files for a log of calls that few ask for."""
    from torch._dynamo import symbolic_convert
    from torch._logging._internal import log_state

    if any(map(log_state.is_artifact_enabled, ("trace_call", "trace_source"))):
        yield
        return
    with mock.patch.object(symbolic_convert, "get_funcname", lambda *_: None):
        yield


def untimed_guards() -> contextlib.AbstractContextManager[Any]:
    """Context in which guards are not run once more for a log of how long they take,
    behind an emptying of the processor's caches; that they hold is seen before."""
    from torch._dynamo import guards

    name = "profile_guard_manager"
    if guards.guards_log.isEnabledFor(logging.DEBUG) or not hasattr(guards, name):
        return contextlib.nullcontext()
    return mock.patch.object(guards, name, lambda *_: 0.0)


def late_local_map() -> contextlib.AbstractContextManager[Any]:
    """Context in which Dynamo does not import the module of a function of torch's to
    see that what the user calls is another: it is, as long as nobody imported that."""
    from torch._dynamo.variables import higher_order_ops

    home = "torch.distributed.tensor.experimental._func_map"
    dynamo: Any = higher_order_ops
    local_map = getattr(dynamo, "LocalMapWrappedHigherOrderVariable", None)
    if local_map is None:
        return contextlib.nullcontext()
    ask = local_map.should_wrap_in_hop

    def should_wrap_in_hop(value: Any) -> bool:
        return home in sys.modules and ask(value)

    return mock.patch.object(
        local_map, "should_wrap_in_hop", staticmethod(should_wrap_in_hop)
    )


@contextlib.contextmanager
def unmade_values() -> Iterator[None]:
    """Context in which a value on open sizes is kept for the next op like this one, and
    no second one made to see that its dispatch keys are the same: sizes have no part in
    these, so one of no elements tells."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import symbol_is_type
    from torch.utils._sympy.symbol import SymT

    mode_type: Any = fake_tensor.FakeTensorMode
    name = "_get_output_info_for_cache_entry"
    keep = getattr(mode_type, name)
    if hasattr(keep, "fxpar"):  # inside such a context already
        yield
        return

    def info(self: Any, state: Any, *args: Any) -> Any:
        symbols = state.known_symbols
        unknown = any(symbol_is_type(x, SymT.UNBACKED_INT) for x in symbols)
        if not symbols or unknown:
            return keep(self, state, *args)
        make = self._output_from_cache_entry

        def make_empty(state: Any, entry: Any, *args: Any) -> Any:
            return make(state, _without_elements(entry), *args)

        self._output_from_cache_entry = make_empty
        try:
            return keep(self, state, *args)
        finally:
            del self._output_from_cache_entry

    info.fxpar = True  # type: ignore[attr-defined]
    with mock.patch.object(mode_type, name, info):
        yield


def _without_elements(entry: Any) -> Any:
    """What is kept of a value, as of one that has no elements."""
    empty = {"shape": (0,), "stride": (1,), "storage_offset": 0, "storage_bytes": None}
    infos = tuple(
        dataclasses.replace(x, metadata=dataclasses.replace(x.metadata, **empty))
        for x in entry.output_infos
    )
    return dataclasses.replace(entry, output_infos=infos)
