"""Defines ``fxpar::region``: a whole region of a graph as one op.

In: tensors, numbers, the hash of a program, the name of a process group, and how to run
it (a key of ``RUNNERS``). Out: the program's outputs, new tensors; ``region_`` writes
some of them to given tensors instead, which the program may read. Programs are looked
up by their hash: they are known to the process that made them, and kept in files next
to Inductor's caches, for a process that compiles nothing because it found the compiled
graph there. Never compiles a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from fxpar import _torch, cache_files
from fxpar.errors import FxparError
from fxpar.fusion.kernels import interpret, run_fused, run_kernels
from fxpar.fusion.kernels.implementations import FUSED
from fxpar.fusion.kernels.region_program import RegionProgram, dtype_of

_KNOWN: dict[str, RegionProgram] = {}

Runner = Callable[..., list[torch.Tensor]]

# How a region runs: op by op; by kernels with the collective between them; by one
# kernel on a rung of the ladder, chosen when it runs ("triton") or before; by the way
# that is measured to be the fastest.
RUNNERS: dict[str, Runner] = {
    "interpret": interpret.run,
    "nccl": run_kernels.run,
    "triton": run_fused.run,
    **{rung: partial(run_fused.run, rung=rung) for rung in (*FUSED, "measured")},
}


def remember(program: RegionProgram) -> str:
    """Make a program known; return its hash. If the disk refuses, only this process
    knows it."""
    if program.hash not in _KNOWN:
        _KNOWN[program.hash] = program
        with contextlib.suppress(OSError):
            cache_files.write_file(_path(program.hash), program.text)
    return program.hash


def lookup(name: str) -> RegionProgram:
    """Return the program of a hash. Raises FxparError if it is not known."""
    if name not in _KNOWN:
        try:
            program = RegionProgram.parse(_path(name).read_text())
        except Exception:  # damaged bytes may lead to any
            program = None
        if program is None or program.hash != name:
            raise FxparError(
                f"region {name} of a compiled graph is not known",
                fix="compile again: set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 once",
            )
        _KNOWN[name] = program
    return _KNOWN[name]


def _path(name: str) -> Path:
    return cache_files.folder() / "programs" / f"{name}.json"


torch.library.define(
    "fxpar::region",
    "(Tensor[] inputs, int[] numbers, str program, str group, str how) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


torch.library.define(
    "fxpar::region_",
    "(Tensor[] inputs, Tensor(a!)[] into, int[] which, int[] numbers, str program, "
    "str group, str how) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


@torch.library.impl("fxpar::region", "CompositeExplicitAutograd")
def region(
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int],
    program: str,
    group: str,
    how: str,
) -> list[torch.Tensor]:
    """Run a region."""
    return _run(lookup(program), inputs, numbers, group, how, {})


@torch.library.impl("fxpar::region_", "CompositeExplicitAutograd")
def region_(
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    which: Sequence[int],
    numbers: Sequence[int],
    program: str,
    group: str,
    how: str,
) -> list[torch.Tensor]:
    """Run a region; output ``which[i]`` is written to ``into[i]``."""
    targets = dict(zip(which, into, strict=True))
    return _run(lookup(program), inputs, numbers, group, how, targets)


@torch.library.impl("fxpar::region_", "Functionalize")
def _(*_: object) -> list[torch.Tensor]:
    # Inductor takes an op that writes and returns lists only if it has this.
    raise FxparError(
        "regions are made of graphs that are functional already",
        fix="run the compiled function, do not trace it again",
    )


def _run(
    program: RegionProgram,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    how: str,
    into: Mapping[int, torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs that are not written to ``into``."""
    with _torch.inductor.profiled(program.title):
        outputs = RUNNERS[how](program, inputs, numbers, group, into)
    return [x for i, x in enumerate(outputs) if i not in into]


@torch.library.register_fake("fxpar::region")
def _(inputs, numbers, program, group, how):
    return _empty(inputs, program, ())


@torch.library.register_fake("fxpar::region_")
def _(inputs, into, which, numbers, program, group, how):
    return _empty(inputs, program, which)


def _empty(
    inputs: Sequence[torch.Tensor], program: str, without: Sequence[int]
) -> list[torch.Tensor]:
    device = interpret.device_of(inputs)
    return [
        torch.empty_strided(t.shape, t.stride, dtype=dtype_of(t.dtype), device=device)
        for i, t in enumerate(lookup(program).outputs)
        if i not in without
    ]
