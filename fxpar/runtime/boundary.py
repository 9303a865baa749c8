"""Where a user's code speaks to the plan: ``fxpar.constrain``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxpar.errors import HintError
from fxpar.passes import ops as _ops  # noqa: F401  (registers fxpar::constrain)

Entry = str | Iterable[str] | None


def _word(entry: Entry) -> str:
    if entry is None:
        return "_"
    return entry if isinstance(entry, str) else "+".join(entry)


def constrain(x: torch.Tensor, *dims: Entry) -> torch.Tensor:
    """Hint that ``x`` lies split as ``dims`` says: ``constrain(x, "dp", None, "tp")``.

    One entry per dim: an axis, a tuple of axes, None (whole), "?" (open), "tp?" (split
    and open to more). Dims left out are open. Outside a compiled graph it is the
    identity. Raises HintError if there are more entries than dims; that axes exist and
    divide is checked when the graph is planned.
    """
    if len(dims) > x.dim():
        raise HintError(
            f"constrain: {len(dims)} entries for a tensor of {x.dim()} dims",
            fix="give at most one entry per dim",
        )
    if not torch.compiler.is_compiling():
        return x
    return torch.ops.fxpar.constrain(x, ",".join(_word(entry) for entry in dims))
