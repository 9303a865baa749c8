"""A custom op with a rule, so that it is split and not gathered.

    FXPAR_MESH="dp=2" FXPAR_PLAN=propagate \
        torchrun --nproc-per-node 2 examples/custom_op.py

prints

    collectives for the op: 0
    the numbers of one device: True

Without the rule every rank would run the whole op, and a warning would show the rule.
"""

import os

import torch

import fxpar


@torch.library.custom_op("example::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# A factor per dim. ``!``: this dim stays whole, since the op sums over it.
fxpar.rule("example::rms_norm", "b s d!, d! -> b s d!")


@torch.compile(backend="fxpar")
def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(torch.relu(x), weight).sum()


torch.manual_seed(0)
x, weight = torch.randn(4, 8, 16), torch.randn(16)
expected = rms_norm(torch.relu(x), weight).sum()
result = model(x, weight)

if os.environ.get("RANK", "0") == "0":
    (plan,) = fxpar.plans()
    gathers = [c for c in plan.collectives if "gather" in c.kind]
    print("collectives for the op:", len(gathers))
    print("the numbers of one device:", torch.allclose(result, expected))
