"""Reads the lines of a schedule and applies them; nothing else applies one to a graph.

In: a schedule, and a local graph with its communication as steps or as functional
collectives. Out: a new graph in which each line was applied in turn, in the form of the
given one. A verb that would change a number raises ScheduleError with the node, the
user's line and the reason; any other failure in a verb is a ScheduleError too, with the
line of the schedule. Never changes the given graph.

``VERBS`` is the one table of verbs and of the arguments that they take, to which
features add theirs. A line that says anything else is refused with the line, what is
wrong and the form it has, so that verbs check only what depends on the graph.

``apply_stages``. In: a schedule, and for each position along one axis of the mesh the
local graph that ranks there run; they send and receive (functional isend, irecv) along
that axis, and peers are positions along it. Out: new graphs; each line was applied to
every graph that has the nodes or the message it names. The messages of two stages must
agree in order, tag, shape and dtype before the first line and after the last: NCCL
matches them by order alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import ScheduleError
from fxpar.fusion import node_legality
from fxpar.fusion.node_legality import close
from fxpar.fusion.schedule import (
    SETTINGS,
    Argument,
    Kind,
    Line,
    Schedule,
    Unfit,
    Verb,
    line_text,
    number,
)
from fxpar.fusion.schedule_edit import Edit, lift
from fxpar.fusion.verbs import fuse_nodes, gathers, overlap, reorder, send_recv
from fxpar.fusion.verbs.send_recv import content, messages, with_tag
from fxpar.graph.builder import Builder, copy_of
from fxpar.passes import writes_as_results
from fxpar.passes.lower import lower_graph
from fxpar.passes.order.delay_work import sink_waits
from fxpar.passes.writes_as_results import WRITE
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import user_line
from fxpar.sharding.spec import Spec


def _node(edit: Edit, argument: Argument) -> fx.Node:
    if not isinstance(argument, str):
        raise Unfit
    node = edit.node(argument)
    if node_legality.is_closed(node):
        what = f"{node.name} has shards of unequal sizes, which a schedule cannot edit"
        fix = "leave out the line, or choose mesh sizes that divide the dims"
        raise ScheduleError(what, where=user_line(node), fix=fix)
    return node


def _nodes(edit: Edit, argument: Argument) -> tuple[fx.Node, ...]:
    if not isinstance(argument, tuple) or not argument:
        raise Unfit
    return tuple(_node(edit, name) for name in argument)


def _ends(edit: Edit, argument: Argument) -> tuple[fx.Node, ...]:
    return _nodes(edit, argument if isinstance(argument, tuple) else (str(argument),))


def _axes(_: Edit, argument: Argument) -> tuple[str, ...]:
    names = tuple(argument.split("_and_")) if isinstance(argument, str) else ()
    if not names or len(set(names)) < len(names):
        raise Unfit
    return names


NODE = Kind("the name of a node", _node)
_NODES = Kind("a list of names of nodes, [a, b]", _nodes)
_ENDS = Kind("the name of a node, or a list of names", _ends)
_AXES = Kind("axes, each once, joined by _and_ as in tp_and_sp", _axes)
_DIM = number(0)

# Verbs are described where they are defined.
VERBS: dict[str, Verb] = {
    "split": Verb(
        "split(ar, dim=1) -> rs, ag", gathers.split, (NODE,), options={"dim": _DIM}
    ),
    "cut": Verb(
        "cut(w, axes=tp, dim=0) -> part, ag",
        gathers.cut,
        (NODE,),
        options={"axes": _AXES, "dim": _DIM},
        needs=("axes",),
    ),
    "hierarchical": Verb(
        "hierarchical(ar, inner=tp, outer=dp, dim=0) -> rs, ar, ag",
        gathers.hierarchical,
        (NODE,),
        options={"inner": _AXES, "outer": _AXES, "dim": _DIM},
        needs=("inner", "outer"),
    ),
    "merge": Verb("merge(ag, ag_1) -> ag", gathers.merge, (NODE, NODE), further=NODE),
    "drop": Verb("drop(ag)", gathers.drop, (NODE,), further=NODE),
    "hoist": Verb("hoist(ag)", gathers.hoist, (NODE,)),
    "sink": Verb("sink(ag)", gathers.sink, (NODE,)),
    "reorder": Verb(
        "reorder([a, b], ag) -> ag_1", reorder.reorder, (_NODES, NODE), further=NODE
    ),
    "as_slice": Verb("as_slice(m, ag)", gathers.as_slice, (NODE,), optional=NODE),
    "fuse": Verb("fuse([a, b]) -> region", fuse_nodes.fuse, (_NODES,)),
    "overlap": Verb(
        "overlap(ag, [mm, mm_1], chunks=4)",
        overlap.overlap,
        (_ENDS, _ENDS),
        options={
            "chunks": number(2),
            "dim": _DIM,
            "ring": number(1, 2),
            "fused": number(0, 1),
        },
    ),
    "bucket": Verb("bucket([c, c_1]) -> c", fuse_nodes.bucket, (_NODES,)),
    "share": Verb(
        "share(axes=tp, tag=0, dim=0)",
        send_recv.share,
        options={"axes": _AXES, "tag": number(0), "dim": _DIM},
        needs=("axes",),
    ),
}


class Unexpected(ScheduleError):
    """Is raised when a verb fails on a case it does not know, without refusing it."""


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
    """Return the graph after all lines of ``schedule``.

    graph: nodes carry fake values (``meta["val"]``), as make_fx leaves them. inputs:
    for each tensor input how it is laid out on the mesh; None is whole. Not needed for
    graphs of fxpar's own pipeline. permit: inputs that ``as_slice`` may keep in slices.
    groups: axes of the process groups that collectives name. lowered: whether the
    result has collectives that run, or steps and regions; default: as ``graph``.

    Raises ScheduleError.
    """
    lines = Schedule.of(schedule).lines
    mesh = Mesh.parse(mesh)
    edit, was_lowered = opened(graph, mesh, inputs, permit, groups)
    try:
        for line in lines[:-1]:
            do(edit, line, check=False)
        for line in lines[-1:]:
            do(edit, line)
    except ScheduleError:
        # Apply again with a check after each line, so that the first wrong line is
        # named.
        edit, _ = opened(graph, mesh, inputs, permit, groups)
        for line in lines[:-1]:
            do(edit, line)
        raise
    if edit.written:
        writes_as_results.put(edit.graph, edit.written)
    if was_lowered if lowered is None else lowered:
        finish(edit.graph, edit.mesh, edit.build.fake_mode)
    return edit.graph


def opened(
    graph: fx.Graph | fx.GraphModule,
    mesh: Mesh,
    inputs: Sequence[Any] | None,
    permit: Collection[str],
    groups: Mapping[str, tuple[str, ...]] | None,
) -> tuple[Edit, bool]:
    """Return a copy of the graph to edit, and whether its collectives were lifted.
    Arguments are those of ``apply``. Raises ScheduleError on a graph with nodes that
    verbs cannot handle (``node_legality.admit``)."""
    copy = copy_of(graph.graph if isinstance(graph, fx.GraphModule) else graph)
    for node in copy.nodes:
        if isinstance(node.target, node_legality.CallableRegion):
            node.target = type(node.target)(copy_of(node.target.graph))
    _lay(copy, inputs)
    build = Builder(copy, _fake_mode(copy), mesh)
    was_lowered = lift(copy, build, groups)
    has_writes = bool(copy.find_nodes(op="call_function", target=WRITE))
    written = writes_as_results.lift(copy) if has_writes else ()
    if node_legality.has_uneven_ops(copy):
        close(copy, mesh, build.fake_mode)
    node_legality.admit(copy)
    ordered = node_legality.number(copy)
    return Edit(
        copy, build, frozenset(permit), ordered=ordered, written=written
    ), was_lowered


def finish(graph: fx.Graph, mesh: Mesh, fake_mode: Any) -> None:
    """Make a graph ready to run, in place: inline regions, lower steps to collectives,
    and wait for each where it is first read."""
    node_legality.inline(graph)
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
    """Note the specs of tensor inputs in their ``meta``. Raises ScheduleError."""
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
    """Apply one line of a schedule. ``check``: check the graph after it, which takes
    time that grows with the graph. Raises ScheduleError."""
    if line.verb not in VERBS:
        what = f"{line.verb!r} is not a verb, in: {line_text(line)}"
        raise ScheduleError(what, fix=f"verbs are {sorted([*VERBS, *SETTINGS])}")
    edit.look()
    try:
        verb = VERBS[line.verb]
        arguments, options = verb.read(edit, line)
        assert verb.run is not None
        results = verb.run(edit, *arguments, **options)
        edit.trace_anew()
        _name(edit, line, results)
        if check:
            node_legality.check(edit.graph, line.verb, edit.ordered)
            edit.graph.lint()
    except ScheduleError as error:
        error.add_note(f"in the schedule: {line_text(line)}")
        raise
    except Exception as error:
        raise Unexpected(
            f"{line_text(line)}: {type(error).__name__}: {error}",
            fix="leave out the line, and report it",
        ) from error


def _name(edit: Edit, line: Line, results: Sequence[fx.Node]) -> None:
    if len(line.gives) > len(results):
        raise ScheduleError(
            f"{line_text(line)}: gives {len(results)} values, "
            f"{len(line.gives)} are named",
            fix=f"name at most {len(results)} after '->'",
        )
    for name, node in zip(line.gives, results, strict=False):
        edit.call(node, name)


def apply_stages(
    schedule: Schedule | str,
    graphs: Sequence[fx.Graph | fx.GraphModule],
    mesh: Mesh | str,
    axis: str,
    *,
    inputs: Sequence[Sequence[Any] | None] | None = None,
    permit: Collection[str] = (),
    groups: Mapping[str, tuple[str, ...]] | None = None,
    lowered: bool = True,
) -> list[fx.Graph]:
    """Return the graphs after all lines.

    ``graphs[i]`` is that of position i along ``axis``; ``inputs[i]``, and the other
    arguments, are those of ``apply``. ``stage=i`` in a line keeps it to one of the
    graphs.

    Raises ScheduleError.
    """
    mesh, specs_of_stages = Mesh.parse(mesh), inputs or [None] * len(graphs)
    if len(graphs) != mesh.axis_size(axis) or len(specs_of_stages) != len(graphs):
        raise ScheduleError(
            f"{len(graphs)} graphs for {mesh.axis_size(axis)} stages along {axis!r}, "
            f"and inputs of {len(specs_of_stages)}",
            fix="give a graph, and its inputs, for each position along the axis",
        )
    edits = [
        opened(graph, mesh, specs, permit, groups)[0]
        for graph, specs in zip(graphs, specs_of_stages, strict=True)
    ]
    for edit in edits:
        edit.staged = True
    _compare(edits, axis)
    for line in Schedule.of(schedule).lines:
        _learn(edits, axis)
        bare, meant = _meant(line, edits)
        for edit in meant:
            do(edit, bare)
    _compare(edits, axis)
    for edit in edits:
        if edit.written:
            writes_as_results.put(edit.graph, edit.written)
    for edit in edits if lowered else ():
        finish(edit.graph, mesh, edit.build.fake_mode)
    return [edit.graph for edit in edits]


def _meant(line: Line, edits: Sequence[Edit]) -> tuple[Line, list[Edit]]:
    """Return the line without ``stage``, and the edits of the stages that it is for."""
    options = dict(line.options)
    stage = options.pop("stage", None)
    bare = replace(line, options=tuple(options.items()))
    if stage is not None:
        if not isinstance(stage, int) or stage not in range(len(edits)):
            raise ScheduleError(
                f"there is no stage {stage}, in: {line}",
                fix=f"stages are 0 to {len(edits) - 1}",
            )
        return bare, [edits[stage]]
    stages = [edit for edit in edits if _has_nodes_of(edit, bare)]
    if not stages:
        raise ScheduleError(
            f"no stage has all nodes that this line names: {line}",
            fix="name nodes of one stage's graph, or a message by its tag",
        )
    return bare, stages


def _has_nodes_of(edit: Edit, line: Line) -> bool:
    """Return whether a graph has all nodes that a line names, or the message."""
    options = dict(line.options)
    if not line.arguments:
        tag = options.get("tag", 0)
        has_message = isinstance(tag, int) and bool(with_tag(edit, tag))
        return has_message or line.verb != "share"
    lists = [value for value in options.values() if isinstance(value, tuple)]
    edit.look()
    try:
        for argument in (*line.arguments, *lists):
            for name in argument if isinstance(argument, tuple) else (str(argument),):
                edit.node(name)
    except ScheduleError:
        return False
    return True


def _learn(edits: Sequence[Edit], axis: str) -> None:
    """Note for each received value the axes it varies over, which are those of the
    value sent. Stages may send to each other and back, so this starts from nothing and
    only adds."""
    pairs = list(_pairs(edits, axis))
    for _, _, received in pairs:
        received.meta["fxpar_sent"] = frozenset()
    changed = True
    while changed:
        changed = False
        varies = [edit.varies() for edit in edits]
        for i, sent, received in pairs:
            values = (node.all_input_nodes[0] for node in sent)
            now = frozenset[str]().union(*(varies[i][v] for v in values)) - {axis}
            changed |= received.meta["fxpar_sent"] != now
            received.meta["fxpar_sent"] = now


def _pairs(
    edits: Sequence[Edit], axis: str
) -> Iterator[tuple[int, list[fx.Node], fx.Node]]:
    """Yield (sender's stage, sent nodes, received node) for each message. While only
    one end has been changed, the sent nodes are all that go between the two stages."""
    messages_of = [messages(edit.graph, i, axis) for i, edit in enumerate(edits)]
    for j, each in enumerate(messages_of):
        for (i, to), received in each.items():
            if to == j:
                sent = messages_of[i].get((i, j), [])
                for k, node in enumerate(received):
                    same = len(sent) == len(received)
                    yield i, [sent[k]] if same else sent, node


def _compare(edits: Sequence[Edit], axis: str) -> None:
    """Raise ScheduleError unless every message that is sent is received."""
    messages_of = [messages(edit.graph, i, axis) for i, edit in enumerate(edits)]
    for i, j in sorted({ends for each in messages_of for ends in each}):
        if i == j or not 0 <= j < len(edits) or not 0 <= i < len(edits):
            raise ScheduleError(
                f"stage {i} sends to stage {j} of {len(edits)} along {axis!r}",
                fix="peers are positions along the axis, other than its own",
            )
        ends = zip_longest(
            messages_of[i].get((i, j), ()), messages_of[j].get((i, j), ())
        )
        for place, (node, received) in enumerate(ends):
            one, other = (content(n) if n else None for n in (node, received))
            if one != other:
                raise ScheduleError(
                    f"message {place} from stage {i} to stage {j} is "
                    f"{_written(one)} where it is sent, {_written(other)} where it is "
                    "received",
                    fix="make the same change in both graphs, as share does",
                )


def _written(message: Any) -> str:
    if message is None:
        return "missing"
    tag, shape, dtype = message
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with tag {tag}"
