"""The one place where a schedule changes a graph.

In: a schedule, and a local graph with its communication as steps or as functional
collectives. Out: a new graph in which each line was done in turn, in the form the given
one had; the given one is unchanged. A verb that would change a number raises
ScheduleError, naming the node, the user's line and why; whatever else goes wrong in one
is a ScheduleError too, with the line of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.fusion import node_legality, parse
from fxpar.fusion.schedule import SETTINGS, Line, Schedule, shown
from fxpar.fusion.schedule_edit import Edit, lift
from fxpar.fusion.verbs import (
    balance,
    fuse_nodes,
    gathers,
    overlap_attention,
    reorder,
    send_recv,
)
from fxpar.passes import writes_as_results
from fxpar.passes.builder import Builder, copy_of
from fxpar.passes.lower import lower_graph
from fxpar.passes.order.sink_waits import sink_waits
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

# verb -> (edit, nodes or tuples of nodes, options) -> nodes that later lines may name.
# Each is described where it is defined.
# What lines may say of them is in ``parse.TAKES``.
VERBS: dict[str, Callable[..., list[fx.Node]]] = {
    "split": gathers.split,
    "cut": gathers.cut,
    "hierarchical": gathers.hierarchical,
    "merge": gathers.merge,
    "drop": gathers.drop,
    "hoist": gathers.hoist,
    "sink": gathers.sink,
    "balance": balance.balance,
    "reorder": reorder.reorder,
    "as_slice": gathers.as_slice,
    "fuse": fuse_nodes.fuse,
    "overlap": overlap_attention.overlap,
    "bucket": fuse_nodes.bucket,
    "share": send_recv.share,
}


class Unexpected(ScheduleError):
    """A verb met what it does not know of, and neither refused nor did what it does."""


def apply(
    schedule: Schedule | str,
    graph: fx.Graph | fx.GraphModule,
    mesh: Mesh | str,
    *,
    inputs: Sequence[Spec | Sequence[Any] | str | None] | None = None,
    permit: Collection[str] = (),
    groups: Mapping[str, tuple[str, ...]] | None = None,
    lowered: bool | None = None,
) -> fx.Graph:
    """The graph after all lines of ``schedule``.

    graph: nodes carry fake values (``meta["val"]``), as make_fx leaves them. inputs:
    for each tensor input how it lies on the mesh; None is whole. Not needed for graphs
    of fxpar's own pipeline. permit: inputs that ``as_slice`` may keep in slices.
    groups: axes of the process groups that collectives name. lowered: whether the
    result has collectives that run, or steps and regions; default: as ``graph``.

    Raises ScheduleError.
    """
    lines = Schedule.of(schedule).lines
    mesh = Mesh.parse(mesh)
    edit, lifted = opened(graph, mesh, inputs, permit, groups)
    try:
        for line in lines[:-1]:
            do(edit, line, check=False)
        for line in lines[-1:]:
            do(edit, line)
    except ScheduleError:
        # Once more with a check after each: the first line that is wrong is named.
        edit, _ = opened(graph, mesh, inputs, permit, groups)
        for line in lines[:-1]:
            do(edit, line)
        raise
    writes_as_results.put(edit.graph, edit.written)
    if lifted if lowered is None else lowered:
        finish(edit.graph, edit.mesh, edit.build.fake_mode)
    return edit.graph


def opened(
    graph: fx.Graph | fx.GraphModule,
    mesh: Mesh,
    inputs: Sequence[Any] | None,
    permit: Collection[str],
    groups: Mapping[str, tuple[str, ...]] | None,
) -> tuple[Edit, bool]:
    """A copy of the graph to be changed, and whether its collectives were lifted;
    arguments as of ``apply``. Raises ScheduleError on a graph of which verbs would take
    for granted what is not so (``node_legality.admit``)."""
    copy = copy_of(graph.graph if isinstance(graph, fx.GraphModule) else graph)
    for node in copy.nodes:
        if isinstance(node.target, node_legality.CallableRegion):
            node.target = node_legality.CallableRegion(copy_of(node.target.graph))
    _lay(copy, inputs)
    build = Builder(copy, _fake_mode(copy), mesh)
    lifted = lift(copy, build, groups)
    written = writes_as_results.lift(copy)
    node_legality.admit(copy)
    ordered = node_legality.number(copy)
    return Edit(
        copy, build, frozenset(permit), ordered=ordered, written=written
    ), lifted


def finish(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> None:
    """What runs, in place: regions are their nodes again, steps collectives, each
    waited for where it is first read."""
    fuse_nodes.inline(graph)
    lower_graph(graph, mesh, fake_mode)
    sink_waits(graph)


def _fake_mode(graph: fx.Graph) -> Any:
    if all("val" not in node.meta for node in graph.nodes):
        raise ScheduleError(
            "the graph's nodes have no fake values",
            fix="trace the graph with make_fx(..., tracing_mode='fake')",
        )
    values = [node.meta.get("val") for node in graph.nodes]
    return _torch.fake.mode_of(values) or _torch.fake.new_fake_mode()


def _lay(graph: fx.Graph, inputs: Sequence[Any] | None) -> None:
    """Note the specs of tensor inputs."""
    if inputs is None:
        return
    tensors = [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    if len(tensors) != len(inputs):
        raise ScheduleError(
            f"inputs has {len(inputs)} entries for {len(tensors)} tensors",
            fix="give one entry per tensor input; None is whole",
        )
    for node, entry in zip(tensors, inputs, strict=True):
        whole = Spec.whole(node.meta["val"].dim())
        node.meta["fxpar_spec"] = whole if entry is None else _spec(entry)


def _spec(entry: Spec | Sequence[Any] | str) -> Spec:
    if isinstance(entry, Spec):
        return entry
    return Spec.parse(entry) if isinstance(entry, str) else Spec(*entry)


def do(edit: Edit, line: Line, *, check: bool = True) -> None:
    """One line of a schedule; ``check``: whether the graph is checked after it, which
    takes time that grows with the graph. Raises ScheduleError."""
    if line.verb not in VERBS:
        what = f"{line.verb!r} is no verb, in: {shown(line)}"
        raise ScheduleError(what, fix=f"verbs are {sorted([*VERBS, *SETTINGS])}")
    edit.look()
    try:
        arguments, options = parse.read(edit, line)
        results = VERBS[line.verb](edit, *arguments, **options)
        _name(edit, line, results)
        if check:
            node_legality.check(edit.graph, line.verb, edit.ordered)
            edit.graph.lint()
    except ScheduleError as error:
        error.add_note(f"in the schedule: {shown(line)}")
        raise
    except Exception as error:
        raise Unexpected(
            f"{shown(line)}: {type(error).__name__}: {error}",
            fix="leave out the line, and report it",
        ) from error


def _name(edit: Edit, line: Line, results: Sequence[fx.Node]) -> None:
    if len(line.gives) > len(results):
        raise ScheduleError(
            f"{shown(line)}: gives {len(results)} values, {len(line.gives)} are named",
            fix=f"name at most {len(results)} after '->'",
        )
    for name, node in zip(line.gives, results, strict=False):
        edit.call(node, name)
