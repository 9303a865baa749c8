"""Arguments of nodes, taken apart as torch's pytree does, in less time.

In: modules of torch that go through the arguments of each node of a graph. Out: the
same leaves and structure; what is not made of nodes, numbers and lists of these is left
to torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree

# Leaves of arguments, that are no symbols.
LEAVES = frozenset(
    (
        *(fx.Node, int, float, bool, str, type(None), torch.dtype, torch.device),
        *(torch.layout, torch.memory_format),
    )
)
# Of several leaves.
SEQUENCES = frozenset((list, tuple, fx.immutable_collections.immutable_list))


@contextlib.contextmanager
def quick_trees() -> Iterator[None]:
    """Context in which AOTAutograd takes arguments apart so."""
    from torch._functorch import compile_utils, partitioners

    with contextlib.ExitStack() as stack:
        if getattr(compile_utils, "tree_flatten", None) is _pytree.tree_flatten:
            flatten = _Flattened().flatten
            patch = mock.patch.object(compile_utils, "tree_flatten", flatten)
            stack.enter_context(patch)
        if getattr(partitioners, "pytree", None) is _pytree:
            stack.enter_context(
                mock.patch.object(partitioners, "pytree", _LeavesOfArguments())
            )
        yield


class _LeavesOfArguments:
    """``torch.utils._pytree``, which finds the leaves of arguments quicker."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_pytree, name)

    def arg_tree_leaves(self, *args: Any, **kwargs: Any) -> list[Any]:
        leaves, shape = _apart((*args, *kwargs.values()))
        return _pytree.arg_tree_leaves(*args, **kwargs) if shape is None else leaves


class _Flattened:
    """Arguments apart: of the same shape they have one structure."""

    def __init__(self) -> None:
        self._specs: dict[Any, Any] = {}

    def flatten(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None = None
    ) -> tuple[list[Any], Any]:
        """As ``tree_flatten``."""
        leaves, shape = _apart(tree)
        if shape is None or is_leaf is not None:
            return _pytree.tree_flatten(tree, is_leaf)
        if shape not in self._specs:
            self._specs[shape] = _pytree.tree_flatten(tree)[1]
        return leaves, self._specs[shape]


def _apart(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tuple of leaves, and lists of them; and its shape, None of all
    that is something else."""
    if type(tree) is not tuple:
        return [], None
    leaves: list[Any] = []
    shape: list[Any] = []
    for x in tree:
        kind = type(x)
        if kind in LEAVES:
            leaves.append(x)
            shape.append(None)
        elif kind in SEQUENCES and LEAVES.issuperset(map(type, x)):
            leaves += x
            shape.append((kind, len(x)))
        else:
            return [], None
    return leaves, tuple(shape)
