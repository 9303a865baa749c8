"""Defines the errors and warnings of fxpar: a fact, the user's line, one fix.

In: the parts of a message. Out: an error or a warning, whose text has at most three
parts, always in this order: the fact, ``at:`` the user's own source line where one is
known, and ``fix:`` one thing to do. Never: knows a graph or a mesh.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType


def compose(what: str, *, where: str | None = None, fix: str | None = None) -> str:
    """Join the parts of a message, one per line."""
    parts = [what]
    if where:
        parts.append(f"  at: {where}")
    if fix:
        parts.append(f"  fix: {fix}")
    return "\n".join(parts)


class FxparError(RuntimeError):
    """Is the base of all errors of fxpar. ``is_reported``: whether every rank knows of
    it."""

    is_reported = False

    def __init__(
        self, what: str, *, where: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(compose(what, where=where, fix=fix))
        self.what, self.where, self.fix = what, where, fix


class MeshError(FxparError, ValueError):
    """Says that a mesh is not valid: malformed text, wrong size, unknown axis."""


class SpecError(FxparError, ValueError):
    """Says that a spec is not valid: an axis used twice, malformed text."""


class RuleError(FxparError, ValueError):
    """Says that a sharding rule cannot be read, or does not fit its operands."""


class HintError(FxparError, ValueError):
    """Says that a hint does not fit the program or the mesh."""


class RegionError(FxparError, ValueError):
    """Says that a manual region is not valid: its specs do not fit, or a result differs
    between ranks though its spec is whole."""


class OptionError(FxparError, ValueError):
    """Says that an option is unknown, or cannot have a value."""


class PlanError(FxparError):
    """Says that a plan cannot be made, loaded or applied."""


class TooLargeError(PlanError):
    """Says that no plan fits in the memory of a rank."""


class ScheduleError(FxparError):
    """Says that a schedule cannot be read, or that a verb would change a number."""


class ShardError(FxparError):
    """Says that parameters cannot be sharded, or are used as shards cannot be."""


class UnknownOpError(FxparError):
    """Says that an op has no sharding rule, under ``FXPAR_STRICT=1``."""


class InputMismatchError(FxparError):
    """Says that values differ that must be equal on all ranks."""


class GradientError(FxparError):
    """Says that ranks compute gradients of different losses."""


class RankMismatchError(FxparError):
    """Says that ranks run different programs or options, or that one is missing."""


class LostRankError(RankMismatchError):
    """Says that a rank ended, or hangs, in a step. ``rank``: which one, if known."""

    def __init__(
        self, what: str, *, rank: int | None = None, fix: str | None = None
    ) -> None:
        super().__init__(what, fix=fix)
        self.rank = rank


class RoomError(FxparError):
    """Says that more rows came for the experts of a rank than it has room for."""


class DeviceError(FxparError):
    """Says that ranks and accelerators do not fit together."""


class FxparWarning(UserWarning):
    """Is the base of all warnings: numbers stay right, something costs more."""


def warn(what: str, *, where: str | None = None, fix: str | None = None) -> None:
    """Warn at the innermost line of the user's own code that led here."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and is_library(here.f_code.co_filename):
        here = here.f_back
    # A thread of a library has no line of the user, and ours says nothing.
    file, line = (here.f_code.co_filename, here.f_lineno) if here else ("fxpar", 0)
    names = here.f_globals if here else globals()
    warnings.warn_explicit(
        compose(what, where=where, fix=fix),
        FxparWarning,
        file,
        line,
        names.get("__name__", "__main__"),
        names.setdefault("__warningregistry__", {}),
    )


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file is of fxpar, of torch, of Python, or of generated code."""
    libraries = (sys.modules.get(name) for name in ("fxpar", "torch"))
    folders = [Path(x.__file__).parent for x in libraries if x and x.__file__]
    is_python = file.startswith(sysconfig.get_path("stdlib"))
    return (
        file.startswith(("<eval_with_key", "<frozen"))
        or (is_python and "site-packages" not in file)
        or any(Path(file).is_relative_to(folder) for folder in folders)
    )
