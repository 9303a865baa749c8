"""Builds and cleans FX graphs with less work for each node.

In: ``torch.fx`` (2.13), with which torch and fxpar build graphs of thousands of nodes.
Out: the same graphs, in less time. Never: changes what a graph is, or when it is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import fx
from torch.utils import _pytree

from fxpar._fast.switch import shortcut


@shortcut
@contextlib.contextmanager
def quick_graphs() -> Iterator[None]:
    """Build graphs in less time inside."""
    with _plain_arguments_unread(), _modules_lazy(), _dead_code_looked_for():
        yield


def _plain_arguments_unread() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which nobody goes through the leaves of all arguments of each
    new node, as torch does only to warn its developers of symbols among them."""
    unread = {**vars(_pytree), "tree_iter": lambda *_: ()}
    return mock.patch.object(fx.graph, "pytree", SimpleNamespace(**unread))


def _modules_lazy() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which modules of graphs are torch's lazy ones, as most are
    while it compiles: Python code is written when it is read or run, which few graphs'
    is."""
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
    """Return a context in which a node that is read is no dead code: torch asks of each
    node first whether it has side effects, and only then whether it is read."""
    eliminate, is_impure = fx.Graph.eliminate_dead_code, fx.Node.is_impure

    def is_read_or_impure(self: fx.Node, *args: Any, **kwargs: Any) -> bool:
        return bool(self.users) or is_impure(self, *args, **kwargs)

    def eliminate_dead_code(self: fx.Graph, *args: Any, **kwargs: Any) -> bool:
        with mock.patch.object(fx.Node, "is_impure", is_read_or_impure):
            return eliminate(self, *args, **kwargs)

    return mock.patch.object(fx.Graph, "eliminate_dead_code", eliminate_dead_code)
