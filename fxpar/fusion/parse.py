"""What a line of a schedule may say: the kinds of arguments that each verb takes.

In: a line, and the graph it is for. Out: the nodes and numbers that the verb is called
with. ``TAKES`` is the one table of them; a line that says anything else is refused
here, with the line, what is wrong and the form it has, so that verbs check only what
depends on the graph. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion.schedule import Argument, Line, shown
from fxpar.fusion.schedule_edit import Edit


class _Unfit(Exception):
    """An argument is of another kind."""


@dataclass(frozen=True)
class Kind:
    """A kind of argument that verbs take."""

    # What it is, as errors say it.
    text: str
    # Gives the value that a verb is called with, or raises ``_Unfit``.
    read: Callable[[Edit, Argument], Any]


@dataclass(frozen=True)
class Takes:
    """The arguments that a verb takes."""

    # As a user writes it.
    form: str
    # Nodes among the arguments that must be there.
    nodes: tuple[Kind, ...] = ()
    # A node that may be there.
    optional: Kind | None = None
    # Nodes of any number behind them.
    further: Kind | None = None
    # By keyword; of these ``needs`` must be there.
    options: Mapping[str, Kind] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def _node(edit: Edit, argument: Argument) -> fx.Node:
    if not isinstance(argument, str):
        raise _Unfit
    return edit.node(argument)


def _nodes(edit: Edit, argument: Argument) -> tuple[fx.Node, ...]:
    if not isinstance(argument, tuple) or not argument:
        raise _Unfit
    return tuple(map(edit.node, argument))


def _ends(edit: Edit, argument: Argument) -> tuple[fx.Node, ...]:
    return _nodes(edit, argument if isinstance(argument, tuple) else (str(argument),))


def _axes(_: Edit, argument: Argument) -> tuple[str, ...]:
    names = tuple(argument.split("_and_")) if isinstance(argument, str) else ()
    if not names or len(set(names)) < len(names):
        raise _Unfit
    return names


def _number(least: int, most: int | None = None) -> Kind:
    def read(_: Edit, argument: Argument) -> int:
        over = most is not None and isinstance(argument, int) and argument > most
        if not isinstance(argument, int) or argument < least or over:
            raise _Unfit
        return argument

    if most is None:
        return Kind(f"a number that is at least {least}", read)
    return Kind(f"{least} or {most}", read)


_NODE = Kind("the name of a node", _node)
_NODES = Kind("a list of names of nodes, [a, b]", _nodes)
_ENDS = Kind("the name of a node, or a list of names", _ends)
_AXES = Kind("axes, each once, joined by _and_ as in tp_and_sp", _axes)
_DIM = _number(0)

TAKES: dict[str, Takes] = {
    "split": Takes("split(ar, dim=1) -> rs, ag", (_NODE,), options={"dim": _DIM}),
    "cut": Takes(
        "cut(w, axes=tp, dim=0) -> part, ag",
        (_NODE,),
        options={"axes": _AXES, "dim": _DIM},
        needs=("axes",),
    ),
    "hierarchical": Takes(
        "hierarchical(ar, inner=tp, outer=dp, dim=0) -> rs, ar, ag",
        (_NODE,),
        options={"inner": _AXES, "outer": _AXES, "dim": _DIM},
        needs=("inner", "outer"),
    ),
    "merge": Takes("merge(ag, ag_1) -> ag", (_NODE, _NODE), further=_NODE),
    "drop": Takes("drop(ag)", (_NODE,), further=_NODE),
    "hoist": Takes("hoist(ag)", (_NODE,)),
    "sink": Takes("sink(ag)", (_NODE,)),
    "balance": Takes("balance(attention)", (_NODE,)),
    "reorder": Takes("reorder([a, b], ag) -> ag_1", (_NODES, _NODE), further=_NODE),
    "as_slice": Takes("as_slice(m, ag)", (_NODE,), optional=_NODE),
    "fuse": Takes("fuse([a, b]) -> region", (_NODES,)),
    "overlap": Takes(
        "overlap(ag, [mm, mm_1], chunks=4)",
        (_ENDS, _ENDS),
        options={
            "chunks": _number(2),
            "dim": _DIM,
            "ring": _number(1, 2),
            "fused": _number(0, 1),
        },
    ),
    "bucket": Takes("bucket([c, c_1]) -> c", (_NODES,)),
    "share": Takes(
        "share(axes=tp, tag=0, dim=0)",
        options={"axes": _AXES, "tag": _number(0), "dim": _DIM},
        needs=("axes",),
    ),
}


def read(edit: Edit, line: Line) -> tuple[list[Any], dict[str, Any]]:
    """What a verb of ``TAKES`` is called with. Raises ScheduleError."""
    takes = TAKES[line.verb]
    kinds = _kinds(takes, line)
    values = [
        _value(edit, line, kind, f"argument {i}", argument)
        for i, (kind, argument) in enumerate(zip(kinds, line.arguments, strict=True), 1)
    ]
    options = {}
    for name, argument in line.options:
        if name not in takes.options:
            names = ", ".join(takes.options) or "none"
            raise _unfit(line, f"{name}= is no option of it ({names})")
        options[name] = _value(edit, line, takes.options[name], name, argument)
    missing = [name for name in takes.needs if name not in options]
    if missing:
        raise _unfit(line, f"{missing[0]}= is missing")
    _check_once(line, values)
    return values, options


def _kinds(takes: Takes, line: Line) -> list[Kind]:
    """Of each argument that there is. Raises ScheduleError if there are too few, or too
    many."""
    count, fixed = len(line.arguments), len(takes.nodes)
    if count < fixed:
        raise _unfit(line, f"{count} arguments of at least {fixed} are there")
    kinds = [*takes.nodes, *((takes.optional,) if takes.optional else ())]
    if count > len(kinds) and takes.further is None:
        raise _unfit(line, f"{count} arguments are there, of at most {len(kinds)}")
    kinds += [takes.further] * (count - len(kinds)) if takes.further else []
    return kinds[:count]


def _value(edit: Edit, line: Line, kind: Kind, name: str, argument: Argument) -> Any:
    try:
        return kind.read(edit, argument)
    except _Unfit:
        text = f"[{', '.join(argument)}]" if isinstance(argument, tuple) else argument
        raise _unfit(line, f"{name} is {text}, not {kind.text}") from None


def _check_once(line: Line, values: list[Any]) -> None:
    """Raise ScheduleError if a node is named twice."""
    seen = set[fx.Node]()
    for node in _each(values):
        if node in seen:
            raise _unfit(line, f"{node.name} is named twice")
        seen.add(node)


def _each(values: list[Any]) -> Iterator[fx.Node]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _unfit(line: Line, why: str) -> ScheduleError:
    return ScheduleError(
        f"{shown(line)}: {why}", fix=f"write it as in: {TAKES[line.verb].form}"
    )
