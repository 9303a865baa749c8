"""Computes mixtures of experts where their experts are: steps of the pipeline.

In: a traced graph, or a local one, with the state of the pipeline. Out: the graph,
changed in place. Never: a difference between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.features.experts import (
    local_experts,
    normalize_fused_experts,
    sorted_rows,
)
from fxpar.features.experts.expert_axes import SORTS, products_by
from fxpar.features.experts.expert_ops import room_of
from fxpar.features.experts.normalize_experts import (
    DispatchedRows,
    GroupCopies,
    Mixture,
)
from fxpar.graph.builder import shape_of
from fxpar.passes.order.order_collectives import of_build
from fxpar.passes.row_wise import keeps_rows
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.decide import UNNAMED
from fxpar.sharding.factors import Axes
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.plan_request import Request
from fxpar.sharding.propagate.conventions import batch_axes, sequence_axes
from fxpar.sharding.spec import Spec

aten = torch.ops.aten
_MEAN = torch.ops.fxpar.mean_over_ranks.default

split_fused_experts = of_build(normalize_fused_experts.split_fused_experts)
sort_by_expert = of_build(local_experts.sort_by_expert)
keep_sorted = of_build(sorted_rows.keep_sorted)
exact_exchanges = of_build(sorted_rows.exact_exchanges)


def experts_in_place(graph: fx.Graph, state: JointState) -> None:
    """Compute tokens that are sorted by expert on the ranks that hold the experts."""
    notes, sent = list[str](), dict[fx.Node, int]()
    for sort in list(graph.nodes):
        if sort.target not in SORTS or len(shape_of(sort.args[0])) != 1:
            continue
        products = products_by(sort)
        if not products:
            continue
        means = _means(state.request, sent, products, sort.args[0])
        with state.build.before(sort):
            copies = _copies(state, sort.args[0], products, means, notes.append)
        mixture = Mixture(state.build, sort, products, copies)
        mixture.read(list(graph.nodes))
        left = mixture.write(graph)
        if left is None:
            _divide(state, means or ())
        notes += left or ()
    graph.eliminate_dead_code()
    slots = torch.ops.fxpar.dispatch_slots.default
    keys = {n.args[0] for n in graph.find_nodes(op="call_function", target=slots)}
    state.sent_rows = tuple(n if key in keys else 0 for key, n in sent.items())
    state.notes += tuple(dict.fromkeys(notes))


def _copies(
    state: JointState,
    key: fx.Node,
    products: Mapping[fx.Node, int],
    means: Sequence[fx.Node] | None,
    note: Callable[[str], None],
) -> GroupCopies | DispatchedRows:
    """Return what brings rows to groups of experts. ``key``: the expert of each row;
    ``means``: as ``_means`` returns them."""
    request, build, mesh = state.request, state.build, state.request.mesh
    options, experts = request.options, max(products.values())
    axes, room = request.expert_axes, options.expert_room or 0.0
    groups = mesh.count(axes)
    if experts % groups:
        note(
            f"{experts} experts are not split over {'+'.join(axes)} ({groups} ranks): "
            "each rank has all of them"
        )
        groups = 1
    manual = request.manual
    if manual is not None and means is not None:
        on_host = key.meta["val"].device.type == "cpu"
        return DispatchedRows(
            build,
            key,
            experts,
            manual.mesh.count(manual.expert_axes),
            1,
            share=room,
            exact=on_host and options.expert_exchange != "all_to_all",
            across=manual.expert_axes,
            telling=manual.axes,
            rows=request.sent_room or 0,
        )
    rows = shape_of(key)[0]
    if groups > 1 and isinstance(rows, int):
        tokens = next(iter(products)).args[0].meta["val"]
        nbytes = tokens.shape[-1] * tokens.dtype.itemsize
        sent = _sent(request, note, key, nbytes, groups)
        if sent is not None:
            sources, exact = sent
            return DispatchedRows(
                build, key, experts, groups, sources, share=room, exact=exact
            )
    return GroupCopies(build, key, experts, groups, room)


_NO_SIZES = (
    "rows are sent to experts in slots of a fixed size, since on this device counts "
    "are not read on the host"
)


def _sent(
    request: Request,
    note: Callable[[str], None],
    key: fx.Node,
    nbytes: int,
    groups: int,
) -> tuple[int, bool] | None:
    """Return (how many parts of the rows are sent separately, whether by exact
    numbers), where that takes less time than to gather the tokens, or is asked for;
    None if the tokens are gathered. Times are predicted from the bytes that are sent
    and those that a rank then reads and writes; ``nbytes``: of a row."""
    mesh, options, axes = request.mesh, request.options, request.expert_axes
    chosen = key.args[0] if op_facts_of(key.target).reshapes else key
    copies = shape_of(chosen)[-1] if len(shape_of(chosen)) == 2 else 1
    tokens, exchange = shape_of(key)[0] // copies, options.expert_exchange
    parts = mesh.count(tuple(dict.fromkeys((*batch_axes(mesh), *axes))))
    if exchange == "gather" or tokens % parts or sequence_axes(mesh):
        return None
    may_be_exact = key.meta["val"].device.type == "cpu"
    if exchange == "exact" and not may_be_exact:
        note(_NO_SIZES)
    if exchange == "auto":
        # Exact numbers of rows are for hosts that compute: the hardware is named, or
        # the program runs here.
        on_host = may_be_exact and request.rank is not None
        hardware = request.named_hardware or lookup("cpu" if on_host else UNNAMED)
        part_bytes = tokens // parts * nbytes
        rows = part_bytes * copies
        gather, scatter, exchanged = (
            along(kind, hardware.on(mesh), axes).seconds
            for kind in ("all_gather", "reduce_scatter", "all_to_all")
        )
        seconds = {"gather": gather(part_bytes) + scatter(part_bytes * groups)}
        if options.expert_room is not None:
            room = room_of(tokens * copies, groups, parts, options.expert_room)
            seconds["all_to_all"] = 2 * exchanged(room * groups * nbytes)
        if may_be_exact and hardware.beside:
            seconds["gather"] += 2 * hardware.streaming(2 * rows * groups)
            seconds["exact"] = 2 * exchanged(rows) + 2 * hardware.streaming(2 * rows)
        exchange = min(seconds, key=seconds.__getitem__)
    if exchange == "gather":
        return None
    microbatches = parts * request.parts
    sources = parts if tokens % microbatches else microbatches
    return sources, exchange == "exact" and may_be_exact


def _means(
    request: Request,
    sent: dict[fx.Node, int],
    products: Mapping[fx.Node, int],
    key: fx.Node,
) -> list[fx.Node] | None:
    """Return the means of the gradients of weights of experts that are stored over
    manual axes, to which rows are sent; None if each rank gathers the weights of all
    experts. Adds to ``sent`` how many rows a rank would send.

    Along a manual axis each rank runs its own program and gathers parameters before
    use; their gradients become means (``sharding.manual_axes``). A rank may keep its
    own experts instead and multiply the rows of all ranks: an expert gives the same for
    a row on every rank. Its gradient is then a sum over the rows of all. A mixture is
    gathered if a weight of it is not stored expert by expert, or if a weight or a
    gradient is read in another way than expert by expert."""
    manual = request.manual
    axes = manual.expert_axes if manual is not None else ()
    if manual is None or not axes or request.options.expert_exchange == "gather":
        return None
    one_part = request.parts == 1 and request.pipeline is None
    if not one_part or sequence_axes(request.mesh):
        return None
    groups, rows = manual.mesh.count(axes), shape_of(key)[0]
    if any(experts % groups for experts in products.values()):
        return None
    gradients: list[fx.Node] = []
    for product in products:
        weight, gradient = _weight_of(product)
        if weight is not None and not _is_split_at_rest(weight, request, axes):
            return None
        gradients += [] if gradient is None else [gradient]
    means = list(dict.fromkeys(_readers(gradients)))
    for node in means:
        if node.target is not _MEAN or not _is_split(
            Spec.parse(str(node.args[1])), axes
        ):
            return None
    sent[key] = rows if isinstance(rows, int) and request.sent_room != 0 else 0
    return means if sent[key] else None


def _divide(state: JointState, means: Sequence[fx.Node]) -> None:
    """Divide gradients that are sums over the rows of all groups by the number of
    groups before the mean over ranks."""
    for mean in means:
        manual = state.request.manual
        assert manual is not None, "its axes have experts"
        share = 1 / manual.mesh.count(manual.expert_axes)
        with state.build.before(mean):
            mean.update_arg(0, state.build.call(aten.mul.Tensor, mean.args[0], share))


def _weight_of(product: fx.Node) -> tuple[Any, fx.Node | None]:
    """Return (the weight that a grouped product reads, the weight gradient that it
    gives)."""
    x, y = product.args[:2]
    if len(product.args) > 3:  # the backward of a product
        items = {user.args[1]: user for user in product.users}
        return y, items.get(1)
    return (y, None) if len(shape_of(y)) == 3 else (None, product)


def _is_split_at_rest(weight: fx.Node, request: Request, axes: Axes) -> bool:
    """Return whether a weight is made, expert by expert, of a parameter that is sharded
    over the axes."""
    while weight.op == "call_function" and len(weight.all_input_nodes) == 1:
        (source,) = weight.all_input_nodes
        if not keeps_rows(weight, source):
            return False
        weight = source
    if weight.op != "placeholder":
        return False
    place = weight.graph.find_nodes(op="placeholder").index(weight)
    at_rest = request.signature.inputs[place].at_rest
    return at_rest is not None and _is_split(at_rest, axes)


def _is_split(spec: Spec, axes: Axes) -> bool:
    """Return whether the axes are the first that split dim 0."""
    return bool(spec.dims) and spec.dims[0][: len(axes)] == axes


def _readers(gradients: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield what reads gradients, except for ops that pass sums of them on expert by
    expert."""
    passed, queue = set(gradients), list(gradients)
    while queue:
        for user in queue.pop().users:
            operands = user.all_input_nodes
            facts = op_facts_of(user.target)
            passes = facts.casts or facts.renames or facts.reshapes or facts.permutes
            passes = passes or user.target in (aten.clone.default, aten.add.Tensor)
            if not passes or not all(keeps_rows(user, x) for x in operands):
                yield user
            elif user not in passed:
                passed.add(user)
                queue.append(user)
    for node in passed.difference(gradients):  # sums with something else
        if not passed.issuperset(node.all_input_nodes):
            yield node
