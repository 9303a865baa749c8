"""What ``FXPAR_PLAN`` asks for."""

from __future__ import annotations

from pathlib import Path

from fxpar.config import Options
from fxpar.sharding import hardware
from fxpar.sharding.plan import Plan
from fxpar.sharding.search.find import Asked


def plan_mode(text: str, options: Options, graph: str = "") -> str | Asked | Plan:
    """A mode of the pipeline, or the Plan a file holds; of a folder as FXPAR_DUMP
    writes it, the plan of this ``graph``.

    Raises PlanError, OptionError on unknown hardware, DeviceError on a device without
    known figures.
    """
    if text == "search":
        machine = (
            hardware.lookup(options.hardware) if options.hardware else hardware.detect()
        )
        return Asked(machine, options.search_seconds, options.memory)
    if text in ("propagate", "replicate"):
        return text
    path = Path(text)
    return Plan.load(path / graph / "plan.json" if path.is_dir() else path)
