"""Defines ``fxpar::region``, a whole region of a graph as one op, and runs its program
as one kernel where ranks share memory.

In: tensors, numbers, the hash of a program, the name of a process group, and how to run
it (a key of ``RUNNERS``). Out: the program's outputs, new tensors; ``region_`` writes
some of them to given tensors instead, which the program may read. Programs are looked
up by their hash: they are known to the process that made them, and kept in files next
to Inductor's caches, for a process that compiles nothing because it found the compiled
graph there.

Providers of shared memory belong to groups, made when one is first needed on a GPU.
Whether collectives run inside a kernel depends on the program and the group alone, or
is measured by all ranks together (``implementations``), so that ranks never decide
differently. Never compiles a graph.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxpar import _torch, cache_files
from fxpar.errors import FxparError
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.implementations import (
    FUSED,
    GroupFacts,
    Run,
    TunedWay,
    by_clock,
    by_events,
    choose,
    tuned,
    ways_of,
)
from fxpar.fusion.kernels.region_program import CannotEmit, RegionProgram, dtype_of
from fxpar.fusion.kernels.symmetric_memory import Provider, Unshared, symmetric
from fxpar.fusion.kernels.templates import Template, template_of

log = logging.getLogger("fxpar")

CPU = torch.device("cpu")

# By process group: providers end with it, since a later group of the same name may have
# other ranks.
_PROVIDERS: WeakKeyDictionary[Any, dict[str, Provider | None]] = WeakKeyDictionary()


def provider_of(group: str, device: torch.device) -> Provider | None:
    """Return the provider of memory that the ranks of a group share; None if there is
    none."""
    process_group = _torch.distributed.group_named(group)
    if process_group is None:
        return None
    by_kind, kind = _PROVIDERS.setdefault(process_group, {}), device.type
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
    device = run_kernels.device_of(tensors)
    if not group or not run_kernels.has_kernels(device):
        return None
    kind = device.type
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # a graph that is replayed would use the same half twice in a row
    provider = provider_of(group, device)
    if provider is None:
        return None
    alone = run_kernels.alone_of(program, tensors, device)
    ways, key = _WAYS.setdefault(provider, {}), (program, rung)
    if key not in ways:
        if rung == "measured":
            way = _measured(program, tensors, numbers, group, provider, alone)
        else:
            way = _by_table(program, facts_of(provider), provider.programs, rung)
        ways[key] = way
    template = planned(program, ways[key], kind, alone)
    if template is None:
        return None
    values = run_kernels.by_input(program, tensors)
    into = into or {}
    targets = {program.outputs[i].name: x for i, x in into.items()}
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
    return run_kernels.results(program, results, tensors, into)


def facts_of(provider: Provider, bandwidth: float = GroupFacts.bandwidth) -> GroupFacts:
    """Return the facts, for the ladder, of the group that shares memory."""
    return GroupFacts(
        provider.ranks,
        kernels=True,
        shared=True,
        bandwidth=bandwidth,
        multicast=provider.multicast,
    )


def _by_table(
    program: RegionProgram, facts: GroupFacts, programs: int, rung: str
) -> TunedWay:
    """Return the way of ``rung``, chosen when the graph was compiled, else the
    ladder's."""
    name = rung or choose(program, facts).name
    if name == "multimem" and not facts.multicast:
        name = "two_shot"
    return TunedWay(name, programs)


# Ways of programs, by rung, for as long as a provider lives.
_WAYS: WeakKeyDictionary[Provider, dict[tuple[RegionProgram, str], TunedWay]] = (
    WeakKeyDictionary()
)


def _measured(
    program: RegionProgram,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    group: str,
    provider: Provider,
    alone: frozenset[str],
) -> TunedWay:
    """Return the fastest way, measured at the first call, which all ranks make
    together. The measurement runs on the given tensors and writes to none of them."""
    device, facts = provider.device, facts_of(provider)
    table = _by_table(program, facts, provider.programs, "")
    if provider.meeting is None:
        return table
    values = run_kernels.by_input(program, tensors)

    def prepare(way: TunedWay) -> Run:
        if way.rung == "nccl":
            return partial(run_kernels.run, program, tensors, numbers, group)
        template = planned(program, way, device.type, alone)
        if template is None:
            raise RuntimeError(f"there is no kernel for {way}")
        return partial(launched, template, values, numbers, provider)

    ways = ways_of(program, facts, provider.programs)
    on_gpu = device.type == "cuda"
    where = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "multicast": provider.multicast,
    }
    clock = by_events if on_gpu else by_clock
    try:
        return tuned(program, ways, prepare, provider.meeting, where=where, clock=clock)
    except Unshared as error:
        log.debug("region %s: nothing was measured: %s", program.hash, error)
        return table


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
            name, why = "two_shot" if name == "multimem" else "", str(error)
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
    arguments, writes = run_kernels.arguments_of(
        template.kernel, values, numbers, provider.device, targets or {}
    )
    space = provider.workspace(template.nbytes)
    return (space.buffers, space.signals, *arguments, provider.rank), writes


_KNOWN: dict[str, RegionProgram] = {}

Runner = Callable[..., list[torch.Tensor]]

# How a region runs: op by op; by kernels with the collective between them; by one
# kernel on a rung of the ladder, chosen when it runs ("triton") or before; by the way
# that is measured to be the fastest.
RUNNERS: dict[str, Runner] = {
    "interpret": run_kernels.interpret,
    "nccl": run_kernels.run,
    "triton": run,
    **{rung: partial(run, rung=rung) for rung in (*FUSED, "measured")},
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
    device = run_kernels.device_of(inputs)
    return [
        torch.empty_strided(t.shape, t.stride, dtype=dtype_of(t.dtype), device=device)
        for i, t in enumerate(lookup(program).outputs)
        if i not in without
    ]
