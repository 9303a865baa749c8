"""FX graphs, built and cleaned with less looked at anew for each node.

In: ``torch.fx`` (2.13), as torch and fxpar build graphs of thousands of nodes with it.
Out: the same graphs, in less time. Never changes what a graph is, or when it is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree


@dataclass
class _OpenCount:
    """Contexts that are open, of all threads."""

    # How many.
    count: int = 0
    # What the last one undoes.
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


_OPEN, _LOCK = _OpenCount(), threading.Lock()


@contextlib.contextmanager
def quick_graphs() -> Iterator[None]:
    """Context in which graphs are built so, by all threads."""
    with _LOCK:
        _OPEN.count += 1
        if _OPEN.count == 1:
            _OPEN.stack.enter_context(_plain_arguments_unread())
            _OPEN.stack.enter_context(_names_parted_once())
            _OPEN.stack.enter_context(_modules_lazy())
            _OPEN.stack.enter_context(_dead_code_looked_for())
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.count -= 1
            if not _OPEN.count:
                _OPEN.stack.close()


# Arguments of a node that are no symbols and hold none.
_PLAIN = frozenset(
    (
        *(fx.Node, int, float, bool, str, type(None), torch.dtype, torch.device),
        *(torch.layout, torch.memory_format),
    )
)
_SEQUENCES = frozenset((list, tuple, fx.immutable_collections.immutable_list))


class _Leaves:
    """``torch.utils._pytree`` as ``fx.graph`` is given it: 2.13 goes through the leaves
    of all arguments of each new node to warn of symbols among them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_pytree, name)

    def tree_iter(self, tree: Any, is_leaf: Any = None) -> Iterable[Any]:
        args, kwargs = tree
        if is_leaf is None and _all_plain(args) and _all_plain(kwargs.values()):
            return ()
        return _pytree.tree_iter(tree, is_leaf)


def _all_plain(values: Iterable[Any]) -> bool:
    for x in values:
        kind = type(x)
        if kind not in _PLAIN and not (
            kind in _SEQUENCES and all(type(y) in _PLAIN for y in x)
        ):
            return False
    return True


def _plain_arguments_unread() -> contextlib.AbstractContextManager[Any]:
    """Plain arguments are not gone through for symbols. Nothing to do for a torch whose
    ``fx.graph`` does not look for them so (2.11)."""
    if getattr(fx.graph, "pytree", None) is not _pytree:
        return contextlib.nullcontext()
    return mock.patch.object(fx.graph, "pytree", _Leaves())


class _Remembered:
    """A regular expression that knows what it has matched."""

    def __init__(self, regex: Any) -> None:
        self.match = functools.lru_cache(maxsize=_NAMES)(regex.match)


# So many names are remembered; a graph of 32 layers has a fifth of them.
_NAMES = 1 << 15


def _names_parted_once() -> contextlib.AbstractContextManager[Any]:
    """A name is parted into its word and number once, not for each copy of a graph.
    Nothing to do for a torch that does so by another name."""
    name = "_name_regex"
    if not hasattr(fx.graph, name):
        return contextlib.nullcontext()
    regex = getattr(fx.graph, name)
    return mock.patch.object(fx.graph, name, _Remembered(regex))


def _modules_lazy() -> contextlib.AbstractContextManager[Any]:
    """Modules of graphs are torch's lazy ones, as most are while it compiles: Python
    code is written when it is read or run, which that of few graphs is."""
    from torch.fx import _lazy_graph_module as lazy

    plain = fx.GraphModule.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        named = (x for x in cls.__mro__ if x.__name__ != "GraphModuleImpl")
        if (
            next(named) is fx.GraphModule
            and not lazy._force_skip_lazy_graph_module_flag
        ):
            cls = lazy._LazyGraphModule
        return plain(cls, *args, **kwargs)

    return mock.patch.object(fx.GraphModule, "__new__", staticmethod(new))


def _dead_code_looked_for() -> contextlib.AbstractContextManager[Any]:
    """What is read is no dead code: torch asks of each node whether it has side
    effects, and only then whether it is read."""
    eliminate, is_impure = fx.Graph.eliminate_dead_code, fx.Node.is_impure

    def is_read_or_impure(self: fx.Node, *args: Any, **kwargs: Any) -> bool:
        return bool(self.users) or is_impure(self, *args, **kwargs)

    def eliminate_dead_code(self: fx.Graph, *args: Any, **kwargs: Any) -> bool:
        with mock.patch.object(fx.Node, "is_impure", is_read_or_impure):
            return eliminate(self, *args, **kwargs)

    return mock.patch.object(fx.Graph, "eliminate_dead_code", eliminate_dead_code)
