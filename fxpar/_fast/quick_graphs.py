"""Builds and cleans FX graphs with less work for each node.

In: ``torch.fx`` (2.13), with which torch and fxpar build graphs of thousands of nodes.
Out: the same graphs, in less time. Never: changes what a graph is, or when it is wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree

from fxpar._fast.switch import shortcut

# Arguments that are no symbols.
LEAVES = frozenset(
    (
        *(fx.Node, int, float, bool, str, type(None), torch.dtype, torch.device),
        *(torch.layout, torch.memory_format),
    )
)
# Types of sequences of such arguments.
SEQUENCES = frozenset((list, tuple, fx.immutable_collections.immutable_list))


@shortcut
@contextlib.contextmanager
def quick_graphs() -> Iterator[None]:
    """Build graphs in less time inside."""
    with (
        _plain_arguments_unread(),
        _names_split_once(),
        _graphs_looked_at_once(),
        _modules_lazy(),
        _dead_code_looked_for(),
    ):
        yield


class _Leaves:
    """Is ``torch.utils._pytree`` for ``fx.graph``: 2.13 goes through the leaves of all
    arguments of each new node to warn of symbols among them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_pytree, name)

    def tree_iter(self, tree: Any, is_leaf: Any = None) -> Iterable[Any]:
        args, kwargs = tree
        if (
            is_leaf is None
            and _has_only_plain(args)
            and _has_only_plain(kwargs.values())
        ):
            return ()
        return _pytree.tree_iter(tree, is_leaf)


def _has_only_plain(values: Iterable[Any]) -> bool:
    for x in values:
        kind = type(x)
        if kind not in LEAVES and not (
            kind in SEQUENCES and LEAVES.issuperset(map(type, x))
        ):
            return False
    return True


def _plain_arguments_unread() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which plain arguments are not searched for symbols."""
    return mock.patch.object(fx.graph, "pytree", _Leaves())


class _Remembered:
    """Is a regular expression that remembers what it has matched."""

    def __init__(self, regex: Any) -> None:
        self.match = functools.lru_cache(maxsize=_NAMES)(regex.match)


# The number of names remembered; a graph of 32 layers has a fifth of them.
_NAMES = 1 << 15


def _names_split_once() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a name is split into its word and number once, not for
    each copy of a graph."""
    regex: Any = vars(fx.graph)["_name_regex"]
    return mock.patch.object(fx.graph, "_name_regex", _Remembered(regex))


def _graphs_looked_at_once() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which one pass checks that a graph is well formed; where it
    is not, torch says why."""
    lint = fx.Graph.lint

    def quick_lint(self: fx.Graph) -> None:
        if not _is_well_formed(self):
            lint(self)

    return mock.patch.object(fx.Graph, "lint", quick_lint)


def _is_well_formed(graph: Any) -> bool:
    """Return whether ``graph.lint()`` accepts a graph; also False where it would take
    longer to know."""
    seen: set[fx.Node] = set()
    names: set[str] = set()
    table, module = graph._find_nodes_lookup_table.table, graph.owning_module
    tables: dict[int, Any] = {}  # by id of target: hashing some is slow Python
    for node in graph.nodes:
        op, target = node.op, node.target
        if op == "call_function":
            if id(target) not in tables:
                tables[id(target)] = table.get((op, target), ())
            candidates = tables[id(target)]
            is_right = module is None or callable(target)
        else:
            candidates = table.get((op, None), ())
            is_right = module is None or _is_there(module, op, target)
        if (
            not is_right
            or op not in _OPS
            or node.graph is not graph
            or node not in candidates
            or not seen.issuperset(node._input_nodes)
            or node.name in names
        ):
            return False
        seen.add(node)
        names.add(node.name)
    return True


_OPS = frozenset(
    ("placeholder", "call_method", "call_module", "call_function", "get_attr", "output")
)


def _is_there(module: Any, op: str, target: Any) -> bool:
    """Return whether a module has the attribute that a node of its graph names, if it
    is plain."""
    if op == "call_module" or type(target) is not str:
        return False
    if op == "get_attr":
        for part in target.split("."):
            module = getattr(module, part, None)
    return module is not None


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
