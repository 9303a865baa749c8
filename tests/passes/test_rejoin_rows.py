"""Which joins a backward computes again, of the rows around a shard."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.features.uneven.rejoin_rows import rejoin_rows
from tests.helpers.sketch import Sketch, check_equal

aten = torch.ops.aten
SETTINGS = [1, 1], [0, 1], [1, 1], False, [0, 0], 1


def joined(dim: int, *, forward: bool = True, backward: bool = True) -> Sketch:
    """Images joined along a dim, and a convolution of them with its backward."""
    sketch = Sketch()
    x, y, w = (sketch.input(*n) for n in [(2, 4, 6, 5)] * 2 + [(3, 4, 3, 3)])
    if dim == 1:
        w = sketch.input(3, 8, 3, 3)
    call = sketch.rewriter.call
    rows = call(aten.cat.default, [x, y], dim)
    results = [call(aten.exp.default, rows)]
    if forward:
        results.append(call(aten.convolution.default, rows, w, None, *SETTINGS))
    if backward:
        out = call(aten.convolution.default, rows, w, None, *SETTINGS)
        mask = [False, True, False]
        op = aten.convolution_backward.default
        both = call(op, out, rows, w, None, *SETTINGS, mask)
        results.append(call(operator.getitem, both, 1))
    sketch.output(*results)
    return sketch


def tags(graph: fx.Graph) -> list[Any]:
    return [node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta]


@pytest.mark.parametrize("dim", [2, 3, -1])
def test_joins_of_rows_are_computed_again(dim: int) -> None:
    sketch = joined(dim)
    want, before = sketch.run(), str(sketch.graph)
    rejoin_rows(sketch.graph)
    assert tags(sketch.graph) == [CheckpointPolicy.PREFER_RECOMPUTE]
    assert str(sketch.graph) == before
    check_equal(sketch.run(), want)


def test_not_joins_of_channels() -> None:
    sketch = joined(1)
    rejoin_rows(sketch.graph)
    assert not tags(sketch.graph)


def test_not_what_no_backward_reads() -> None:
    sketch = joined(2, backward=False)
    rejoin_rows(sketch.graph)
    assert not tags(sketch.graph)


def test_a_tag_of_the_user_stays() -> None:
    sketch = joined(2)
    (rows,) = sketch.graph.find_nodes(op="call_function", target=aten.cat.default)
    rows.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    rejoin_rows(sketch.graph)
    assert tags(sketch.graph) == [CheckpointPolicy.MUST_SAVE]
