"""Arguments taken apart in less time: the leaves and structure that torch gives."""

from __future__ import annotations

from collections import namedtuple
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._functorch import compile_utils, partitioners
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree

from fxpar._torch.quick_trees import quick_trees

Pair = namedtuple("Pair", "a b")
GRAPH = fx.Graph()
X = GRAPH.placeholder("x")

PLAIN: list[Any] = [
    *((), (X, X), (X, 1, None), (X, [2, 3]), (immutable_list([X, X]), 1)),
    *((X, (2, 3), True, "sum"), (torch.float32, torch.device("cpu"))),
]
OTHERS: list[Any] = [
    *((X, [[2], 3]), (X, {"a": X}), (Pair(X, X),), (slice(X, 1),)),
    *(immutable_dict(a=X), [X], X, Pair(X, X)),
]


@pytest.mark.parametrize("tree", PLAIN + OTHERS, ids=str)
def test_trees_come_apart_as_by_torch(tree: Any) -> None:
    want = _pytree.tree_flatten(tree)
    with quick_trees():
        assert compile_utils.tree_flatten(tree) == want
        leaves, spec = compile_utils.tree_flatten(tree)
        assert partitioners.pytree.arg_tree_leaves(tree) == want[0]
        assert partitioners.pytree.arg_tree_leaves(X, a=tree) == [X, *want[0]]
    rebuilt = _pytree.tree_unflatten(leaves, spec)
    assert rebuilt == tree and type(rebuilt) is type(tree)
    assert compile_utils.tree_flatten is _pytree.tree_flatten
    assert partitioners.pytree is _pytree


def test_structures_of_one_shape_are_made_once() -> None:
    with quick_trees():
        flatten = compile_utils.tree_flatten
        _, spec = flatten((X, [1, 2]))
        with mock.patch.object(_pytree, "tree_flatten", side_effect=AssertionError):
            leaves, again = flatten((X, [3, X]))
        assert leaves == [X, 3, X] and again is spec
        assert flatten((X, (1, 2)))[1] != spec


def test_symbols_are_left_to_torch() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    symbol = ShapeEnv().create_unbacked_symint()
    asked = mock.Mock(side_effect=_pytree.tree_flatten)
    with mock.patch.object(_pytree, "tree_flatten", asked):
        compile_utils.tree_flatten = _pytree.tree_flatten
        try:
            with quick_trees():
                compile_utils.tree_flatten((X, symbol))
        finally:
            compile_utils.tree_flatten = asked.side_effect
    assert asked.called
