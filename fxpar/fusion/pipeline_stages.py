"""Applies a schedule to the graphs of a pipeline's stages, whose messages must keep
matching.

In: a schedule, and for each position along one axis of the mesh the local graph that
ranks there run; they send and receive (functional isend, irecv) along that axis, and
peers are positions along it. Out: new graphs; each line was applied to every graph that
has the nodes or the message it names. The messages of two stages must agree in order,
tag, shape and dtype before the first line and after the last: NCCL matches them by
order alone. Never changes the given graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.apply_schedule import do, finish, opened
from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit
from fxpar.fusion.verbs.send_recv import content, messages, with_tag
from fxpar.passes import writes_as_results
from fxpar.sharding.mesh import Mesh


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
        for number, (node, received) in enumerate(ends):
            one, other = (content(n) if n else None for n in (node, received))
            if one != other:
                raise ScheduleError(
                    f"message {number} from stage {i} to stage {j} is "
                    f"{_written(one)} where it is sent, {_written(other)} where it is "
                    "received",
                    fix="make the same change in both graphs, as share does",
                )


def _written(message: Any) -> str:
    if message is None:
        return "missing"
    tag, shape, dtype = message
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with tag {tag}"
