"""What may lie in slices along some axes, as schedules: cuts of all regions together.

In: a local graph with steps, the mesh, axes. Out: the cuts that pay by the sum of
seconds, sets of them that go together, and the lines of the verbs that do what a set
says. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.sequence_parallel import Cut, Prices, at_most, cut
from fxpar.fusion.sliced_dims import Rows, rows_of
from fxpar.fusion.varying_axes import varying
from fxpar.passes import collective_nodes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import flops_of, is_view, nbytes_of, tensors_in
from fxpar.sharding.mesh import Mesh

# What saves this share of what it costs comes near to pay.
_NEAR = 0.5


def alternatives(cuts: Sequence[Cut]) -> list[tuple[Cut, ...]]:
    """Sets of regions that share no reduction: for each dim those that split it first,
    or cut what is reduced along it, all others as far as they go together with them;
    and the best region alone."""

    def leads(one: Cut) -> set[tuple[int, bool]]:
        return {(dim, bool(one.kept)) for dim in one.starts.values()}

    firsts = dict.fromkeys(first for one in cuts for first in sorted(leads(one)))
    out = []
    for first in firsts:
        order = sorted(cuts, key=lambda one: first not in leads(one))
        taken: set[fx.Node] = set()
        some = []
        for one in order:
            if taken.isdisjoint(one.starts):
                some.append(one)
                taken.update(one.starts)
        out.append(tuple(some))
        if len(some) > 1:
            out.append(tuple(some[:1]))
    return out


def candidates(
    graph: fx.Graph, mesh: Mesh, axes: tuple[str, ...], hardware: Hardware
) -> tuple[list[Cut], list[str]]:
    """(what pays by the sum of seconds, best first; why other regions do not). Those
    along different dims share reductions."""
    prices = _prices(mesh, axes, hardware)
    regions = rows_of(graph, mesh, axes, varying(graph))
    cuts = sorted(((cut(rows, prices), rows) for rows in regions), key=_saved)
    out = [one for one, _ in cuts if one.starts and one.sliced]
    # What splits every all-reduce may be slower by the sum of seconds and faster in a
    # step: more can run beside its gathers.
    every = [cut(rows, prices, split=True) for one, rows in cuts if one.kept]
    out += [one for one in every if one.sliced]
    taken = {node for one in out for node in one.starts}
    near = []
    for one, rows in cuts:
        work, more = at_most(rows, prices)
        if one not in out and taken.isdisjoint(rows.reduced) and work > _NEAR * more:
            near.append(
                f"{'+'.join(axes)}: {len(rows.reduced)} all-reduces could be split "
                f"and {len(rows.ops)} ops run on slices, which saves "
                f"{work * 1e6:.4g} us of them and takes {more * 1e6:.4g} us more of "
                f"communication"
            )
    return out, near


def _saved(pair: tuple[Cut, Rows]) -> float:
    return -pair[0].saved


def _prices(mesh: Mesh, axes: tuple[str, ...], hardware: Hardware) -> Prices:
    count = mesh.count(axes)

    def collective(kind: str, value: fx.Node) -> float:
        size = sum(map(nbytes_of, tensors_in(value.meta["val"])))
        before = size / count if kind == "all_gather" else size
        return float(along(kind, mesh, axes).seconds(before))

    return Prices(_work(mesh, hardware), collective, 1 / count)


def _work(mesh: Mesh, hardware: Hardware) -> Callable[[fx.Node, float], float]:
    """Seconds of a share of an op beyond its launch, or of a collective."""

    def work(op: fx.Node, share: float) -> float:
        if op.target in collective_nodes.COLLECTIVE - collective_nodes.MESSAGES:
            read = op.all_input_nodes[0]
            size = sum(map(nbytes_of, tensors_in(read.meta["val"])))
            curve = along(op.target.__name__, mesh, collective_nodes.axes_of(op))
            return float(curve.seconds(size * share))
        if is_view(op) or collective_nodes.is_step(op):
            return 0.0
        values = tensors_in(op.meta["val"])
        size, dtype = sum(map(nbytes_of, values)), values[0].dtype
        seconds = hardware.seconds(size, flops_of(op), dtype=dtype)
        return float(seconds - hardware.launch) * share

    return work


def lines_of(cuts: Sequence[Cut], start: int) -> Schedule:
    """Cuts as verbs: every all-reduce split, or cut where it is kept, then all ops
    across the gathers; who reads whole what was cut reads it as it was."""
    out: list[Line] = []
    for found in cuts:
        gathers, again = [], []
        for node, dim in found.starts.items():
            number = start + len(out)
            gathers.append(f"gather_{number}")
            gives = f"scatter_{number}", gathers[-1]
            where = ("dim", dim)
            if node in found.split:
                out.append(Line("split", (node.name,), (where,), gives))
                continue
            axes = ("axes", "_and_".join(collective_nodes.axes_of(node)))
            out.append(Line("cut", (node.name,), (axes, where), gives))
            again.append(gathers[-1])
        names = tuple(op.name for op in found.sliced)
        out.append(Line("reorder", (names, *gathers)))
        out += [Line("drop", (gather,)) for gather in again]
    return Schedule(tuple(out))


def described(axes: tuple[str, ...], cuts: Sequence[Cut]) -> str:
    """What cuts do, for the notes on near misses."""
    split = sum(len(found.split) for found in cuts)
    kept = sum(len(found.kept) for found in cuts)
    sliced = sum(len(found.sliced) for found in cuts)
    also = f", taking slices of {kept} others" if kept else ""
    return (
        f"{'+'.join(axes)}: splitting {split} all-reduces{also} and running {sliced} "
        "ops on slices"
    )
