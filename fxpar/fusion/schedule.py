"""A schedule: what is done to a local graph's compute and collectives, as data.

One verb per line, in order, over names of nodes:

    split(all_reduce, dim=1) -> rs, ag
    reorder([add, mul], ag) -> ag_1
    overlap(mm, rs, chunks=4)

``Schedule.parse`` reads the text and ``str`` writes it; neither knows what a verb does,
nor the graph. A line names its results after ``->``, for later lines; a result without
a name has the one of its node. Text after ``#`` is a comment.

The verbs are those of CoCoNeT (arXiv 2105.05720, section 3), and what its schedules
leave to the runtime.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

from fxpar.errors import ScheduleError

Argument = str | int | tuple[str, ...]

_FORM = "write one verb per line, as in: split(all_reduce) -> rs, ag"


@dataclass(frozen=True)
class Line:
    """One verb. ``arguments``: names of nodes, or lists of them. ``options``: numbers
    and names by keyword. ``gives``: names of the results."""

    verb: str
    arguments: tuple[Argument, ...]
    options: tuple[tuple[str, Argument], ...] = ()
    gives: tuple[str, ...] = ()

    def __str__(self) -> str:
        inside = [_written(a) for a in self.arguments]
        inside += [f"{key}={_written(value)}" for key, value in self.options]
        arrow = f" -> {', '.join(self.gives)}" if self.gives else ""
        return f"{self.verb}({', '.join(inside)}){arrow}"


@dataclass(frozen=True)
class Schedule:
    """Lines, in the order they are applied."""

    lines: tuple[Line, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __add__(self, other: Schedule) -> Schedule:
        return Schedule(self.lines + other.lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form. Raises ScheduleError with the number of a bad line."""
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            bare = line.partition("#")[0].strip()
            if bare:
                lines.append(_read(bare, number))
        return cls(tuple(lines))

    @classmethod
    def of(cls, given: Schedule | str | Path) -> Schedule:
        """A schedule, its text, or the file that holds it. Raises ScheduleError."""
        if isinstance(given, Schedule):
            return given
        text = str(given)
        if "(" in text or not text.strip():
            return cls.parse(text)
        try:
            return cls.parse(Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            raise ScheduleError(
                f"schedule {text!r} cannot be read: {error.strerror or error}",
                fix="give the schedule's text, or a file that holds it",
            ) from error


def _written(argument: Argument) -> str:
    if isinstance(argument, tuple):
        return f"[{', '.join(argument)}]"
    return str(argument)


def _read(text: str, number: int) -> Line:
    call, _, after = text.partition("->")
    gives = tuple(name.strip() for name in after.split(",")) if after else ()
    bad = ScheduleError(f"line {number} of the schedule is {text!r}", fix=_FORM)
    if not all(map(_is_name, gives)) or ("->" in text and not gives):
        raise bad
    if len(set(gives)) < len(gives):
        raise bad
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as error:
        raise bad from error
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise bad
    if any(keyword.arg is None for keyword in tree.keywords):
        raise bad
    return Line(
        tree.func.id,
        tuple(_argument(a, bad) for a in tree.args),
        tuple((str(k.arg), _argument(k.value, bad)) for k in tree.keywords),
        gives,
    )


def _is_name(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


def _argument(tree: ast.expr, bad: ScheduleError) -> Argument:
    match tree:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Constant(value=str(value)):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            found = [_argument(element, bad) for element in elements]
            if all(isinstance(name, str) for name in found):
                return tuple(map(str, found))
    raise bad
