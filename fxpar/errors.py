"""Every error and warning fxpar raises: what is wrong, where in the user's code, what
to do.

A message has at most three parts, always in this order: the fact, ``at:`` the user's
own source line where one is known, and ``fix:`` one thing to do. Nothing here knows
about graphs or meshes.
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
    """Base of all errors of fxpar. ``told``: every rank raises it, or was told."""

    told = False

    def __init__(
        self, what: str, *, where: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(compose(what, where=where, fix=fix))
        self.what, self.where, self.fix = what, where, fix


class MeshError(FxparError, ValueError):
    """A mesh that cannot be: malformed text, wrong size, unknown axis."""


class SpecError(FxparError, ValueError):
    """A spec that cannot be: axis used twice, indivisible dim, malformed text."""


class RuleError(FxparError, ValueError):
    """A sharding rule that cannot be read or does not fit its operands."""


class HintError(FxparError, ValueError):
    """A hint that does not fit the program or the mesh."""


class RegionError(FxparError, ValueError):
    """A manual region that cannot be: specs that do not fit, a result that differs
    between ranks though it is said to be whole."""


class OptionError(FxparError, ValueError):
    """An unknown option or a value it cannot take."""


class PlanError(FxparError):
    """A plan that cannot be made, loaded or applied."""


class TooLargeError(PlanError):
    """A plan that a rank has no memory for."""


class ScheduleError(FxparError):
    """A schedule that cannot be read, or a verb that would change a number."""


class ShardError(FxparError):
    """Parameters that cannot be laid out at rest, or were replaced since."""


class UnknownOpError(FxparError):
    """An op without a sharding rule, under ``FXPAR_STRICT=1``."""


class InputMismatchError(FxparError):
    """Inputs that should be identical on every rank are not."""


class GradientError(FxparError):
    """Gradients that should be those of the whole batch are each rank's own."""


class RankMismatchError(FxparError):
    """Ranks disagree about the program or the plan, or one did not answer."""


class LostRankError(RankMismatchError):
    """A rank ended, or hangs, in mid-step. ``rank``: which one, if one is meant."""

    def __init__(
        self, what: str, *, rank: int | None = None, fix: str | None = None
    ) -> None:
        super().__init__(what, fix=fix)
        self.rank = rank


class RoomError(FxparError):
    """More rows for the experts of a rank than it was told to have room for."""


class DeviceError(FxparError):
    """Ranks and accelerators do not fit together."""


class FxparWarning(UserWarning):
    """Base of all warnings of fxpar: numbers stay right, something costs more."""


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
