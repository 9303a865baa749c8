"""Check one random program: its ranks compute what one device computes."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch

from fxpar.errors import FxparWarning
from fxpar.passes.simulate.launches import is_collective, message_of
from fxpar.sharding.cost.recompute import phases
from tests.helpers import device
from tests.helpers.random_programs import Case

_KINDS = {
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "permute": "permute",
}


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def agree(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Gradients by name; one that is missing is zero."""
    for name in got.keys() | want.keys():
        a, b = got.get(name), want.get(name)
        x = torch.zeros_like(b) if a is None else a
        close(x, torch.zeros_like(x) if b is None else b)


def collectives(graph: torch.fx.Graph) -> Counter:
    """Collectives by kind that a forward or a backward of a local graph runs: what
    draws random numbers stands in it also where neither needs it."""
    run = [node for phase in phases(graph) for node in phase]
    sent = [node for node in run if is_collective(node)]
    return Counter(
        message_of(node)[0]
        if node.target is torch.ops.fxpar.move_rows.default
        else _KINDS[node.target.overloadpacket.__name__]
        for node in sent
    )


def check(case: Case) -> None:
    """The plan of a case computes what its one-device graph computes and, unless it
    draws random numbers, what eager mode does. Its collectives are those it lists."""
    plan = case.plan()
    torch.manual_seed(0)
    got = plan.outcome(*case.tensors())
    torch.manual_seed(0)
    want = plan.reference_outcome(*case.tensors())
    close(got.result, want.result)
    close(got.gradients, want.gradients)
    close(got.mutations, want.mutations)
    assert collectives(plan.result.local) == Counter(c.kind for c in plan.collectives)
    if not case.draws:
        result, gradients, buffers = case.eager()
        close(want.result, result)
        agree(want.gradients, gradients)
        close({**case.buffers, **want.mutations}, buffers)


def run(seed: int, make: type[Case] = Case) -> None:
    with device.by_default():
        case = make(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FxparWarning)  # dims that do not divide
                check(case)
        except Exception as error:
            error.add_note(str(case))
            raise
