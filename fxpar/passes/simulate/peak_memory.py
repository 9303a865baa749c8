"""Computes a rank's memory while it runs a local graph, and the kinds at its peak.

In: launches. Out: ``Residency``: the lifetime of each buffer, and the total bytes after
each launch, as a caching allocator has them: it follows the order of launches, not
time. ``by_kind`` gives the bytes at the peak by kind, with the optimizer's state, which
no graph of forward and backward has. Never runs and never changes the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.passes.simulate.launches import PhaseReader, PhasesAsRun
from fxpar.sharding.cost.fused_kernels import Buffer, Launch, Launches
from fxpar.sharding.cost.op import bytes_of, tensors_in
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import Signature
from fxpar.sharding.search.memory_constraints import MOMENTS

# Kinds of memory, in the order in which they are listed.
KINDS = (
    "parameters",
    "gathered parameters",
    "optimizer state",
    "gradients",
    "inputs and buffers",
    "saved for the backward",
    "passing",
    "buffers of collectives",
)


@dataclass(frozen=True)
class Residency:
    """Holds when buffers are in memory, by launches from 0; -1 is before all."""

    # The launch that makes a buffer.
    born: dict[Buffer, int]
    # The last launch that needs it; the number of launches if it stays to the end.
    dies: dict[Buffer, int]
    # (launch, bytes made by it, bytes in memory while it runs, bytes after it); the
    # first is before all launches.
    usage: list[tuple[int, int, int, int]]

    @property
    def peak(self) -> tuple[int, int]:
        """Return (bytes, launch) at the first peak."""
        at, _, most, _ = max(self.usage, key=lambda entry: entry[2])
        return most, at

    def at(self, launch: int) -> list[Buffer]:
        """Return the buffers that are in memory while a launch runs."""
        return [b for b in self.born if self.born[b] <= launch <= self.dies[b]]


def residency(launches: Launches, *, in_place: bool = True) -> Residency:
    """Return when the buffers of launches are in memory; inputs stay to the end, as
    parameters do. ``in_place``: an all-reduce, or a sum over microbatches, overwrites
    an operand that nothing else needs, as Inductor does."""
    born = dict.fromkeys(launches.inputs, -1)
    end = len(launches.launches)
    dies = dict.fromkeys(launches.inputs, end)
    waits = {x.of: i for i, x in enumerate(launches.launches) if x.of is not None}
    for i, launch in enumerate(launches.launches):
        until = waits.get(launch, i)
        for buffer in launch.writes:
            born[buffer], dies[buffer] = i, until
        for buffer in launch.reads:
            dies[buffer] = max(dies[buffer], until)
    dies.update((buffer, end) for result in launches.outputs for buffer in result)
    if in_place:
        _reuse(launches, waits, born, dies)
    return Residency(born, dies, list(_bytes_by_launch(launches, dies)))


def _reuse(
    launches: Launches,
    waits: dict[Launch, int],
    born: dict[Buffer, int],
    dies: dict[Buffer, int],
) -> None:
    """End the lifetime of buffers that launches overwrite when these begin, unless they
    are read later, in place."""
    last: dict[Buffer, int] = {}
    for i, launch in enumerate(launches.launches):
        last.update(dict.fromkeys(launch.reads, i))
    for i, launch in enumerate(launches.launches):
        for buffer in _written_over(launch):
            frees = last[buffer] == i and dies[buffer] == waits.get(launch, i)
            if frees and born[buffer] >= 0:
                dies[buffer] = i - 1


def _written_over(launch: Launch) -> list[Buffer]:
    """Return the operands that a launch may overwrite with its results."""
    if op_facts_of(launch.nodes[-1].target).over_first:
        return [*launch.reads][:1]
    return [*launch.reads] if launch.kind == "all_reduce" else []


def _bytes_by_launch(
    launches: Launches, dies: dict[Buffer, int]
) -> Iterator[tuple[int, int, int, int]]:
    freed: dict[int, int] = defaultdict(int)
    for buffer, i in dies.items():
        freed[i] += buffer.nbytes
    total = sum(buffer.nbytes for buffer in launches.inputs)
    yield -1, total, total, total
    for i, launch in enumerate(launches.launches):
        allocated = sum(buffer.nbytes for buffer in launch.writes)
        yield i, allocated, total + allocated, total + allocated - freed[i]
        total += allocated - freed[i]


def by_kind(
    phases: PhasesAsRun, signature: Signature, launches: Launches | None = None
) -> tuple[tuple[str, int], ...]:
    """Return (kind, bytes a rank holds) at the peak of a local graph as it runs,
    without kinds of 0 bytes. ``launches``: those of the graph, if known.

    Raises PlanError as ``launches_of`` does.
    """
    launches = launches or PhaseReader().launches_of(phases)
    resident = residency(launches)
    kinds = _kinds(phases, signature, launches)
    total = dict.fromkeys(KINDS, 0)
    for buffer in resident.at(resident.peak[1]):
        total[kinds[buffer]] += buffer.nbytes
    state = optimizer_bytes(phases.inputs, signature)
    total["optimizer state"] = sum(state.values())
    return tuple((kind, size) for kind, size in total.items() if size)


def optimizer_bytes(
    inputs: Sequence[fx.Node], signature: Signature
) -> dict[fx.Node, int]:
    """Map each parameter that has a gradient to the bytes of its optimizer state,
    ``memory_constraints.MOMENTS`` times its own. ``inputs``: placeholders of a local
    graph."""
    of = {out.of for out in signature.outputs if out.kind == "gradient"}
    pairs = enumerate(zip(inputs, signature.inputs, strict=True))
    return {
        node: MOMENTS * bytes_of(node)
        for k, (node, declared) in pairs
        if k in of and declared.kind == "parameter"
    }


def _kinds(
    phases: PhasesAsRun, signature: Signature, launches: Launches
) -> dict[Buffer, str]:
    """Return the kind of each buffer."""
    declared = dict(zip(phases.inputs, signature.inputs, strict=True))
    parameters = {node for node, x in declared.items() if x.kind == "parameter"}
    gathered = _derived_from({n for n in parameters if _is_split(n)}, phases)
    # Later lines override earlier ones.
    kinds: dict[Buffer, str] = {}
    for launch in launches.launches:
        kinds.update(dict.fromkeys(launch.writes, "passing"))
    for launch in launches.launches:
        if launch.axes:
            both_ends = (*launch.reads, *launch.writes)
            kinds.update(dict.fromkeys(both_ends, "buffers of collectives"))
    forward_buffers = {b for x in launches.launches if not x.backward for b in x.writes}
    for launch in launches.launches:
        if launch.backward:
            saved = forward_buffers.intersection(launch.reads)
            kinds.update(dict.fromkeys(saved, "saved for the backward"))
    kinds.update((b, "gathered parameters") for b in kinds if b.node in gathered)
    for out, buffers in zip(signature.outputs, launches.outputs, strict=True):
        if out.kind == "gradient":
            kinds.update(dict.fromkeys(buffers, "gradients"))
    for buffer in launches.inputs:
        is_parameter = buffer.node in parameters
        kinds[buffer] = "parameters" if is_parameter else "inputs and buffers"
    return kinds


def _is_split(node: fx.Node) -> bool:
    spec = node.meta.get("fxpar_spec")
    return spec is not None and bool(spec.sharded_axes)


def _derived_from(roots: set[fx.Node], phases: PhasesAsRun) -> set[fx.Node]:
    """Return ``roots`` and the nodes computed from them only."""
    derived = set(roots)
    for graph in phases.graphs:
        derived.update(n for n, of in phases.given.items() if of in derived)
        for node in graph.nodes:
            read = [n for n in node.all_input_nodes if tensors_in(n.meta.get("val"))]
            if node.op == "call_function" and read and derived.issuperset(read):
                derived.add(node)
    return derived
