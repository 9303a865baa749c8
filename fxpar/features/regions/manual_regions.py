"""Steps of the pipeline: check manual regions, name their collectives, and show bodies.

In: a joint graph whose manual regions (``region_ops``) have functional collectives with
an axis for the group. Out: the same graph with ``fxpar::collective`` for each of them,
on the dim it is meant for, and regions numbered in order; bodies of branches and loops
are values of its nodes, loops have a known number of steps. ``check_regions`` finds the
axes along which each value inside differs between ranks: a value that is declared whole
and differs, or that leaves a region other than by its edges, is an error. Never: a
difference between ranks.

Of a region with several bodies each is traced, from ``fxpar::fork_bodies(x, bodies,
region)``, which gives each body its own argument, to ``fxpar::choose_body(results,
region)``. The gradient of one is the other, so that a backward is chosen with its
forward. One body of each is kept: regions that one line calls on the same shapes, as
layers do, are one choice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import argument
from fxpar.errors import MeshError, PlanError, RegionError
from fxpar.graph import graph_bodies
from fxpar.graph.builder import Builder
from fxpar.graph.custom_ops import group_of_call
from fxpar.graph.region_ops import EDGES
from fxpar.passes.simulate.loop_steps import count_steps
from fxpar.runtime.steps.pipeline_state import JointState
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_facts import has_random_numbers, op_facts_of
from fxpar.sharding.ops.own_op_rules import LEAVE, manual_axes, sizes_of
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import user_line
from fxpar.sharding.spec import Spec
from fxpar.units import percent_more

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar


def absorb_regions(graph: fx.Graph, state: JointState) -> None:
    """Check the manual regions of a graph for its mesh, and name their collectives, in
    place.

    Raises PlanError for open sizes; RegionError; MeshError if the mesh is still to be
    chosen, or a region was traced for another mesh, or for none.
    """
    request = state.request
    edge = next((node for node in graph.nodes if node.target in EDGES), None)
    if edge is not None and state.open:
        raise PlanError("manual regions need fixed sizes")
    _check_bodies(graph)
    if edge is None:
        return
    if request.meshes:
        raise MeshError(
            "a manual region needs a mesh with names, and this mesh is chosen by "
            "the search",
            where=user_line(edge),
            fix='name the mesh: FXPAR_MESH="dp=2,tp=4"',
        )
    build = Builder(graph, state.fake_mode)
    keep_bodies(graph, request.bodies)
    _number(graph, request.mesh)
    _name_collectives(build, request.mesh)
    _join_moves(build)
    varying = check_regions(graph, request.mesh)
    scale_equal(build, varying, request.mesh)
    graph.eliminate_dead_code()
    graph.lint()


def raise_refused(gm: fx.GraphModule) -> None:
    """Raise the error of a manual region in what Dynamo traced: one that an op carries,
    or that the graph ends inside."""
    open_: set[int] = set()
    for node in gm.graph.nodes:
        if _overload(node.target) in EDGES:
            enters = _overload(node.target) is EDGES[0]
            (open_.add if enters else open_.discard)(node.args[4])
    broken_at = _torch.dynamo.graph_break_line(gm) if open_ else None
    if broken_at is not None:
        raise RegionError(
            "a graph break cuts a manual region",
            where=broken_at,
            fix="take out of fn what breaks the graph (TORCH_LOGS=graph_breaks says "
            "why), or move it outside",
        )
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target in (ours.refuse, ours.refuse.default):
                _, what, fix = node.args
                raise RegionError(what, where=user_line(node), fix=fix)


def on_one_rank(gm: fx.GraphModule) -> fx.GraphModule:
    """Take hints and manual regions out of a graph for one rank, in place: it has all
    values, and sends nothing. Returns it."""
    graph = gm.graph
    keep_bodies(graph)
    edges = [n for n in graph.nodes if _overload(n.target) in EDGES]
    axes = {axis for node in edges for axis in node.args[3].split("+")}
    for node in list(graph.nodes):
        target = _overload(node.target)
        if target in _KINDS and not axes.isdisjoint(str(node.args[-1]).split("+")):
            for wait in [n for n in node.users if n.target is c10d.wait_tensor]:
                wait.replace_all_uses_with(node.args[0])
                graph.erase_node(wait)
        elif target not in (*EDGES, ours.collective.default, ours.constrain.default):
            continue
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    gm.recompile()
    return gm


def _overload(target: Any) -> Any:
    """Return an op as traced graphs name it; Dynamo's graphs name it without its
    overload."""
    return getattr(target, "default", target)


def _check_bodies(graph: fx.Graph) -> None:
    """Check that no manual region is in a branch or a loop."""
    for node in graph_bodies.all_nodes(graph):
        if node.target in EDGES and node.graph is not graph:
            raise RegionError(
                "a manual region is inside a branch or a loop",
                where=user_line(node),
                fix="put the branch or loop inside fn, or write it in Python",
            )


def _number(graph: fx.Graph, mesh: Mesh) -> None:
    """Number regions in order: ranks may have traced others before."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if node.target not in EDGES:
            continue
        x, spec, its_mesh, axes, number = node.args
        if its_mesh != str(mesh):
            raise MeshError(
                f"a manual region was traced for mesh {its_mesh}, the program is for "
                f"mesh {mesh}",
                where=user_line(node),
                fix="name the mesh by FXPAR_MESH, or in options= of torch.compile",
            )
        node.args = (x, spec, its_mesh, axes, numbers.setdefault(number, len(numbers)))


# Functional collective -> the kind of ``collective_nodes``, and its dims.
_KINDS: dict[Any, tuple[str, list[int]]] = {
    c10d.all_reduce.default: ("all_reduce", []),
    c10d.all_gather_into_tensor.default: ("all_gather", [0]),
    c10d.reduce_scatter_tensor.default: ("reduce_scatter", [0]),
    c10d.all_to_all_single.default: ("all_to_all", [0, 0]),
}


def _name_collectives(build: Builder, mesh: Mesh) -> None:
    """Put ``fxpar::collective`` for each functional collective with axes for its
    group."""
    for node in list(build.graph.nodes):
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        named = group_of_call(node).split("+")
        axes = mesh.ordered(named) if all(axis in mesh.sizes for axis in named) else ()
        if not axes or node.target not in _KINDS:
            continue  # ``check_regions`` reports it
        for wait in [n for n in node.users if n.target is c10d.wait_tensor.default]:
            build.replace(wait, node)
        if mesh.count(axes) == 1:
            build.replace(node, node.args[0])
            continue
        kind, dims = _KINDS[node.target]
        if kind == "all_to_all":
            _check_even(node, mesh.count(axes))
        op = node.args[1] if "reduce" in kind else ""
        how = kind, [*dims], op, str(mesh), "+".join(axes)
        with build.before(node):
            collective = build.call(ours.collective.default, node.args[0], *how)
        build.replace(node, collective)


def _check_even(node: fx.Node, ranks: int) -> None:
    sizes = {*node.args[1], *node.args[2]}
    if len(sizes) != 1 or len(node.args[1]) != ranks:
        raise RegionError(
            f"all_to_all_single with blocks of {node.args[2]} for {ranks} ranks: one "
            "program for all ranks sends blocks of one size",
            where=user_line(node),
            fix="give None for both sizes, and pad the blocks",
        )


def _join_moves(build: Builder) -> None:
    """Put gathers and reduce-scatters on the dim they are meant for: torch's are on dim
    0, with a cut and a join around them."""
    for node in list(build.graph.nodes):
        moved = _moved(node)
        if moved is None:
            continue
        x, source, target = moved
        if source == 0 and _is_on_rows(x, "all_gather") and len(_readers(x)) == 1:
            _on_dim(build, x, target, node)
    for node in list(build.graph.nodes):
        if not _is_on_rows(node, "reduce_scatter"):
            continue
        moved = _moved(node.args[0]) if len(node.args[0].users) == 1 else None
        if moved is not None and moved[2] == 0:
            _on_dim(build, node, moved[1], node, moved[0])
    build.graph.eliminate_dead_code()


def _is_on_rows(node: fx.Node, kind: str) -> bool:
    """Return whether a node is a collective of this kind along dim 0."""
    collective = node.target is ours.collective.default
    return collective and (node.args[1], [*node.args[2]]) == (kind, [0])


def _on_dim(
    build: Builder, node: fx.Node, dim: int, by: fx.Node, x: fx.Node | None = None
) -> None:
    """Replace ``by`` by the collective of ``node`` on another dim."""
    first, kind, _, *rest = node.args
    with build.before(by):
        collective = build.call(ours.collective.default, x or first, kind, [dim], *rest)
    for key in ("stack_trace", "seq_nr", "partitioner_tag"):
        if key in node.meta:
            collective.meta[key] = node.meta[key]
    build.replace(by, collective)


def _readers(x: fx.Node) -> set[fx.Node]:
    """Return the readers of a value, or of pieces of it."""
    out: set[fx.Node] = set()
    for user in x.users:
        splits = op_facts_of(user.target).splits
        for piece in user.users if splits else (user,):
            out.update(piece.users if _piece(piece) else {piece: None})
    return out


def _piece(node: Any) -> tuple[fx.Node, int, int, int] | None:
    """Return (value, dim, start, size) of a part of a value."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is operator.getitem and op_facts_of(node.args[0].target).splits:
        split, i = node.args
        x, dim = split.args[0], argument(split, "dim")
        before = [int(split.meta["val"][j].shape[dim]) for j in range(i)]
        start = sum(before)
    elif node.target is aten.slice.Tensor and node.args[4:] in ((), (1,)):
        x, dim, start = (*node.args, 0, 0)[:3]
    else:
        return None
    size = int(node.meta["val"].shape[dim])
    return x, dim % x.meta["val"].dim(), start or 0, size


def _moved(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return (value, dim, other dim) where a join along the other dim puts together, in
    order, the equal pieces that a value is cut into along the first."""
    if node.target is not aten.cat.default:
        return None
    pieces = [_piece(part) for part in node.args[0]]
    x, dim, _, size = pieces[0] or (None, 0, 0, 0)
    if x is None or not size:
        return None
    shape = x.meta["val"].shape
    target = (*node.args, 0)[1] % len(shape)
    every = [(x, dim, start, size) for start in range(0, int(shape[dim]), size)]
    return (x, dim, target) if pieces == every and target != dim else None


def show_bodies(graph: fx.Graph, state: JointState) -> None:
    """Give nodes of bodies of branches and loops these bodies as values.
    Raises PlanError if sizes are open and there are bodies."""
    graph_bodies.show_bodies(graph, graph.owning_module)
    if state.open and any(map(graph_bodies.body_of, graph.nodes)):
        raise PlanError("branches and loops need fixed sizes")


def count_loop_steps(graph: fx.Graph, state: JointState) -> None:
    """Give loops a known number of steps, in place."""
    count_steps(graph, state.fake_mode)


Axes = frozenset[str]

# The fix for any other collective.
FUNCTIONAL = (
    "call torch.distributed._functional_collectives (all_reduce, all_gather_tensor, "
    "reduce_scatter_tensor, all_to_all_single) or fxpar.permute with an axis for the "
    "group"
)


def check_regions(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, Axes]:
    """Return the axes of its regions along which each value inside may differ between
    ranks.

    Raises RegionError where a declaration is wrong.
    """
    inside = manual_axes(graph)
    varying: dict[fx.Node, Axes] = {}
    regions: dict[fx.Node, frozenset[int]] = {}
    random: set[fx.Node] = set()
    over = {n.args[4]: n.args[3].split("+") for n in graph.nodes if n.target in EDGES}
    for node in graph.nodes:
        reads = node.all_input_nodes
        own = frozenset[int]().union(*(regions.get(n, frozenset()) for n in reads))
        axes = frozenset[str]().union(*(varying.get(n, frozenset()) for n in reads))
        if node.op == "output":
            _check_ends(node, inside)
            continue
        _check_group(node, node in inside, mesh)
        _check_regions_separate(node, own, over)
        if has_random_numbers(node) or not random.isdisjoint(reads):
            if node in inside and node.target not in EDGES:
                raise RegionError(
                    f"{node.name} ({node.target}) is random inside a manual region: "
                    "all ranks would draw the same numbers for their parts",
                    where=user_line(node),
                    fix="draw outside, and pass the numbers (or the mask) as an "
                    "argument",
                )
            random.add(node)
        if node.target in EDGES:
            own, axes = _cross(node, own, axes)
            random.discard(node)
        elif node in inside:
            axes = _after(node, axes)
        regions[node], varying[node] = own, axes
    return varying


def _cross(
    node: fx.Node, regions: frozenset[int], axes: Axes
) -> tuple[frozenset[int], Axes]:
    """Return the regions a value is in after an edge, and along which axes it
    differs."""
    _, text, _, _, number = node.args
    spec, names = Spec.parse(text), frozenset(sizes_of(node))
    if str(node.target) != LEAVE:
        return regions | {number}, axes | names.intersection(spec.sharded_axes)
    wrong = sorted(axes & names - set(spec.axes))
    if wrong:
        axis = wrong[0]
        producer = node.args[0]
        raise RegionError(
            f"a result of a manual region is said to be whole along {axis!r}, but "
            f"{producer.name} ({producer.target}) differs between ranks: it is a part "
            "or a summand",
            where=user_line(producer) or user_line(node),
            fix=f'reduce it inside (all_reduce(x, "sum", "{axis}")), or give its spec '
            f'in out_specs: a dim over "{axis}", or partial={{"{axis}": "sum"}}',
        )
    return regions - {number}, axes - names


def _after(node: fx.Node, axes: Axes) -> Axes:
    """Return the axes along which the result of an op inside differs."""
    own = frozenset(sizes_of(node))
    if node.target is ours.axis_index.default:
        return own
    if node.target is not ours.collective.default:
        return axes
    kind = node.args[1]
    if kind in ("all_reduce", "all_gather"):
        return axes - own
    return axes if kind == "permute" else axes | own


def _check_ends(output: fx.Node, inside: Any) -> None:
    """Check that nothing leaves the graph without leaving its region."""
    for arg in output.all_input_nodes:
        if arg in inside and str(arg.target) != LEAVE:
            raise RegionError(
                f"{arg.name} ({arg.target}) of a manual region is read outside of "
                "it and is not a result: a graph break cuts the region, or it "
                "reads a tensor that needs a gradient and is not an argument",
                where=user_line(arg),
                fix="pass every tensor that fn reads as an argument of it, and keep it "
                "free of graph breaks",
            )


def _check_regions_separate(
    node: fx.Node, regions: frozenset[int], over: Mapping[int, Sequence[str]]
) -> None:
    """Check that values of two regions over one axis meet outside of both."""
    axes = [axis for number in regions for axis in over[number]]
    if len(set(axes)) < len(axes):
        raise RegionError(
            f"{node.name} ({node.target}) reads values of two manual regions: one "
            "of them is not a result of its region",
            where=user_line(node),
            fix="return from fn what is read outside of it",
        )


def _check_group(node: fx.Node, inside: bool, mesh: Mesh) -> None:
    """Check that each collective in a region is along axes of the mesh."""
    facts = op_facts_of(node.target)
    if not facts.communicates or node.target is c10d.wait_tensor.default:
        return
    if node.target is ours.collective.default:
        return
    if inside:
        group = node.kwargs.get("group_name", node.args[-1] if node.args else "")
        raise RegionError(
            f"{node.target} over group {group!r} inside a manual region: the "
            f"group is not an axis of mesh {mesh}, or the op is a collective of "
            "torch.distributed itself",
            where=user_line(node),
            fix=f"{FUNCTIONAL}: {', '.join(mesh.names)}",
        )


def scale_equal(build: Builder, varying: dict[fx.Node, Axes], mesh: Mesh) -> None:
    """Replace a sum over ranks of a value that is equal on them by a multiple: nothing
    is sent. Gradients of reduced values are such: each rank has its share of them."""
    for node in list(build.graph.nodes):
        if node.target is not ours.collective.default or node.args[1] != "all_reduce":
            continue
        x, _, _, op, _, axes = node.args
        over = axes.split("+")
        if not varying.get(x, frozenset()).isdisjoint(over):
            continue
        if op not in ("sum", "avg", "max", "min"):
            continue
        factor: float = mesh.count(over) if op == "sum" else 1
        scaled = x.args[1:2] if x.target is aten.mul.Tensor else ()
        if factor != 1 and scaled and isinstance(scaled[0], (int, float)):
            x, factor = x.args[0], scaled[0] * factor  # one multiple of the value
        if factor != 1:
            with build.before(node):
                x = build.call(aten.mul.Tensor, x, factor)
        node.replace_all_uses_with(x)


# Regions with several bodies

torch.library.define(
    "fxpar::fork_bodies", "(Tensor x, int bodies, int region) -> Tensor[]"
)
torch.library.define("fxpar::choose_body", "(Tensor[] results, int region) -> Tensor")

FORK, CHOOSE = ours.fork_bodies.default, ours.choose_body.default


@torch.library.register_fake("fxpar::fork_bodies")
def _(x, bodies, region):
    return [torch.empty_like(x) for _ in range(bodies)]


@torch.library.register_fake("fxpar::choose_body")
def _(results, region):
    return torch.empty_like(results[0])


def _fork_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.region = inputs[2]


def _choose_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.bodies, ctx.region = len(inputs[0]), inputs[1]


torch.library.register_autograd(
    "fxpar::fork_bodies",
    lambda ctx, grads: (CHOOSE(list(grads), ctx.region), None, None),
    setup_context=_fork_context,
)
torch.library.register_autograd(
    "fxpar::choose_body",
    lambda ctx, grad: (FORK(grad, ctx.bodies, ctx.region), None),
    setup_context=_choose_context,
)


def choose(
    graph: fx.Graph, request: Request, seconds_of: Callable[[Request], float]
) -> tuple[Request, list[str]]:
    """Return the request with a body of each choice, one chosen after the other, as a
    ``Choose`` does."""
    counts, notes = [bodies for _, bodies in _choices(graph).values()], []
    bodies = [0] * len(counts)
    for i, count in enumerate(counts):
        seconds = []
        for body in range(count):
            trial = (*bodies[:i], body, *bodies[i + 1 :])
            seconds.append(seconds_of(replace(request, bodies=trial)))
        bodies[i] = min(range(count), key=seconds.__getitem__)
        times = ", ".join(percent_more(s, min(seconds)) for s in seconds)
        notes.append(
            f"body {bodies[i]} of {count} of manual region {i} is chosen: compared "
            f"with the fastest, a step with each is estimated to take {times}"
        )
    return replace(request, bodies=tuple(bodies) if any(bodies) else ()), notes


def _choices(graph: fx.Graph) -> dict[Any, tuple[set[int], int]]:
    """Return line and shapes of each choice -> (its regions, number of bodies)."""
    by_region: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if _overload(node.target) is CHOOSE:
            by_region.setdefault(node.args[1], []).append(node)
    choice_of: dict[Any, tuple[set[int], int]] = {}
    for region, (first, *_) in by_region.items():
        bodies = len(first.args[0])
        values = [n.args[0][0].meta.get("val") for n in by_region[region]]
        shapes = tuple(() if x is None else tuple(x.shape) for x in values)
        key = user_line(first), bodies, shapes
        choice_of.setdefault(key, (set(), bodies))[0].add(region)
    return choice_of


def keep_bodies(graph: fx.Graph, bodies: Sequence[int] = ()) -> None:
    """Keep one body of each region, in place. ``bodies``: one for each choice, in
    order; empty: the first of each.

    Raises PlanError if they belong to another program.
    """
    all_choices = list(_choices(graph).values())
    bodies = bodies or [0] * len(all_choices)
    if len(bodies) != len(all_choices) or any(
        body >= count for body, (_, count) in zip(bodies, all_choices, strict=True)
    ):
        counts = [count for _, count in all_choices]
        raise PlanError(
            f"the plan chooses bodies {list(bodies)} of manual regions, the "
            f"program has {counts}",
            fix="plan this program again",
        )
    of = {
        region: body
        for body, (regions, _) in zip(bodies, all_choices, strict=True)
        for region in regions
    }
    dropped: set[fx.Node] = set()
    for node in list(graph.nodes):
        if _overload(node.target) is FORK:
            body = of[node.args[2]]
            for piece in list(node.users):
                if piece.args[1] == body:
                    piece.replace_all_uses_with(node.args[0])
                dropped.add(piece)
            dropped.add(node)
        elif _overload(node.target) is CHOOSE:
            body_result = node.args[0][of[node.args[1]]]
            node.replace_all_uses_with(body_result)
            dropped.add(node)
        elif not dropped.isdisjoint(node.all_input_nodes):
            dropped.add(node)
    for node in reversed(list(graph.nodes)):
        if node in dropped and not node.users:
            graph.erase_node(node)
