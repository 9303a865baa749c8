"""Whole steps with the batch in microbatches, on ranks: losses, buffers and the
optimizer's state are those of one device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.spawn import shared_pool
from tests.helpers.whole_steps import whole_steps

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

STEPS = 3


@pytest.mark.parametrize(
    ("shard", "inputs"),
    [
        (True, "local"),
        pytest.param(False, "global", marks=pytest.mark.slow),
        pytest.param(False, "local", marks=pytest.mark.slow),
        pytest.param(True, "global", marks=pytest.mark.slow),
    ],
)
def test_whole_steps_are_those_of_one_device(shard: bool, inputs: str) -> None:
    options = {"mesh": "dp=2", "codegen": "eager", "microbatches": 2, "inputs": inputs}
    options["plan"] = "propagate"
    if inputs == "global":
        wants = [whole_steps(None, STEPS)] * 2
    else:  # norms are of a rank's own rows
        plain = options | {"microbatches": 1}
        wants = shared_pool(2).run(whole_steps, plain, STEPS, shard)
    ranks = shared_pool(2).run(whole_steps, options, STEPS, shard)
    for got, want in zip(ranks, wants, strict=True):
        assert any("2 microbatches" in note for note in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for kind in ("state", "moments", "buffers"):
            for name, x in want[kind].items():
                torch.testing.assert_close(got[kind][name], x, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_what_does_not_divide_is_cut_in_fewer_parts() -> None:
    options = {"mesh": "dp=2", "codegen": "eager", "microbatches": 4}
    want = whole_steps(None, STEPS, size=6)
    for got in shared_pool(2).run(whole_steps, options, STEPS, False, 6):
        # 3 rows on a rank, if the plan splits the batch, else 6.
        assert any("and are cut into 3" in x for x in got["notes"])
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
