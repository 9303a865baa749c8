"""CoCoNeT's programs on four gloo ranks, a pipeline's on two stages of two: before and
after their schedules they give what one device gives, and what is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers.schedule_cases import CASES, Case, run_all
from tests.helpers.spawn import shared_pool

EXACT, DOUBLE = 1e-14, 1e-12


def results(given: Any) -> list[torch.Tensor]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def close(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(results(got), results(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def problems(case: Case, ranks: Sequence[tuple[Any, Any]]) -> None:
    """Compare what ranks gave, before and after."""
    for i, graphs in enumerate(case.graphs()):
        gives = case.then if i else case.gives
        whole, simulated = case.one_device(gives), case.simulated(graphs)
        for rank, gave in enumerate(ranks):
            close(gave[i], whole[rank], case.tolerance)
            # Of float32, the order of summands shows.
            single = case.tolerance > DOUBLE
            close(gave[i], simulated[rank], case.tolerance if single else EXACT)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Any, Any]]]:
    return shared_pool(4).run(run_all, list(CASES))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_ranks_give_what_one_device_gives(name: str, ranks: Any) -> None:
    problems(CASES[name](), [rank[name] for rank in ranks])
