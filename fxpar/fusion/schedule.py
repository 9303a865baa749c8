"""Reads and writes schedules: edits of a local graph's compute and collectives, as
data.

A schedule has one verb per line, in order, over names of nodes:

    split(all_reduce, dim=1) -> rs, ag
    reorder([add, mul], ag) -> ag_1
    overlap(mm, rs, chunks=4)

In: text (``Schedule.parse``). Out: a ``Schedule``, whose ``str`` is text again. A line
names its results after ``->``, for later lines; a result without a name has the one of
its node. Text after ``#`` is a comment. Never knows the graph, or what a verb does.

Lines ``buckets`` and ``prefetch`` name no node: they are settings of how a forward and
a backward order their collectives, once they are separated, and hold for both.
``buckets(bytes=4194304)``: collectives of parameters and gradients that can run
together are joined until so many bytes are full, 0 for none; ``gathers``: bytes of a
bucket of gathers, ``again``: of those that a backward repeats, if other.
``prefetch(ahead=2)``: gathers of parameters are started so many before they are read.
Settings never change a number.

The verbs are those of CoCoNeT (arXiv 2105.05720, section 3), and others for what its
schedules leave to the runtime.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from keyword import iskeyword
from pathlib import Path
from textwrap import shorten
from typing import Any

from fxpar.errors import ScheduleError
from fxpar.passes.order.order_collectives import DEFAULT, Settings

Argument = str | int | tuple[str, ...]

_FORM = "write one verb per line, as in: split(all_reduce) -> rs, ag"


@dataclass(frozen=True)
class Line:
    """Is one line of a schedule: a verb and its arguments."""

    verb: str  # name of the verb, or of a setting
    arguments: tuple[Argument, ...]  # names of nodes, or lists of them
    options: tuple[tuple[str, Argument], ...] = ()  # numbers and names by keyword
    gives: tuple[str, ...] = ()  # names of the results

    def __str__(self) -> str:
        inside = [_written(a) for a in self.arguments]
        inside += [f"{key}={_written(value)}" for key, value in self.options]
        arrow = f" -> {', '.join(self.gives)}" if self.gives else ""
        return f"{self.verb}({', '.join(inside)}){arrow}"

    @property
    def names(self) -> list[str]:
        """Return the names of nodes among its arguments, in order."""
        several = (x if isinstance(x, tuple) else (x,) for x in self.arguments)
        return [name for names in several for name in names if isinstance(name, str)]

    def renamed(self, name_of: Callable[[str], str]) -> Line:
        """Return the line with other names of nodes; its results keep theirs."""

        def renamed(argument: Argument) -> Argument:
            if isinstance(argument, tuple):
                return tuple(map(name_of, argument))
            return name_of(argument) if isinstance(argument, str) else argument

        return replace(self, arguments=tuple(map(renamed, self.arguments)))


class Unfit(Exception):
    """Is raised when an argument is of another kind than a verb takes."""


@dataclass(frozen=True)
class Kind:
    """Is a kind of argument that verbs take."""

    text: str  # how errors describe it
    # Returns the value that a verb of an edit is called with, or raises ``Unfit``.
    read: Callable[[Any, Argument], Any]


def number(least: int, most: int | None = None) -> Kind:
    """Return the kind of numbers in a range."""

    def read(_: Any, argument: Argument) -> int:
        over = most is not None and isinstance(argument, int) and argument > most
        if not isinstance(argument, int) or argument < least or over:
            raise Unfit
        return argument

    if most is None:
        return Kind(f"a number that is at least {least}", read)
    return Kind(f"{least} or {most}", read)


@dataclass(frozen=True)
class Verb:
    """Says what a line may have, and what it does."""

    form: str  # an example, as a user writes it
    # (edit, nodes or tuples of nodes, options) -> nodes that later lines may name. None
    # for a setting, which edits nothing.
    run: Callable[..., list[Any]] | None = None
    nodes: tuple[Kind, ...] = ()  # nodes that must be given, in order
    optional: Kind | None = None  # one more node that may be given
    further: Kind | None = None  # any number of nodes after those
    # Options, given by keyword.
    options: Mapping[str, Kind] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # options that must be given

    def read(self, edit: Any, line: Line) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments and options of a line as ``run`` takes them. Raises
        ScheduleError."""
        values = [
            self._value(edit, line, kind, f"argument {i}", argument)
            for i, (kind, argument) in enumerate(
                zip(self._kinds(line), line.arguments, strict=True), 1
            )
        ]
        options = {}
        for name, argument in line.options:
            if name not in self.options:
                names = ", ".join(self.options) or "none"
                raise self.unfit(line, f"{name}= is not one of its options ({names})")
            kind = self.options[name]
            options[name] = self._value(edit, line, kind, name, argument)
        missing = [name for name in self.needs if name not in options]
        if missing:
            raise self.unfit(line, f"{missing[0]}= is missing")
        seen = set[Any]()
        for value in values:
            for node in value if isinstance(value, tuple) else (value,):
                if node in seen:
                    raise self.unfit(line, f"{node.name} is named twice")
                seen.add(node)
        return values, options

    def _kinds(self, line: Line) -> list[Kind]:
        """Return the kind of each argument of a line. Raises ScheduleError if there are
        too few, or too many."""
        count, fixed = len(line.arguments), len(self.nodes)
        if count < fixed:
            why = f"{count} arguments are given, at least {fixed} are needed"
            raise self.unfit(line, why)
        kinds = [*self.nodes, *((self.optional,) if self.optional else ())]
        if count > len(kinds) and self.further is None:
            why = f"{count} arguments are given, of at most {len(kinds)}"
            raise self.unfit(line, why)
        kinds += [self.further] * (count - len(kinds)) if self.further else []
        return kinds[:count]

    def _value(
        self, edit: Any, line: Line, kind: Kind, name: str, argument: Argument
    ) -> Any:
        try:
            return kind.read(edit, argument)
        except Unfit:
            why = f"{name} is {_written(argument)}, not {kind.text}"
            raise self.unfit(line, why) from None

    def unfit(self, line: Line, why: str) -> ScheduleError:
        """Return the error of a line that does not say what the verb takes."""
        return ScheduleError(
            f"{line_text(line)}: {why}", fix=f"write it as in: {self.form}"
        )


SETTINGS = {
    "buckets": Verb(
        "buckets(bytes=4194304, gathers=1048576, again=1048576)",
        options=dict.fromkeys(("bytes", "gathers", "again"), number(0)),
        needs=("bytes",),
    ),
    "prefetch": Verb(
        "prefetch(ahead=2)", options={"ahead": number(1)}, needs=("ahead",)
    ),
}
# Option of a setting -> field of ``Settings``, if it has another name.
_FIELDS = {"bytes": "bucket"}


@dataclass(frozen=True)
class Schedule:
    """Holds the edits of a local graph, and settings of its forward and backward."""

    # Verbs on the local graph, in the order they are applied.
    lines: tuple[Line, ...] = ()
    # How a forward and a backward order their collectives.
    settings: Settings = field(default=DEFAULT)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.lines, *_setting_lines(self.settings))))

    def __bool__(self) -> bool:
        return bool(self.lines) or self.settings != DEFAULT

    def __add__(self, other: Schedule) -> Schedule:
        default = asdict(DEFAULT)
        options = {k: v for k, v in asdict(other.settings).items() if v != default[k]}
        return Schedule(self.lines + other.lines, replace(self.settings, **options))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form; of lines with the same settings the last one counts.

        Raises ScheduleError with the number of a line that cannot be read, and on wrong
        settings.
        """
        lines, settings = [], DEFAULT
        for number, line in enumerate(text.splitlines(), 1):
            bare = line.partition("#")[0].strip()
            if not bare:
                continue
            read = _read(bare, number)
            if read.verb in SETTINGS:
                settings = _with_settings(settings, read)
            else:
                lines.append(read)
        return cls(tuple(lines), settings)

    @classmethod
    def of(cls, source: Schedule | str | Path) -> Schedule:
        """Return a schedule, given itself, its text, or a file with it. Raises
        ScheduleError."""
        if isinstance(source, Schedule):
            return source
        text = str(source)
        if "(" in text or not text.strip():
            return cls.parse(text)
        try:
            return cls.parse(Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            raise ScheduleError(
                f"schedule {text!r} cannot be read: {error.strerror or error}",
                fix="give the schedule's text, or a file that holds it",
            ) from error


def line_text(line: Line) -> str:
    """Return a line as errors quote it."""
    return shorten(str(line), 160)


def _setting_lines(settings: Settings) -> Iterator[Line]:
    """Yield the lines for settings that differ from the default."""
    if settings.bucket is not None:
        sizes: list[tuple[str, Argument]] = [("bytes", settings.bucket)]
        for name in ("gathers", "again"):
            if getattr(settings, name) is not None:
                sizes.append((name, getattr(settings, name)))
        yield Line("buckets", (), tuple(sizes))
    if settings.ahead != DEFAULT.ahead:
        yield Line("prefetch", (), (("ahead", settings.ahead),))


def _with_settings(settings: Settings, line: Line) -> Settings:
    """Return the settings after a line that changes them. Raises ScheduleError."""
    setting = SETTINGS[line.verb]
    try:
        if line.arguments or line.gives:
            nodes = line.arguments or line.gives
            raise setting.unfit(line, f"it takes no nodes, and is given {nodes}")
        _, options = setting.read(None, line)
    except ScheduleError as error:
        error.add_note(f"in the schedule: {line_text(line)}")
        raise
    default = asdict(DEFAULT)
    fields = ((name, _FIELDS.get(name, name)) for name in setting.options)
    return replace(settings, **{f: options.get(n, default[f]) for n, f in fields})


def _written(argument: Argument) -> str:
    if isinstance(argument, tuple):
        return f"[{', '.join(argument)}]"
    # Parts of axes are no identifiers.
    plain = not isinstance(argument, str) or argument.isidentifier()
    return str(argument) if plain else f'"{argument}"'


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
    names = {keyword.arg for keyword in tree.keywords}
    if None in names or len(names) < len(tree.keywords):
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
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value  # refused with what the verb takes
        case ast.Constant(value=str(value)):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            items = [_argument(element, bad) for element in elements]
            if all(isinstance(name, str) for name in items):
                return tuple(map(str, items))
    raise bad


# What features propose for a graph with some ops (``op_facts.has_any``): (``Attempts``)
# -> {what lines are: lines to try on top of the best schedule}.
PROPOSALS: list[tuple[str, Callable[[Any], Mapping[str, Schedule]]]] = []

# What features propose where permutes are waited for: (graph, mesh, hardware,
# ``varying``) -> an ``OverlapCandidate`` for all windows of one form, a line for each.
OF_PERMUTES: list[Callable[..., Sequence[Any]]] = []
