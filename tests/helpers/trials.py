"""Whole scripts on one device and on ranks, with what a user gets by default.

A script is a function of a ``Setting``, which stands for the few lines that a user
changes: it compiles, shards or makes a step as the mode says, and on one device does
nothing. What a script returns, any tensors and numbers, is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import fxpar
from tests.helpers import device, trial_layers, trial_scripts
from tests.helpers.machines import machine
from tests.helpers.spawn import ranks_of
from tests.helpers.training import place_of, whole

MODES = ("compile", "shard", "step")
TOLERANCE = 1e-9  # of float64, relative to the largest value
SCRIPTS = {**trial_scripts.SCRIPTS, **trial_layers.SCRIPTS}


@dataclass(frozen=True)
class Setting:
    """How a script runs; by default on one device."""

    mesh: str = ""
    mode: str = "compile"  # or "ddp": as DDP has it, without fxpar
    inputs: str = "global"
    codegen: str = "eager"
    # Figures of the machine, a file; "" for those of this one.
    hardware: str = ""
    # What is trained by DDP's rules.
    models: list[nn.Module] = field(default_factory=list, compare=False)

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "mesh": self.mesh,
            "inputs": self.inputs,
            "codegen": self.codegen,
        }
        given["cache_plans"] = False  # each run searches
        return given | ({"hardware": self.hardware} if self.hardware else {})

    def compile(self, fn: Any, **how: Any) -> Any:
        if not self.mesh:
            return fn
        if self.mode == "ddp":
            return self._with_buffers_of_first(fn)
        return torch.compile(fn, backend="fxpar", options=self.options, **how)

    def _with_buffers_of_first(self, fn: Any) -> Any:
        """What is called, after all ranks got the first one's buffers."""

        def broadcast(*_: Any) -> None:
            for buffer in (b for model in self.models for b in model.buffers()):
                dist.broadcast(buffer, 0)

        def call(*args: Any, **kwargs: Any) -> Any:
            broadcast()
            return fn(*args, **kwargs)

        if not isinstance(fn, nn.Module):
            return call
        fn.register_forward_pre_hook(broadcast)
        return fn

    def model(self, module: nn.Module) -> nn.Module:
        """The module in float64, at rest sharded if the mode says so."""
        module = module.double()
        if self.mode == "ddp":
            self.models.append(module)
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(mean_over_ranks)
        sharded = self.mesh and self.mode == "shard"
        return fxpar.shard(module, mesh=self.mesh) if sharded else module

    def step(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float | None = None,
    ) -> Callable[..., torch.Tensor]:
        """One training step, given a batch."""
        if self.mesh and self.mode == "step":
            return fxpar.train_step(
                model, loss_fn, optimizer, clip=clip, options=self.options
            )
        run = self.compile(model)

        def step(*batch: Any) -> torch.Tensor:
            loss = loss_fn(run, *batch)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank feeds of a batch."""
        if not self.mesh or self.inputs == "global":
            return x
        place, places = place_of(self.mesh)
        return x.tensor_split(places)[place].clone()


def mean_over_ranks(parameter: torch.Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def run(script: str, setting: Setting) -> dict[str, Any]:
    """What a script returns, by the path to each value."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = trial_layers if script in trial_layers.SCRIPTS else trial_scripts
    with device.by_default():
        results = getattr(module, script)(setting)
    values, _ = pytree.tree_flatten_with_path(results)
    return {
        pytree.keystr(path): whole(x) if isinstance(x, torch.Tensor) else x
        for path, x in values
    }


@cache
def on_one_device(script: str) -> dict[str, Any]:
    return run(script, Setting())


def differences(
    got: dict[str, Any], want: dict[str, Any], *, only: str = ""
) -> list[str]:
    """Values that differ, a line for each. ``only``: of those whose path has it."""
    got, want = ({k: x[k] for k in x if only in k} for x in (got, want))
    lines = [f"{key} is missing" for key in got.keys() ^ want.keys()]
    for key in got.keys() & want.keys():
        a, b = got[key], want[key]
        if not isinstance(b, torch.Tensor):
            lines += [] if a == b else [f"{key}: {a!r} is not {b!r}"]
            continue
        limit = TOLERANCE * max(1.0, b.abs().max().item()) if b.numel() else 0.0
        try:
            torch.testing.assert_close(a, b, rtol=0.0, atol=limit)
        except AssertionError as error:
            lines.append(f"{key}: {error}")
    return lines


@cache
def by_ranks_alone(script: str, mesh: str) -> list[dict[str, Any]]:
    """What each rank has where it computes its part of the batch as DDP does."""
    return ranks_of(mesh).run(run, script, Setting(mesh, "ddp", "local"))


def check(script: str, setting: Setting, *, splits: str = "") -> None:
    """Raise AssertionError if a rank returns something else than one device, or where
    ranks feed parts of a batch than DDP; RankError if one fails, or waits for ever.
    ``splits``: a file for figures of a machine on which a search splits small
    programs."""
    __tracebackhide__ = True
    if splits:
        machine().save(splits)
        setting = replace(setting, hardware=splits)
    every = ranks_of(setting.mesh).run(run, script, setting)
    is_local = setting.inputs == "local"
    # What a rank computes of its own part of a batch is its own.
    only = "state" if is_local else ""
    for rank, got in enumerate(every):
        if is_local:
            want = by_ranks_alone(script, setting.mesh)[rank]
        else:
            want = on_one_device(script)
        lines = differences(got, want, only=only)
        assert not lines, "\n".join([f"rank {rank}:", *lines])
