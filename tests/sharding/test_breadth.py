"""PyTorch's OpInfos on small meshes: no number is wrong, and nearly every op that they
reach, forward and backward, has a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpar.sharding.op_table import Row
from fxpar.sharding.ops import TABLE, pointwise
from tests.helpers.all_ops import Trial, name_of, shares, trial

PARTS = 16
TRIALS: dict[str, Trial] = {}

# OpInfos that reach an op without a rule, and why there is none.
LEFT = {
    "as_strided": "strides that are no reshape",
    "as_strided.partial_views": "of a view, whose strides skip over memory",
    "as_strided_copy": "strides that are no reshape",
    "as_strided_scatter": "strides that are no reshape",
    "nn.functional.embedding": "max_norm rescales rows of the table in place",
    "nn.functional.embedding_bag": "max_norm rescales rows of the table in place",
    "resize_as_": "memory read in another shape, some of it undefined",
    "to_sparse": "a sparse result",
}


def infos() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def called(name: str) -> Any:
    return next(info for info in infos() if name_of(info) == name)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_number_is_wrong(part: int) -> None:
    found = [trial(info) for info in infos()[part::PARTS]]
    TRIALS.update({t.name: t for t in found})
    assert sum(t.runs for t in found) > 100
    assert sum(t.split for t in found) > 0.8 * sum(t.runs for t in found)
    wrong = [f"{t.name}: {text}" for t in found for text in t.wrong]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_nearly_every_op_has_a_rule() -> None:
    if len(TRIALS) < len(infos()):
        pytest.skip("counts what all parts of test_no_number_is_wrong found")
    tried, ruled = shares(list(TRIALS.values()))
    assert tried >= 640
    assert ruled >= 0.97 * tried, f"{ruled} of {tried}"
    unknown = {t.name: sorted(t.unknown) for t in TRIALS.values() if t.unknown}
    assert unknown.keys() <= LEFT.keys(), unknown


@pytest.mark.slow
def test_an_op_is_tried_in_every_way() -> None:
    found = trial(called("linalg.eigh"), samples=1)
    assert found.split and not found.wrong and not found.unknown


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    key = torch.ops.aten.linalg_matrix_exp.default
    monkeypatch.setitem(TABLE, key, Row(pointwise.broadcast))
    assert trial(called("matrix_exp"), samples=1).wrong
