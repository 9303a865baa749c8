"""Runs a local graph for every rank of a mesh, in this process, without communication.

In: a local graph and each rank's inputs. Out: each rank's results. All ranks advance
node by node; a collective is computed from the inputs of its group's members. An op on
objects that several ranks share runs once, and its result stays shared, so that a
random op on replicated inputs draws once, and a large mesh is cheap where little is
split. Never changes the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.graph import custom_ops
from fxpar.graph import region_ops as _region_ops  # noqa: F401  (registers ops)
from fxpar.graph.graph_bodies import attribute_at, body_of, bound_body, module_of
from fxpar.graph.pipeline_ops import OF_STAGES, is_laid_out
from fxpar.passes.decompose import op_by_op
from fxpar.passes.lower import LOWERINGS
from fxpar.passes.simulate.emulate_collectives import (
    ON_DIMS,
    PRODUCTS,
    Post,
    Ranks,
    ends_of,
    gather,
    scatter,
    shared,
)
from fxpar.sharding import rank_ints
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import is_draw
from fxpar.sharding.ops.own_op_rules import REGION_OPS
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.spec import Spec

c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar
_SENDS = {c10d.isend.default, ours.send.default}
_RECEIVES = {c10d.irecv.default, ours.receive.default}


def run_lockstep(
    graph: fx.Graph | fx.GraphModule, mesh: Mesh, inputs: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return each rank's results. ``inputs[r]``: the placeholders' values on rank r.

    The graph is a local one, its groups symbolic. An op that changes an argument in
    place does so per rank; where ranks share that argument they get copies of it first.
    Raises PlanError for an unknown collective.
    """
    post = Post()
    (results,) = _run_all(
        [_run_steps(graph, mesh, range(mesh.size), inputs, post)], post
    )
    return results


def run_ranks(
    graph: fx.Graph | fx.GraphModule, mesh: Mesh, inputs: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return each rank's results, as ``run_lockstep``; of a graph of stages
    (``lay_out_stages``) each rank runs its place's part. Raises as ``run_stages``."""
    module = graph if isinstance(graph, fx.GraphModule) else graph.owning_module
    nodes = graph.graph if isinstance(graph, fx.GraphModule) else graph
    axis = pipeline_axis(mesh)
    if axis is None or not is_laid_out(nodes):
        return run_lockstep(graph, mesh, inputs)
    programs: list[Any] = [
        OF_STAGES["program_at"](nodes, place) for place in range(mesh.axis_size(axis))
    ]
    if module is not None:
        programs = [module_of(module, program) for program in programs]
    return run_stages(programs, mesh, axis, inputs)


def run_global(
    graph: fx.Graph | fx.GraphModule, mesh: Mesh, inputs: Sequence[Any]
) -> Any:
    """Return the results of the one-device graph; manual regions in it are run for the
    ranks of ``mesh``."""
    nodes = (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    if not any(str(node.target) in REGION_OPS for node in nodes):
        mesh = Mesh((("all", 1),))
    return run_lockstep(graph, mesh, [inputs] * mesh.size)[0]


def run_stages(
    graphs: Sequence[fx.Graph | fx.GraphModule],
    mesh: Mesh,
    axis: str,
    inputs: Sequence[Sequence[Any]],
) -> list[Any]:
    """Return each rank's results, as ``run_lockstep``, where ranks at position i along
    ``axis`` run ``graphs[i]`` and send each other messages.

    Raises PlanError also if messages do not fit, or stages wait for each other.
    """
    post = Post()
    members = [
        [r for r in range(mesh.size) if mesh.index(r, [axis]) == i]
        for i in range(len(graphs))
    ]
    stages = [
        _run_steps(graph, mesh, ranks, [inputs[r] for r in ranks], post)
        for graph, ranks in zip(graphs, members, strict=True)
    ]
    result_of: dict[int, Any] = {}
    for ranks, results in zip(members, _run_all(stages, post), strict=True):
        result_of.update(zip(ranks, results, strict=True))
    return [result_of[r] for r in range(mesh.size)]


def _run_all(
    stages: Sequence[Generator[None, None, list[Any]]], post: Post
) -> list[list[Any]]:
    """Run stages, which yield while they wait for messages; return their results."""
    results: dict[int, list[Any]] = {}
    while len(results) < len(stages):
        before = post.sent, len(results)
        for i, stage in enumerate(stages):
            if i not in results:
                try:
                    next(stage)
                except StopIteration as end:
                    results[i] = end.value
        if (post.sent, len(results)) == before:
            raise PlanError("ranks wait for messages that nobody sends")
    return [results[i] for i in range(len(stages))]


def _run_steps(
    graph: fx.Graph | fx.GraphModule,
    mesh: Mesh,
    ranks: Sequence[int],
    inputs: Sequence[Sequence[Any]],
    post: Post,
) -> Generator[None, None, list[Any]]:
    """Run a graph for ``ranks``; lists have one entry for each of these. Yields while a
    message has not arrived."""
    module = graph if isinstance(graph, fx.GraphModule) else graph.owning_module
    nodes = (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    place, count = {rank: i for i, rank in enumerate(ranks)}, len(ranks)

    @functools.cache
    def groups(name: str) -> list[tuple[int, ...]]:
        """Return the groups of a name, each as a tuple of positions in ``ranks``."""
        members = [
            g for g in mesh.groups(custom_ops.group_axes(name)) if place.keys() & {*g}
        ]
        if any(r not in place for g in members for r in g):
            raise PlanError(f"stages run other graphs, and cannot meet along {name}")
        return [tuple(place[r] for r in g) for g in members]

    env: dict[fx.Node, Ranks] = {}
    dead_after = _last_uses(nodes)
    arguments = iter(range(len(nodes)))
    for node in nodes:
        if node.op == "placeholder":
            i = next(arguments)
            env[node] = [each[i] for each in inputs]
        elif node.op == "get_attr":
            body = body_of(node)
            env[node] = (
                [attribute_at(module, node.target)] * count
                if body is None
                else [bound_body(body, r) for r in ranks]
            )
        elif node.op == "output":
            return [
                fx.node.map_arg(node.args[0], _value_on(env, r)) for r in range(count)
            ]
        elif node.op != "call_function":
            raise PlanError(f"cannot simulate {node.op} {node.target} ({node.name})")
        elif node.target in rank_ints.PLACES:
            env[node] = [rank_ints.place(node.target, node.args, r) for r in ranks]
        elif node.target is c10d.wait_tensor.default:
            env[node] = env[node.args[0]]
        elif node.target in _SENDS:
            env[node] = post.send(node, env, ends_of(node, mesh, ranks))
        elif node.target in _RECEIVES:
            ends = [(peer, r) for r, peer in ends_of(node, mesh, ranks)]
            while not post.has_message(ends):
                yield
            env[node] = post.receive(node, env, ends)
        elif node.target is ours.share.default:
            env[node] = yield from shared(node, env, mesh, ranks, post)
        elif node.target is ours.after_sends.default:
            env[node] = env[node.args[0]]
        elif is_draw(node):
            env[node] = post.drawn(
                node.name, functools.partial(_compute, node, env, count)
            )
        elif str(node.target) in REGION_OPS:
            env[node] = _in_region(node, env, mesh, ranks)
        elif node.target in PRODUCTS or node.target in COLLECTIVES:
            name = custom_ops.group_of_call(node)
            env[node] = _collective(node, env, groups(name), count)
        elif getattr(node.target, "namespace", "") == "_c10d_functional":
            raise PlanError(f"cannot simulate {node.target} ({node.name})")
        else:
            env[node] = _compute(node, env, count)
        for dead_node in dead_after.get(node, ()):
            del env[dead_node]
    raise PlanError("the graph has no output")


def _last_uses(nodes: Any) -> dict[fx.Node, list[fx.Node]]:
    """Return {node: nodes that nothing reads after it}; a node without readers is among
    its own."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last[node] = node
        for read in node.all_input_nodes:
            last[read] = node
    out: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        out.setdefault(reader, []).append(node)
    return out


def _value_on(env: dict[fx.Node, Ranks], rank: int) -> Callable[[fx.Node], Any]:
    return lambda node: env[node][rank]


def _call(node: fx.Node, env: dict[fx.Node, Ranks], rank: int) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value_on(env, rank))
    return op_by_op(node.target, kwargs.get("dtype"))(*args, **kwargs)


def _identity(value: Any) -> Any:
    """Return a key that is equal only for values that are certainly the same."""
    if isinstance(value, (int, float, bool)):
        return type(value), value
    return id(value)


def _compute(node: fx.Node, env: dict[fx.Node, Ranks], size: int) -> Ranks:
    """Run an op that does not communicate, once for each distinct set of arguments."""
    reads = [env[read] for read in node.all_input_nodes]
    keys = [tuple(_identity(values[r]) for values in reads) for r in range(size)]
    if len(set(keys)) > 1:
        for changed in _torch.objects.written_by(node):
            _unshare(env, changed, keys)
    computed: dict[Any, Any] = {}
    for r, key in enumerate(keys):
        if key not in computed:
            computed[key] = _call(node, env, r)
    return [computed[key] for key in keys]


def _unshare(env: dict[fx.Node, Ranks], node: fx.Node, keys: list[Any]) -> None:
    """Give each rank that will change a shared tensor in its own way a copy."""
    values = env[node]
    owners: dict[tuple[int, Any], Any] = {}
    owned: set[int] = set()
    for r, key in enumerate(keys):
        value = values[r]
        if (id(value), key) not in owners:
            fresh = id(value) not in owned
            owned.add(id(value))
            owners[id(value), key] = value if fresh else value.clone()
    env[node] = [owners[id(values[r]), key] for r, key in enumerate(keys)]


def _collective(
    node: fx.Node, env: dict[fx.Node, Ranks], groups: list[tuple[int, ...]], size: int
) -> Ranks:
    """Run a collective, once for all groups whose members hold the same objects."""
    target, out = node.target, dict[int, Any]()
    results: dict[Any, Ranks] = {}
    for group in groups:
        key = tuple(_identity(env[x][r]) for r in group for x in node.all_input_nodes)
        if key not in results:
            args = [fx.node.map_arg(node.args, _value_on(env, r)) for r in group]
            if target in PRODUCTS:
                results[key] = PRODUCTS[target](args)
            else:
                members = [first for first, *_ in args]
                results[key] = COLLECTIVES[target](members, *args[0][1:])
        out.update(zip(group, results[key], strict=True))
    return [out[r] for r in range(size)]


def _in_region(
    node: fx.Node, env: dict[fx.Node, Ranks], mesh: Mesh, ranks: Sequence[int]
) -> Ranks:
    """Run an op of a manual region on all ranks of the mesh; outside of the region the
    graph has global shapes."""
    if node.target is ours.axis_index.default:
        places = [mesh.index(r, (node.args[0],)) for r in ranks]
        return [torch.tensor(place, device="cpu") for place in places]
    if node.target is ours.collective.default:
        _, kind, dims, op, _, names = node.args
        axes = mesh.ordered(names.split("+"))
        run: Any = functools.partial(ON_DIMS[kind], dims=dims, op=op)
    else:
        axes, spec = mesh.ordered(node.args[3].split("+")), Spec.parse(node.args[1])
        own = Mesh(tuple((axis, mesh.sizes[axis]) for axis in axes))
        enters = node.target is ours.enter_region.default

        def run(members: Ranks) -> Ranks:
            if enters:
                return scatter(members[0], spec, own)
            return [gather(members, spec, own)] * len(members)

    values, out = env[node.args[0]], dict[int, Any]()
    for group in mesh.groups(axes):
        out.update(zip(group, run([values[r] for r in group]), strict=True))
    return [out[r] for r in ranks]


# Op -> its emulation: (first argument of each member, other arguments) -> results.
COLLECTIVES: dict[Any, Callable[..., Ranks]] = {
    op: emulate
    for row in LOWERINGS.values()
    for op, emulate in row.emulations().items()
}
