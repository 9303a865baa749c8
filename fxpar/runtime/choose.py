"""What ``FXPAR_PLAN`` asks for."""

from __future__ import annotations

import warnings
from pathlib import Path

from fxpar.errors import FxparWarning, compose
from fxpar.sharding.plan import Plan


def plan_mode(text: str, graph: str = "") -> str | Plan:
    """A mode of the pipeline, or the Plan a file holds; of a folder as FXPAR_DUMP
    writes it, the plan of this ``graph``. Raises PlanError."""
    if text == "search":
        what = "search is not available yet: propagating from hints and conventions"
        fix = "set FXPAR_PLAN=propagate"
        warnings.warn(compose(what, fix=fix), FxparWarning, stacklevel=3)
        return "propagate"
    if text in ("propagate", "replicate"):
        return text
    path = Path(text)
    return Plan.load(path / graph / "plan.json" if path.is_dir() else path)
