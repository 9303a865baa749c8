"""local -> bound: one rank's coordinates in the local graph.

In: the local graph, equal on all ranks. Out: the same nodes in a new graph in which
``offset`` is a number, ``fxpar::permute`` one ``all_to_all_single``, and groups are
those of this rank. What can do without the number gets it when it runs, if that is
asked for (``late``): then most bound graphs are equal on all ranks, too. Random ops
that turned out whole become Inductor's own again, so that what is not sharded compiles
as on one device; what is drawn comes from rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.passes import custom_ops, own_shard
from fxpar.passes.builder import Builder
from fxpar.passes.graph_bodies import body_of, bound_body
from fxpar.passes.local_flex import op_by_op
from fxpar.passes.loop_steps import uncount_steps
from fxpar.passes.unroll import unroll_scans
from fxpar.sharding.mesh import Mesh

GroupOf = Callable[[tuple[str, ...]], str]


def bind(
    graph: fx.Graph,
    mesh: Mesh,
    rank: int,
    group_of: GroupOf,
    fake_mode: Any,
    *,
    inductor: bool,
    late: bool = False,
) -> fx.Graph:
    """The bound graph of ``rank``. ``group_of``: axes -> name of the process group;
    ``late``: its coordinates are looked up when it runs, where ops can."""
    new = fx.Graph()
    build = Builder(new, fake_mode, mesh)
    done: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), done.__getitem__)
        args = _with_group(args, group_of)
        if node.target is custom_ops.offset:
            with custom_ops.as_rank(rank):
                done[node] = custom_ops.offset(*node.args)
            continue
        if node.target is torch.ops.fxpar.permute.default:
            with build.at(node):
                done[node] = _permute(build, mesh, rank, node, *args)
            continue
        sent = _sent_as(node, inductor)
        if sent is not None:
            with build.at(node):
                done[node] = _gather_as(build, node, sent, *args)
            continue
        made = _bound_late(build, node, args, kwargs) if late else None
        if made is not None:
            done[node] = made
            continue
        target = node.target
        if inductor and node.op == "call_function":
            target, args = _as_inductor(node, args)
        elif node.op == "call_function":
            target = op_by_op(target)
        copy = new.create_node(node.op, target, args, kwargs, node.name)
        copy.meta = dict(node.meta)
        body = body_of(node)
        if body is not None:
            copy.meta["val"] = bound_body(body, rank)
        done[node] = copy
        if _draws(node):
            with build.at(node):
                done[node] = _of_rank_0(build, copy, mesh, group_of)
    if inductor:
        unroll_scans(new, mesh, fake_mode)
        uncount_steps(new, fake_mode)
    new.lint()
    return new


def _bound_late(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """A node with offsets that are looked up when it runs; None if it reads none, or
    takes numbers alone."""
    if all(x.target is not custom_ops.offset for x in node.all_input_nodes):
        return None
    with build.at(node):
        return own_shard.bind_late(build, node, args, kwargs)


def _with_group(args: Any, group_of: GroupOf) -> Any:
    """Arguments with symbolic group names replaced."""
    return tuple(
        group_of(custom_ops.group_axes(a))
        if isinstance(a, str) and a.startswith(custom_ops.GROUP_PREFIX)
        else a
        for a in args
    )


def _sent_as(node: fx.Node, inductor: bool) -> torch.dtype | None:
    """As what a node gathers, or waits for, if not as what it is. Neither NCCL nor gloo
    sends int16; Inductor (2.13) takes the group size for an operand that promotes bools
    to int64."""
    c10d = torch.ops._c10d_functional
    gather = node.args[0] if node.target is c10d.wait_tensor.default else node
    if gather.target is not c10d.all_gather_into_tensor.default:
        return None
    dtype = gather.meta["val"].dtype
    if dtype is torch.bool:
        return torch.uint8 if inductor else None
    return torch.int32 if dtype is torch.int16 else None


def _gather_as(
    build: Builder, node: fx.Node, dtype: torch.dtype, x: fx.Node, *rest: Any
) -> fx.Node:
    """The gather of ``x`` in another dtype; the wait for one in its own again."""
    convert = torch.ops.prims.convert_element_type.default
    if not rest:
        return build.call(convert, build.wait(x), node.meta["val"].dtype)
    return build.call(node.target, build.call(convert, x, dtype), *rest)


def _permute(
    build: Builder,
    mesh: Mesh,
    rank: int,
    node: fx.Node,
    x: fx.Node,
    sources: list[int],
    group: str,
) -> fx.Node:
    """Member i receives from ``sources[i]``: an all-to-all of one piece a rank."""
    members = mesh.group(rank, custom_ops.group_axes(node.args[2]))
    me = members.index(rank)
    aten = torch.ops.aten
    shape = list(x.meta["val"].shape)
    flat = build.call(aten.reshape.default, x, [-1])
    n = flat.meta["val"].shape[0]
    receive = [n if i == sources[me] else 0 for i in range(len(members))]
    send = [n if source == me else 0 for source in sources]
    c10d = torch.ops._c10d_functional
    moved = build.call(c10d.all_to_all_single.default, flat, receive, send, group)
    return build.call(aten.view.default, build.wait(moved), shape)


def _as_inductor(node: fx.Node, args: Any) -> tuple[Any, Any]:
    """Inductor's own op, where the whole tensor is drawn as Inductor would.

    Not so on CUDA: there Inductor's numbers depend on how it tiles a kernel, ours count
    by global index alone.
    """
    target, value = node.target, node.meta.get("val")
    if target is torch.ops.fxpar.seeds.default:
        return _torch.inductor.inductor_seeds(), args
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return target, args
    if target is torch.ops.fxpar.random.default:
        size, seed, mode, whole, _ = args
        if list(size) == list(whole):
            return _torch.inductor.inductor_random(), (size, seed, mode)
    elif target is torch.ops.fxpar.randint.default:
        low, high, size, seed, whole, _ = args
        if list(size) == list(whole):
            return _torch.inductor.inductor_randint(), (low, high, size, seed)
    return target, args


def _draws(node: fx.Node) -> bool:
    """Whether a node draws from the generator of a rank: seeds, or numbers that depend
    on what was drawn before them, which every rank draws whole."""
    target, value = node.target, node.meta.get("val")
    if target is torch.ops.fxpar.seeds.default:
        return True
    return (
        isinstance(target, _torch.inductor.OpOverload)
        and target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded in target.tags
        and isinstance(value, torch.Tensor)
    )


def _of_rank_0(build: Builder, drawn: fx.Node, mesh: Mesh, group_of: GroupOf) -> Any:
    """What rank 0 drew for all: generators of ranks may have drifted apart (a data
    loader that augments, a print of a random number), masks may not."""
    if mesh.size == 1:
        return drawn
    c10d = torch.ops._c10d_functional
    group = group_of(mesh.names)
    return build.wait(build.call(c10d.broadcast.default, drawn, 0, group))
