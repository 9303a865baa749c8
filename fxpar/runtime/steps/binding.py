"""Bind a local graph to one rank: local -> bound.

In: the local graph, identical on all ranks, and the rank. Out: the same nodes in a new
graph in which ``offset`` is a number, ``fxpar::permute`` one ``all_to_all_single``, and
groups are those of this rank. Where shards are uneven, sizes are numbers too, and fake
values have this rank's shapes. With ``at_run_time``, an op that can do without the
number looks its offset up when it runs (``own_shard.bind_late``): then most bound
graphs are identical on all ranks, too. Random ops that draw a whole tensor become
Inductor's own again, so that what is not sharded compiles as on one device; random
numbers come from rank 0. Never: changes to the local graph, or communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import calls_where
from fxpar.graph import custom_ops, size_nodes
from fxpar.graph.builder import Builder, custom_of, is_uneven, value_of
from fxpar.graph.graph_bodies import body_of, bound_body, is_of_a_rank
from fxpar.passes import own_shard
from fxpar.passes.decompose import op_by_op
from fxpar.passes.moved_rows import bound_exchange
from fxpar.passes.normalize.random import BY_INDEX
from fxpar.passes.order.bucket_collectives import LARGEST, whole_bytes
from fxpar.passes.rank_sizes import is_size, restate
from fxpar.passes.simulate.loop_steps import uncount_steps, unroll_scans
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import is_draw
from fxpar.sharding.row_moves import Exchange

GroupOf = Callable[[tuple[str, ...]], str]

# Key in a bound node's meta: whether it holds a number that differs between ranks.
OF_RANK = "fxpar_of_rank"

# Step from the seeds of one place along manual axes to those of the next: odd, so that
# no two of 2**64 places have the same.
PLACE_STEP = 0x9E3779B97F4A7C15 - (1 << 64)

_ATEN = torch.ops.aten
_C10D = torch.ops._c10d_functional
_PAD = _ATEN.constant_pad_nd.default
_PERMUTE = torch.ops.fxpar.permute.default
_RESOLVED = _ATEN.resolve_conj.default
_MOVE_ROWS = torch.ops.fxpar.move_rows.default
_WAIT, _EXCHANGE = _C10D.wait_tensor.default, _C10D.all_to_all_single.default
_REDUCES = {_C10D.all_reduce.default, _C10D.reduce_scatter_tensor.default}
_BROADCAST, _GATHER = _C10D.broadcast.default, _C10D.all_gather_into_tensor.default
_SENDS = {_EXCHANGE, *_REDUCES, _GATHER, _BROADCAST}
# Neither NCCL nor gloo sends these dtypes. Sums and products wrap around identically
# once they are cut off to the narrow dtype again.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
# gloo gathers and sums complex numbers, but does not exchange them.
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def bind(
    graph: fx.Graph,
    mesh: Mesh,
    rank: int,
    group_of: GroupOf,
    fake_mode: Any,
    *,
    inductor: bool,
    at_run_time: bool = False,
    manual: Sequence[str] = (),
) -> fx.Graph:
    """Return the bound graph of ``rank``.

    group_of: name of the process group of the given axes. inductor: the graph goes to
    Inductor. at_run_time: ops that can do so look up the rank's coordinates when they
    run. manual: axes along which ranks draw random numbers of their own.
    """
    rank_graph = fx.Graph()
    build = Builder(rank_graph, fake_mode, mesh)
    bound: dict[fx.Node, Any] = {}
    uneven = is_uneven(graph)
    rank_dependent = set[fx.Node]()  # numbers that are not the same on all ranks
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), bound.__getitem__)
        args = _with_group(args, group_of)
        if node.target in rank_ints.PLACES:
            at = rank_ints.place(node.target, value_of(node.args), rank)
            bound[node] = size_nodes.as_nodes(rank_graph, at)
            rank_dependent.add(node)
            continue
        depends_on_rank = not rank_dependent.isdisjoint(node.all_input_nodes)
        if is_size(node) and all(isinstance(x, int) for x in args):
            bound[node] = node.target(*args)
            rank_dependent.update([node] if depends_on_rank else [])
            continue
        if node.target in (_MOVE_ROWS, _PERMUTE):
            exchange = _move_rows if node.target is _MOVE_ROWS else _permute
            with build.at(node):
                bound[node] = exchange(build, mesh, rank, node, *args)
            bound[node].meta[OF_RANK] = True
            continue
        late_op = _bound_late(build, node, args, kwargs) if at_run_time else None
        if late_op is not None:
            bound[node] = late_op
            continue
        target = node.target
        if inductor and node.op == "call_function":
            target, args = _as_inductor(node, args)
        elif node.op == "call_function":
            target = op_by_op(target, kwargs.get("dtype"))
        if uneven and node.target is _PAD and not any(args[1]):
            bound[node] = args[0]  # nothing is padded on this rank
            continue
        copy = rank_graph.create_node(node.op, target, args, kwargs, node.name)
        copy.meta.update(node.meta)
        copy.meta[OF_RANK] = depends_on_rank or uneven
        if uneven:
            _note_largest(copy, node)
            restate(copy, node, bound, mesh, rank, fake_mode)
        body = body_of(node)
        if body is not None:
            copy.meta["val"] = bound_body(body, rank)
            copy.meta[OF_RANK] = is_of_a_rank(body)
        bound[node] = copy
        if _is_draw(node):
            with build.at(node):
                bound[node] = _of_first_rank(build, copy, mesh, group_of, manual)
                place = mesh.index(rank, manual)
                if node.target is torch.ops.fxpar.seeds.default and place:
                    offset = (place * PLACE_STEP + (1 << 63)) % (1 << 64) - (1 << 63)
                    moved = torch.ops.fxpar.moved_seeds.default
                    bound[node] = build.call(moved, bound[node], offset)
                    bound[node].meta[OF_RANK] = True
    _convert_sent(build, inductor)
    if inductor:
        unroll_scans(rank_graph, mesh, fake_mode)
        uncount_steps(rank_graph, fake_mode)
    rank_graph.lint()
    return rank_graph


def _note_largest(copy: fx.Node, node: fx.Node) -> None:
    """Note how many bytes a collective has on the largest rank, by which buckets are
    filled, so that they are equal on all ranks."""
    if node.target in _SENDS:
        copy.meta["custom"] = custom_of(node) | {LARGEST: whole_bytes(node)}


def is_of_all(bound: fx.Graph) -> bool:
    """Return whether a bound graph is identical on every rank."""
    return not any(node.meta.get(OF_RANK) for node in bound.nodes)


def _bound_late(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return a copy of a node that looks up its offsets when it runs; None if the node
    reads no offset, or takes numbers alone."""
    if all(x.target is not rank_ints.offset for x in node.all_input_nodes):
        return None
    with build.at(node):
        return own_shard.bind_late(build, node, args, kwargs)


def _with_group(args: Any, group_of: GroupOf) -> Any:
    """Return arguments with symbolic group names replaced by real ones."""
    if str not in map(type, args):
        return args
    return tuple(
        group_of(custom_ops.group_axes(a))
        if isinstance(a, str) and a.startswith(custom_ops.GROUP_PREFIX)
        else a
        for a in args
    )


def _convert_sent(build: Builder, inductor: bool) -> None:
    """Send operands that a backend does not take in a dtype that it takes, and convert
    the results back. Values are converted, not their bits: kernels may load narrow
    floats as wider ones."""
    for launch in calls_where(build.graph, _SENDS.__contains__):
        dtype = _sent_as(launch, inductor)
        if dtype is None:
            continue
        with build.before(launch):
            sent = _convert(build, launch.args[0], dtype, _order_of(launch))
            start = build.call(launch.target, sent, *launch.args[1:], **launch.kwargs)
        start.meta[OF_RANK] = launch.meta.get(OF_RANK, False)
        for wait in [user for user in launch.users if user.target is _WAIT]:
            with build.before(wait):
                result = build.wait(start)
                result = _convert(build, result, wait.meta["val"].dtype)
            build.replace(wait, result)
        build.graph.erase_node(launch)


def _sent_as(launch: fx.Node, inductor: bool) -> torch.dtype | None:
    """Return the dtype in which a collective sends its operand, None if in its own."""
    value = launch.args[0].meta["val"]
    dtype, on_gloo = value.dtype, value.device.type == "cpu"
    if dtype is torch.bool and launch.target is _GATHER:
        # Inductor (2.13) takes the group size for an operand that promotes to int64.
        return torch.uint8 if inductor else None
    if dtype.is_complex and launch.target is _EXCHANGE:
        return _REAL_OF[dtype] if on_gloo else None
    if dtype.is_floating_point and _order_of(launch):
        return _KEYS.get(dtype, torch.int32)
    if dtype.is_floating_point and dtype.itemsize == 1 and on_gloo:
        return torch.float16  # NCCL moves them as bytes, gloo not at all
    return _WIDER.get(dtype)


def _order_of(launch: fx.Node) -> str:
    """Return "max" or "min" if a collective chooses it among its operands, else ""."""
    kind = launch.args[1] if launch.target in _REDUCES else ""
    return kind if kind in ("max", "min") else ""


def _convert(
    build: Builder, x: fx.Node, dtype: torch.dtype, order: str = ""
) -> fx.Node:
    """Add a conversion of ``x`` to ``dtype``: complex numbers become pairs of real ones
    and such pairs complex numbers; floats whose "max" or "min" (``order``) is chosen
    become integer keys and such keys floats."""
    have = x.meta["val"].dtype
    if have.is_floating_point and order:
        return _keys_of(build, x, order)
    if dtype.is_floating_point and have in _KEYS.values():
        return _numbers_of(build, x, dtype)
    if have.is_complex and not dtype.is_complex:
        return build.call(_ATEN.view_as_real.default, build.call(_RESOLVED, x))
    if dtype.is_complex and not have.is_complex:
        return build.call(_ATEN.view_as_complex.default, x)
    return build.call(torch.ops.prims.convert_element_type.default, x, dtype)


# Of a NaN and a number, backends return either one, depending on which comes first;
# torch returns NaN. So a max or min over ranks is one of keys, integers with the order
# of the floats: the bits of a float, those below the sign inverted where it is
# negative; NaN has the most extreme key.
#
# Float -> the integer dtype of the same width, which backends reduce; others are cast.
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _keys_of(build: Builder, x: fx.Node, op: str) -> fx.Node:
    """Return the keys of ``x`` for a reduction by max or min."""
    keys = _KEYS.get(x.meta["val"].dtype, torch.int32)
    limits = torch.iinfo(keys)
    x = build.cast(x, _float_of(keys))
    key = _turned(build, build.call(_ATEN.view.dtype, x, keys))
    beyond = limits.max if op == "max" else limits.min
    device = x.meta["val"].device
    nan = build.call(_ATEN.full.default, [], beyond, dtype=keys, device=device)
    return build.call(_ATEN.where.self, build.call(_ATEN.isnan.default, x), nan, key)


def _numbers_of(build: Builder, keys: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the numbers that keys encode, in this dtype."""
    wide = _float_of(keys.meta["val"].dtype)
    return build.cast(build.call(_ATEN.view.dtype, _turned(build, keys), wide), dtype)


def _float_of(keys: torch.dtype) -> torch.dtype:
    return next(wide for wide, whole in _KEYS.items() if whole == keys)


def _turned(build: Builder, bits: fx.Node) -> fx.Node:
    """Return the bits with those below the sign inverted in negative numbers; the
    function is its own inverse."""
    below_sign = torch.iinfo(bits.meta["val"].dtype).max
    turned = build.call(_ATEN.bitwise_xor.Scalar, bits, below_sign)
    is_negative = build.call(_ATEN.lt.Scalar, bits, 0)
    return build.call(_ATEN.where.self, is_negative, turned, bits)


def _permute(
    build: Builder,
    mesh: Mesh,
    rank: int,
    node: fx.Node,
    x: fx.Node,
    sources: list[int],
    group: str,
) -> fx.Node:
    """Add an all-to-all in which member i of the group receives from ``sources[i]``,
    one piece a rank."""
    members = mesh.group(rank, custom_ops.group_axes(node.args[2]))
    me = members.index(rank)
    shape = list(x.meta["val"].shape)
    flat = build.call(_ATEN.reshape.default, x, [-1])
    n = flat.meta["val"].shape[0]
    receive = [n if i == sources[me] else 0 for i in range(len(members))]
    send = [n if source == me else 0 for source in sources]
    received = build.wait(build.call(_EXCHANGE, flat, receive, send, group))
    return build.call(_ATEN.view.default, received, shape)


def _move_rows(
    build: Builder, mesh: Mesh, rank: int, node: fx.Node, x: fx.Node, *args: Any
) -> fx.Node:
    """Add the exchange of rows by an all-to-all of pieces of different sizes."""
    _, _, text, _, group = args

    def send(rows: fx.Node, gets: list[int], gives: list[int]) -> fx.Node:
        return build.wait(build.call(_EXCHANGE, rows, gets, gives, group))

    return bound_exchange(build, x, Exchange.parse(text), mesh, rank, send)


def _as_inductor(node: fx.Node, args: Any) -> tuple[Any, Any]:
    """Return Inductor's own op and its arguments where a whole tensor is drawn as
    Inductor would draw it, else those of the node.

    Not so on CUDA: there Inductor's numbers depend on how it tiles a kernel, ours count
    by global index alone.
    """
    target, value = node.target, node.meta.get("val")
    prim, ours = _torch.inductor.inductor_prim, torch.ops.fxpar
    if target is ours.seeds.default:
        return prim("seeds"), args
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return target, args
    for name, (count, at) in BY_INDEX.items():
        if target is getattr(ours, name).default and list(args[at]) == [*args[count]]:
            return prim(name), args[:count]
    return target, args


def _is_draw(node: fx.Node) -> bool:
    """Return whether a node draws from the generator of a rank: seeds, or numbers that
    depend on what was drawn before them, which every rank draws whole."""
    if node.target is torch.ops.fxpar.seeds.default:
        return True
    return getattr(node.target, "namespace", "") == "aten" and is_draw(node)


def _of_first_rank(
    build: Builder, draw: fx.Node, mesh: Mesh, group_of: GroupOf, manual: Sequence[str]
) -> Any:
    """Add a broadcast of what the first rank drew, over all axes but the ``manual``
    ones: generators of ranks may differ by then (a data loader that augments, a print
    of a random number), masks may not."""
    axes = tuple(axis for axis in mesh.names if axis not in manual)
    if mesh.count(axes) == 1:
        return draw
    launch = build.call(_BROADCAST, draw, 0, group_of(axes))
    return build.wait(launch)
