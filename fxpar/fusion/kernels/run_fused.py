"""Runs a program with collectives as one kernel, where ranks share memory.

In: the arguments of ``run_kernels.run``, and an implementation. Out: the program's
outputs, or None if collectives run between kernels for this implementation or program.
Providers belong to groups, made when one is first needed on a GPU, or given
(``install``). Decisions depend on the program and the group alone, or are measured by
all ranks together (``autotune``), so that ranks never decide differently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxpar import _torch
from fxpar.fusion.kernels import interpret, run_kernels
from fxpar.fusion.kernels.autotune import (
    Run,
    TunedWay,
    by_clock,
    by_events,
    tuned,
    ways_of,
)
from fxpar.fusion.kernels.implementations import FUSED, GroupFacts, choose
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.region_program import RegionProgram
from fxpar.fusion.kernels.symmetric_memory import Provider, Unshared, symmetric
from fxpar.fusion.kernels.templates import Template, template_of

log = logging.getLogger("fxpar")

CPU = torch.device("cpu")

# By process group: providers end with it, since a later group of the same name may have
# other ranks.
_PROVIDERS: WeakKeyDictionary[Any, dict[str, Provider | None]] = WeakKeyDictionary()
_INSTALLED: dict[tuple[str, str], Provider | None] = {}  # by names of no group


def install(group: str, device: str, provider: Provider | None) -> None:
    """Set the memory that the ranks of a group share, on a kind of device."""
    process_group = _torch.distributed.group_named(group)
    if process_group is None:
        _INSTALLED[group, device] = provider
    else:
        _PROVIDERS.setdefault(process_group, {})[device] = provider


def provider_of(group: str, device: torch.device) -> Provider | None:
    """Return the provider of memory that the ranks of a group share; None if there is
    none."""
    process_group = _torch.distributed.group_named(group)
    if process_group is None:
        return _INSTALLED.get((group, device.type))
    by_kind, kind = _PROVIDERS.get(process_group), device.type
    if by_kind is None:
        by_kind = _PROVIDERS[process_group] = {}
    if kind not in by_kind:
        by_kind[kind] = symmetric(group, device) if kind == "cuda" else None
    return by_kind[kind]


def run(
    program: RegionProgram,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int] = (),
    group: str = "",
    into: Mapping[int, torch.Tensor] | None = None,
    rung: str = "",
) -> list[torch.Tensor]:
    """Return the program's outputs, by a rung of the ladder, by the one that is
    "measured" to be the fastest, or by the table's; those that ``into`` names are
    written there. Raises FxparError where no kernel starts, or where an earlier one
    missed a rank."""
    outputs = fused(program, inputs, numbers, group, into or {}, rung)
    if outputs is None:
        return run_kernels.run(program, inputs, numbers, group, into)
    return outputs


def fused(
    program: RegionProgram,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    into: Mapping[int, torch.Tensor] | None = None,
    rung: str = "",
) -> list[torch.Tensor] | None:
    """Return the program's outputs by one kernel with its collectives inside; None if
    it cannot run so."""
    device = interpret.device_of(tensors)
    if not group or not run_kernels.has_kernels(device):
        return None
    kind = device.type
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # a graph that is replayed would use the same half twice in a row
    provider = provider_of(group, device)
    if provider is None:
        return None
    alone = run_kernels.alone_of(program, tensors, device)
    templates, key = _TEMPLATES.setdefault(provider, {}), (program, rung, alone)
    if key not in templates:
        if rung == "measured":
            way = _measured(program, tensors, numbers, group, provider)
        else:
            way = _by_table(program, facts_of(provider), provider.programs, rung)
        templates[key] = planned(program, way, kind, alone)
    template = templates[key]
    if template is None:
        return None
    values = dict(zip(run_kernels.names_of(program), tensors, strict=True))
    into = into or {}
    targets = {program.outputs[i].name: x for i, x in into.items()} if into else {}
    try:
        results = launched(template, values, numbers, provider, targets)
    except Unshared as error:
        log.debug(
            "region %s: its collectives run as operations of their own: %s",
            program,
            error,
        )
        return None
    if not into:  # all new, and in the strides they are to have
        return [results[t.name] for t in program.outputs]
    return interpret.results(program, results, tensors, into)


def facts_of(provider: Provider, bandwidth: float = GroupFacts.bandwidth) -> GroupFacts:
    """Return the facts, for the ladder, of the group that shares memory."""
    return GroupFacts(
        provider.ranks,
        kernels=True,
        shared=True,
        bandwidth=bandwidth,
        multicast=provider.multicast,
    )


@cache
def _by_table(
    program: RegionProgram, facts: GroupFacts, programs: int, rung: str
) -> TunedWay:
    """Return the way of ``rung``, chosen when the graph was compiled, else the
    ladder's."""
    name = rung or choose(program, facts).name
    if name == "multimem" and not facts.multicast:
        name = "two_shot"
    return TunedWay(name, programs)


# Kernels by program, rung and numbers alone, for as long as a provider lives.
_Key = tuple[RegionProgram, str, frozenset[str]]
_TEMPLATES: WeakKeyDictionary[Provider, dict[_Key, Template | None]] = (
    WeakKeyDictionary()
)
# Measured ways, for as long as a provider lives.
_WAYS: WeakKeyDictionary[Provider, dict[RegionProgram, TunedWay]] = WeakKeyDictionary()


def _measured(
    program: RegionProgram,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    provider: Provider,
) -> TunedWay:
    """Return the fastest way, measured at the first call, which all ranks make
    together. The measurement runs on the given tensors and writes to none of them."""
    ways_by_program = _WAYS.setdefault(provider, {})
    if program in ways_by_program:
        return ways_by_program[program]
    device, facts = provider.device, facts_of(provider)
    table = _by_table(program, facts, provider.programs, "")
    if provider.meeting is None:
        return ways_by_program.setdefault(program, table)
    alone = run_kernels.alone_of(program, tensors, device)
    values = dict(zip(run_kernels.names_of(program), tensors, strict=True))

    def prepare(way: TunedWay) -> Run:
        if way.rung == "nccl":
            return partial(run_kernels.run, program, tensors, numbers, group)
        template = planned(program, way, device.type, alone)
        if template is None:
            raise RuntimeError(f"there is no kernel for {way}")
        return partial(launched, template, values, numbers, provider)

    ways = ways_of(program, facts, provider.programs)
    where = {
        "device": _torch.version.device_name(device),
        "multicast": provider.multicast,
    }
    clock = by_events if device.type == "cuda" else by_clock
    try:
        way = tuned(program, ways, prepare, provider.meeting, where=where, clock=clock)
    except Unshared as error:
        log.debug("region %s: nothing was measured: %s", program.hash, error)
        way = table
    return ways_by_program.setdefault(program, way)


# The rung to take where one has no template.
_INSTEAD = {"multimem": "two_shot"}


@cache
def planned(
    program: RegionProgram,
    way: TunedWay,
    device: str,
    alone: frozenset[str] = frozenset(),
) -> Template | None:
    """Return the kernel of a program on a rung; None if it has none. ``alone``: inputs
    that are given as numbers."""
    name, why = way.rung, "by its size and device"
    while name in FUSED:
        shots, switch = FUSED[name]
        try:
            template = template_of(
                program,
                shots=shots,
                switch=switch,
                programs=way.programs,
                random=run_kernels.random_of(device),
                alone=alone,
            )
        except CannotEmit as error:
            name, why = _INSTEAD.get(name, ""), str(error)
            continue
        log.debug("region %s: %s", program.hash, name)
        warps = way.warps or template.kernel.warps
        return replace(template, kernel=replace(template.kernel, warps=warps))
    log.debug(
        "region %s: its collectives run as operations of their own: %s",
        program.hash,
        why,
    )
    return None


def launched(
    template: Template,
    values: Mapping[str, torch.Tensor],
    numbers: Sequence[int],
    provider: Provider,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Run the kernel and return the tensors it writes, by name; at ``targets`` where
    that is safe. Raises Unshared, on all ranks, where there is no room."""
    kernel = template.kernel
    arguments, writes = prepared(template, values, numbers, provider, targets)
    # Allocate the memory for sums before, so that nobody asks for any while the kernel
    # waits.
    spare = [torch.empty_like(x[0]) for x in run_kernels.parts_of(kernel, writes)]
    how = {"launch_cooperative_grid": provider.cooperative}
    run_kernels.call(kernel, arguments, template.region, **how)
    del spare
    if provider.device == CPU:  # the kernel is done
        provider.check()
    return run_kernels.by_name(kernel, writes)


def prepared(
    template: Template,
    values: Mapping[str, torch.Tensor],
    numbers: Sequence[int],
    provider: Provider,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return the arguments of the kernel, and those of them that it writes. All memory
    is allocated then: none is asked for while a kernel waits for others."""
    kernel, device = template.kernel, provider.device
    reads = [run_kernels.as_read(values[t.name], t, device) for t in kernel.reads]
    writes = run_kernels.places(kernel, reads, targets or {}, device)
    scalars = run_kernels.given_numbers(kernel, values, numbers)
    space = provider.workspace(template.nbytes)
    shared = space.buffers, space.signals
    return (*shared, *reads, *writes, *scalars, provider.rank), writes
