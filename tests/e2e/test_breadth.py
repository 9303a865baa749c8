"""PyTorch's own sample calls (OpInfos) compiled by Inductor on two ranks: the results
and gradients of one device. What stock Inductor does not compile is left out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from tests.helpers.all_ops import EMPTY, OpCall, name_of, samples_of
from tests.helpers.spawn import shared_pool

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("propagated"),
]

PARTS = 64
Outcome = tuple[str, str]  # the name of an OpInfo, and what is wrong with it


def results(call: OpCall, fn: Any) -> list[torch.Tensor]:
    """What a call gives, and gradients of its operands."""
    leaves = [
        x.detach().clone().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor)
        else x
        for x in call.leaves
    ]
    out = [x for x in _pytree.tree_leaves(fn(leaves)) if isinstance(x, torch.Tensor)]
    smooth = [x for x in out if x.requires_grad]
    operands = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    if smooth and operands:
        total = sum(x.abs().square().sum() for x in smooth)
        grads = torch.autograd.grad(total, operands, allow_unused=True)
        out += [g for g in grads if g is not None]
    return [x.detach() for x in out]


def compiled(call: OpCall, backend: str, **how: Any) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    fn = torch.compile(lambda leaves: call.run(None, 0, leaves), backend=backend, **how)
    return results(call, fn)


def part(which: int, parts: int) -> tuple[int, list[Outcome]]:
    """How many calls of a part of the OpInfos were compared, and those that differ."""
    from torch.testing._internal.common_methods_invocations import op_db

    wrong, compared = [], 0
    warnings.simplefilter("ignore")
    for info in op_db[which::parts]:
        if name_of(info).split(".")[0] in EMPTY:  # nothing is written there
            continue
        for args, kwargs in list(samples_of(info, 1, _Silent())):
            call = OpCall(info, args, kwargs)
            try:
                want = compiled(call, "inductor")
            except Exception:  # not ours
                continue
            options = {"mesh": "dp=2", "plan": "propagate"}
            try:
                got = compiled(call, "fxpar", options=options)
                compared += 1
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(
                        a, b, rtol=1e-6, atol=1e-6, equal_nan=True
                    )
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                wrong.append((name_of(info), f"{type(error).__name__}: {text}"))
    return compared, wrong


class _Silent:
    """Takes why an OpInfo has no samples."""

    refused = ""


@pytest.mark.parametrize("which", range(PARTS))
def test_generated_code(which: int) -> None:
    first, second = shared_pool(2).run(part, which, PARTS, timeout=3600.0)
    assert first[0] == second[0] and first[0] > 0
    assert not first[1] + second[1]
