"""A program with collectives as one kernel, where there is memory that ranks share.

In: what ``launch.run`` is given. Out: the program's outputs, or None where the ladder
or the program says that collectives run between kernels. Providers belong to groups,
made when one is first needed on a GPU, or given (``install``). What is decided depends
on the program and the group alone, so ranks decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fxpar.fusion.kernels import interpret, launch
from fxpar.fusion.kernels.kernel import Kernel
from fxpar.fusion.kernels.ladder import Facts, choose
from fxpar.fusion.kernels.program import Program
from fxpar.fusion.kernels.providers import Provider, symmetric
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.templates import Template, template_of

log = logging.getLogger("fxpar")

_PROVIDERS: dict[tuple[str, str], Provider | None] = {}


def install(group: str, device: str, provider: Provider | None) -> None:
    """Say what memory the ranks of a group share, on a kind of device."""
    _PROVIDERS[group, device] = provider


def provider_of(group: str, device: torch.device) -> Provider | None:
    """What memory the ranks of a group share; None if none."""
    key = group, device.type
    if key not in _PROVIDERS:
        _PROVIDERS[key] = symmetric(group, device) if device.type == "cuda" else None
    return _PROVIDERS[key]


def run(
    program: Program,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int] = (),
    group: str = "",
    into: Mapping[int, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The program's outputs, by the best rung there is; those that ``into`` names are
    written there."""
    made = fused(program, inputs, numbers, group, into or {})
    if made is None:
        return launch.run(program, inputs, numbers, group, into)
    return made


def fused(
    program: Program,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    into: Mapping[int, torch.Tensor],
) -> list[torch.Tensor] | None:
    """The program's outputs by one kernel with its collectives inside, else None."""
    device = interpret.device_of(tensors)
    if not group or not launch.has_kernels(device):
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # a graph that is replayed would use the same half twice in a row
    provider = provider_of(group, device)
    if provider is None:
        return None
    template = planned(program, provider.ranks, provider.programs, device.type)
    if template is None:
        return None
    names = [t.name for t in program.inputs]
    values = dict(zip(names, tensors, strict=True))
    targets = {program.outputs[i].name: x for i, x in into.items()}
    made = launched(template, values, numbers, provider, targets)
    return interpret.results(program, made, tensors, into)


@cache
def planned(
    program: Program, ranks: int, programs: int, device: str
) -> Template | None:
    """The kernel of a program, if it is to be one."""
    rung = choose(program, Facts(ranks, kernels=True, shared=True))
    why = rung.why
    if rung.is_fused:
        shots = 2 if rung.name == "two_shot" else 1
        random = launch.random_of(device)
        try:
            made = template_of(program, shots=shots, programs=programs, random=random)
            log.debug("region %s: %s: %s", program.hash, rung.name, why)
            return made
        except CannotEmit as error:
            why = str(error)
    log.debug("region %s: its collectives run by themselves: %s", program.hash, why)
    return None


def launched(
    template: Template,
    values: Mapping[str, torch.Tensor],
    numbers: Sequence[int],
    provider: Provider,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """What the kernel writes, by name; at ``targets`` where that is safe."""
    given, writes = prepared(template, values, numbers, provider, targets)
    start(template.kernel, given)
    return named(template.kernel, writes)


def prepared(
    template: Template,
    values: Mapping[str, torch.Tensor],
    numbers: Sequence[int],
    provider: Provider,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Arguments of the kernel, and those of them that it writes. All memory is there
    then: none is asked for while a kernel waits for others."""
    kernel, device = template.kernel, provider.device
    reads = [launch.as_read(values[t.name], t, device) for t in kernel.reads]
    writes = launch.places(kernel, reads, targets or {}, device)
    more = [numbers[i] for i in kernel.numbers]
    space = provider.workspace(template.nbytes)
    shared = space.buffers, space.signals
    return (*shared, *reads, *writes, *more, provider.rank), writes


def start(kernel: Kernel, given: Sequence[Any]) -> None:
    """Launch a kernel on the current stream."""
    launch.function_of(kernel)[(kernel.programs,)](
        *given, PROGRAMS=kernel.programs, num_warps=kernel.warps
    )


def named(kernel: Kernel, writes: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a kernel wrote, by name, with parts of sums added up."""
    return {
        t.name: launch.summed(x, t) if t.name in kernel.sums else x
        for t, x in zip(kernel.writes, writes, strict=True)
    }
