"""Verbs ``buckets`` and ``prefetch``: what is done to forward and backward, parted.

``buckets(bytes=4194304)``: collectives of parameters and gradients that can run
together are joined until so many bytes are full. ``prefetch(ahead=2)``: gathers of
parameters are started so many before they are read. Both hold for the whole program,
name no node and leave the local graph as it is; ``settings_of`` reads them for
``passes.schedule``, which keeps every number whatever they say.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpar.fusion.schedule import Line, Schedule
from fxpar.fusion.schedule_edit import Edit
from fxpar.passes.order_collectives import DEFAULT, Settings


def buckets(_: Edit, bytes: int, gathers: int = 0) -> list[fx.Node]:
    """``bytes``: of a full bucket, in the form each rank holds whole; 0 for none.
    ``gathers``: of one of gathers, whose results are all there at once, if other."""
    return []


def prefetch(_: Edit, ahead: int) -> list[fx.Node]:
    """``ahead``: gathers under way beside the one that is needed."""
    return []


# Verbs that settings are said by.
LATER = frozenset({"buckets", "prefetch"})


def settings_of(schedule: Schedule | str) -> Settings:
    """What the lines of a schedule say; the last one counts."""
    lines = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    said = {line.verb: dict(line.options) for line in lines.lines}
    joined, early = said.get("buckets", {}), said.get("prefetch", {})
    bucket: Any = joined.get("bytes", DEFAULT.bucket)
    gathers: Any = joined.get("gathers", DEFAULT.gathers)
    ahead: Any = early.get("ahead", DEFAULT.ahead)
    return Settings(bucket, gathers, ahead)


def line_of(settings: Settings) -> Schedule:
    """The lines that say so."""
    out = []
    if settings.bucket is not None:
        sizes: list[tuple[str, int]] = [("bytes", settings.bucket)]
        if settings.gathers is not None:
            sizes.append(("gathers", settings.gathers))
        out.append(Line("buckets", (), tuple(sizes)))
    if settings.ahead != DEFAULT.ahead:
        out.append(Line("prefetch", (), (("ahead", settings.ahead),)))
    return Schedule(tuple(out))
