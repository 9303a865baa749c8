"""Computes mixtures of experts where their experts are: steps of the pipeline.

In: a traced graph, a local one, or a forward or a backward, with the state of the
pipeline. Out: the graph, changed in place. Never: a difference between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from fxpar.features.experts import (
    exact_exchange,
    first_rows,
    local_experts,
    normalize_experts,
    normalize_fused_experts,
)
from fxpar.features.experts import keep_sorted as sorting
from fxpar.features.experts.across_places import means_of_experts
from fxpar.features.experts.expert_ops import room_of
from fxpar.features.experts.group_rows import SentRows
from fxpar.features.experts.normalize_experts import Across, ExpertWays
from fxpar.graph.builder import shape_of
from fxpar.passes.order.order_collectives import of_build
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.runtime.steps.plan_steps import parts_of
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import UNNAMED
from fxpar.sharding.plan_request import Request
from fxpar.sharding.propagate.conventions import batch_axes, sequence_axes

split_fused_experts = of_build(normalize_fused_experts.split_fused_experts)
sort_by_expert = of_build(local_experts.sort_by_expert)
keep_sorted = of_build(sorting.keep_sorted)
exact_exchanges = of_build(exact_exchange.exact_exchanges)
compute_first_rows = of_build(first_rows.compute_first_rows)


def mark_first_rows(graph: fx.Graph, _: JointState) -> None:
    """Mark values of which only first rows are read."""
    first_rows.mark_first_rows(graph)


def experts_in_place(graph: fx.Graph, state: JointState) -> None:
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
    notes += normalize_experts.experts_in_place(graph, state.build, ways)
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
    manual = request.manual
    axes = manual.expert_axes if manual is not None else ()
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
