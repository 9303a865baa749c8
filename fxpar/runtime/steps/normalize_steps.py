"""Turn a traced graph into the normalized one: steps of the pipeline.

In: a ``JointState`` with the graph as it was traced. Out: the same state, its graph
normalized, with facts that are known before it is planned: places of experts, shares of
ranks, rows of the batch. Never: a difference between ranks. The order of the steps is
``fxpar.pipeline``'s; the steps that plan are in ``plan_steps``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph import graph_bodies
from fxpar.graph.builder import shape_of
from fxpar.passes.experts.across_places import manual_expert_axes, means_of_experts
from fxpar.passes.experts.expert_ops import room_of
from fxpar.passes.experts.group_rows import SentRows
from fxpar.passes.experts.normalize_experts import (
    Across,
    ExpertWays,
    experts_in_place,
)
from fxpar.passes.normalize import interleaved_rows, rows_in_turn
from fxpar.passes.normalize.keep_batch_apart import keep_batch_apart
from fxpar.passes.regions import manual_regions
from fxpar.passes.regions.region_ops import EDGES
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.steps.stage_steps import parts_of
from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import UNNAMED
from fxpar.sharding.plan_request import Request
from fxpar.sharding.propagate.conventions import batch_axes, sequence_axes
from fxpar.sharding.refine_mesh import by_speed


def share_by_speed(graph: fx.Graph, state: JointState) -> None:
    """Give ranks of different speed shares of the rows that the batch axes split."""
    if state.request.meshes:
        return
    regions = any(n.target in EDGES for n in graph.nodes)
    state.rows = 0 if state.open else _first_rows(state)
    mesh, state.open_shares = by_speed(state.request, state.rows, regions=regions)
    state.request = state.request.on(mesh)


def _first_rows(state: JointState) -> int:
    """Return the batch's rows: of dim 0 of the first plain input with dims, else 0."""
    nodes = state.graph.find_nodes(op="placeholder")
    for node, declared in zip(nodes, state.request.signature.inputs, strict=True):
        value = node.meta.get("val")
        if declared.kind == "input" and isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return 0


def absorb_regions(graph: fx.Graph, state: JointState) -> None:
    """Check manual regions, name their collectives. Raises PlanError for open sizes."""
    request = state.request
    if state.open and any(n.target in EDGES for n in graph.nodes):
        raise PlanError("the sizes in manual regions are known")
    manual_regions.absorb_regions(
        graph,
        state.fake_mode,
        request.mesh,
        bodies=request.bodies,
        is_open=bool(request.meshes),
    )


def show_bodies(graph: fx.Graph, state: JointState) -> None:
    """Give nodes that stand for bodies of branches and loops these bodies as values.
    Raises PlanError if sizes are open and there are bodies."""
    graph_bodies.show_bodies(graph, graph.owning_module)
    if state.open and any(map(graph_bodies.body_of, graph.nodes)):
        raise PlanError("the sizes in branches and loops are known")


def split_batch(graph: fx.Graph, state: JointState) -> None:
    """Keep a batch as a dim if its axes do not divide it or its sequence is split."""
    if state.open:  # a plan may split open sizes only where the axes divide them
        return
    mesh = state.request.mesh
    axes, along, unlike = batch_axes(mesh), sequence_axes(mesh), mesh.unlike
    may_split = partial(shard_sizes.may_split, even=state.request.pipeline is not None)

    def splits(rows: int, behind: int) -> bool:
        if along and rows > 1 and may_split(behind, mesh, along):
            return True
        # A search may choose the shares of ranks of different speed.
        even = shard_sizes.divides(rows, mesh, axes) and set(axes).isdisjoint(unlike)
        return not even and may_split(rows, mesh, axes)

    keep_batch_apart(graph, state.build, splits)


def interleave_rows(graph: fx.Graph, state: JointState) -> None:
    """Let rows that are repeated one by one be split unevenly."""
    mesh = state.request.mesh
    if state.open or mesh.size == 1:
        return

    def splits(rows: int) -> bool:
        divides = (shard_sizes.divides(rows, mesh, (axis,)) for axis in mesh.names)
        return rows >= shard_sizes.LONG * mesh.size and not all(divides)

    interleaved_rows.interleave_rows(graph, state.build, splits)


def take_rows_in_turn(graph: fx.Graph, state: JointState) -> None:
    """Let rows that are taken from several tensors in turn be split unevenly."""
    mesh = state.request.mesh
    if state.open or mesh.size == 1:
        return

    def splits(rows: int) -> bool:
        return not shard_sizes.divides(rows, mesh, mesh.names)

    rows_in_turn.take_rows_in_turn(graph, state.build, splits)


def place_experts(graph: fx.Graph, state: JointState) -> None:
    """Compute tokens that are sorted by expert on the ranks that hold the experts."""
    mesh, notes = state.request.mesh, []
    axes, rows = state.request.expert_axes, dict[fx.Node, int]()

    def groups(experts: int) -> int:
        count = mesh.count(axes)
        if experts % count:
            notes.append(
                f"{experts} experts are not split over {'+'.join(axes)} ({count} "
                "ranks): each rank has all of them"
            )
        return 1 if experts % count else count

    room = state.request.options.expert_room or 0.0
    ways = ExpertWays(
        groups,
        room,
        partial(_sent, state.request, notes.append),
        partial(_across, state.request, rows),
    )
    notes += experts_in_place(graph, state.build, ways)
    slots = torch.ops.fxpar.dispatch_slots.default
    sent = {n.args[0] for n in graph.find_nodes(op="call_function", target=slots)}
    state.sent_rows = tuple(n if key in sent else 0 for key, n in rows.items())
    state.notes += tuple(dict.fromkeys(notes))


_NO_SIZES = (
    "rows are sent to experts in slots of a fixed size, since on this device counts "
    "are not read on the host"
)


def _sent(
    request: Request,
    note: Callable[[str], None],
    key: fx.Node,
    copies: int,
    nbytes: int,
    groups: int,
) -> SentRows | None:
    """Return how rows are sent to groups of experts, where that takes less time than to
    gather the tokens, or is asked for; None if the tokens are gathered."""
    mesh, exchange = request.mesh, request.options.expert_exchange
    tokens, axes = shape_of(key)[0] // copies, request.expert_axes
    parts = mesh.count(tuple(dict.fromkeys((*batch_axes(mesh), *axes))))
    if exchange == "gather" or tokens % parts or sequence_axes(mesh):
        return None
    may_be_exact = key.meta["val"].device.type == "cpu"
    if exchange == "exact" and not may_be_exact:
        note(_NO_SIZES)
    if exchange == "auto":
        sizes = tokens, copies, nbytes, groups, parts
        exchange = _fastest_exchange(request, may_be_exact, *sizes)
    if exchange == "gather":
        return None
    microbatches = parts * parts_of(request)
    sources = parts if tokens % microbatches else microbatches
    return SentRows(sources, exchange == "exact" and may_be_exact)


def _fastest_exchange(
    request: Request,
    may_be_exact: bool,
    tokens: int,
    copies: int,
    nbytes: int,
    groups: int,
    parts: int,
) -> str:
    """Return the ``expert_exchange`` that takes the least time, predicted from the
    bytes that are sent and those that a rank then reads and writes.

    Exact numbers of rows are for hosts that compute: the hardware is named, or the
    program runs here.
    """
    mesh, room, axes = request.mesh, request.options.expert_room, request.expert_axes
    named, runs = request.named_hardware, request.rank is not None
    hardware = named or lookup("cpu" if may_be_exact and runs else UNNAMED)
    priced, part_bytes = hardware.on(mesh), tokens // parts * nbytes
    rows = part_bytes * copies

    def exchanged(nbytes: float) -> float:
        return 2 * float(along("all_to_all", priced, axes).seconds(nbytes))

    seconds = {
        "gather": along("all_gather", priced, axes).seconds(part_bytes)
        + along("reduce_scatter", priced, axes).seconds(part_bytes * groups)
    }
    if room is not None:
        slots = room_of(tokens * copies, groups, parts, room) * groups * nbytes
        seconds["all_to_all"] = exchanged(slots)
    if may_be_exact and hardware.beside:
        seconds["gather"] += 2 * hardware.streaming(2 * rows * groups)
        seconds["exact"] = exchanged(rows) + 2 * hardware.streaming(2 * rows)
    return min(seconds, key=seconds.__getitem__)


def _across(
    request: Request,
    sent: dict[fx.Node, int],
    products: dict[fx.Node, int],
    key: fx.Node,
) -> Across | None:
    """Return how rows are sent to experts that are stored over manual axes; None if
    each rank gathers the weights of all experts. Adds to ``sent`` how many rows a rank
    would send."""
    axes, manual = manual_expert_axes(request.manual), request.manual
    if manual is None or not axes or request.options.expert_exchange == "gather":
        return None
    one_part = parts_of(request) == 1 and request.pipeline is None
    if not one_part or sequence_axes(request.mesh):
        return None
    groups, rows = manual.mesh.count(axes), shape_of(key)[0]
    means = means_of_experts(products, request.signature, axes)
    if means is None or any(experts % groups for experts in products.values()):
        return None
    sent[key] = rows if isinstance(rows, int) and request.sent_room != 0 else 0
    if not sent[key]:
        return None
    on_host = key.meta["val"].device.type == "cpu"
    exact = on_host and request.options.expert_exchange != "all_to_all"
    share = 0.0 if exact else request.options.expert_room or 0.0
    ways = SentRows(1, exact, axes, manual.axes, request.sent_room or 0)
    return Across(ways, groups, share, means)


def drop_dead(graph: fx.Graph, _: JointState) -> None:
    """Remove nodes that nothing reads."""
    graph.eliminate_dead_code()
    graph.lint()
