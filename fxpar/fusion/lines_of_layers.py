"""Lines of a schedule for some layers of a program, as lines for all of them.

In: a schedule of a graph with fewer layers (``FewerLayers``). Out: one of the whole
graph. A line stands for the layer of the last op that it names: one of the layer right
before those that are left out is said again for each of these, right behind, and what
it gives has a name of its own there. A line of a layer behind them names the ops of its
own layers. Only ``reorder`` names ops of many layers: it names those of the layers left
out as well. Whether a verb does any of that is asked of the verb, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from fxpar.fusion.fewer_layers import FewerLayers
from fxpar.fusion.schedule import Argument, Line, Schedule

# Names any number of ops.
_OF_MANY = "reorder"


@dataclass(frozen=True)
class _Place:
    """Where a name is in the shorter graph."""

    # Which row of layers, and which op of those that stay.
    row: int
    at: int


class NotOfLayers(Exception):
    """A line names ops of layers that are far apart."""


def lines_of_layers(schedule: Schedule, fewer: FewerLayers) -> Schedule:
    """The schedule for all layers; its settings stay. Raises NotOfLayers."""
    said = _Repeats(fewer)
    lines = [line for short in schedule.lines for line in said.lines(short)]
    return replace(schedule, lines=tuple(lines))


class _Repeats:
    """Says lines again. ``places``: of the ops of layers that stay, and of what lines
    give; ``again``: names that stand for one of the layer before those left out, one
    for it and each of these."""

    def __init__(self, fewer: FewerLayers) -> None:
        self.fewer = fewer
        self.places: dict[str, _Place] = {}
        self.again: dict[str, list[str]] = {}
        for i, row in enumerate(fewer.rows):
            names, missing = [n.name for n in row.nodes], row.end - row.begin
            for at, name in enumerate(names):
                if at < row.begin:
                    self.places[name] = _Place(i, at)
                elif at >= row.end:
                    self.places[name] = _Place(i, at - missing)
            for at in range(max(0, row.begin - row.distance), row.begin):
                self.again[names[at]] = names[at : row.end : row.distance]

    def lines(self, line: Line) -> Iterator[Line]:
        """A line for all layers that it stands for."""
        named = {
            name: self.places[name] for name in _names(line) if name in self.places
        }
        if not named:
            yield line
            return
        rows = {place.row for place in named.values()}
        row = self.fewer.rows[min(rows)]
        home = max(named.values(), key=lambda place: place.at)
        span = home.at - min(place.at for place in named.values())
        if len(rows) > 1 or span >= 2 * row.distance:
            yield self._of_many(line)
            return
        self.places |= dict.fromkeys(line.gives, home)
        removed = self.fewer.removed
        if home.at < row.begin - row.distance:
            yield line
        elif home.at >= row.begin:
            later = partial(self._later, begin=row.begin, layers=removed)
            yield _renamed(line, later)
        else:
            for name in line.gives:
                copies = (f"{name}_layer{i + 1}" for i in range(removed))
                self.again[name] = [name, *copies]
            for i in range(removed + 1):
                later = partial(self._later, begin=row.begin, layers=i)
                more = _renamed(line, later)
                yield replace(more, gives=tuple(self.again[n][i] for n in line.gives))

    def _later(self, name: str, begin: int, layers: int) -> str:
        """The name of an op before ``begin``, so many layers later."""
        place = self.places.get(name)
        if place is None or place.at >= begin:
            return name
        if name in self.again:
            return self.again[name][layers]
        row = self.fewer.rows[place.row]
        at = place.at + layers * row.distance
        if row.nodes[place.at].name != name:  # what a line of an earlier layer gave
            raise NotOfLayers(name)
        return row.nodes[at].name

    def _of_many(self, line: Line) -> Line:
        """A line that names ops of many layers, with those of the layers left out."""
        if line.verb != _OF_MANY or line.gives:
            raise NotOfLayers(str(line))

        def all_of(names: Argument) -> list[str]:
            each = names if isinstance(names, tuple) else (str(names),)
            return [more for name in each for more in self.again.get(name, [name])]

        first, *gathers = line.arguments
        more = [name for gather in gathers for name in all_of(gather)]
        return replace(line, arguments=(tuple(all_of(first)), *more))


def _renamed(line: Line, name_of: Callable[[str], str]) -> Line:
    """A line about other ops."""

    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(map(name_of, argument))
        return name_of(argument) if isinstance(argument, str) else argument

    return replace(line, arguments=tuple(map(renamed, line.arguments)))


def _names(line: Line) -> Iterator[str]:
    for argument in line.arguments:
        if isinstance(argument, tuple):
            yield from argument
        elif isinstance(argument, str):
            yield argument
