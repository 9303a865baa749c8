"""What ``FXPAR_PLAN`` asks for, and planning so that all ranks have one plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from fxpar.config import Options
from fxpar.passes import Request, Result, parallelize
from fxpar.runtime import agree
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


def planned(
    graph: fx.Graph, fake_mode: Any, request: Request, rank: int, name: str
) -> Result:
    """What ``parallelize`` gives; of a search, what it gives on rank 0: it depends on
    the clock, so one rank searches and the others follow its plan.

    Raises as ``parallelize`` does, and RankMismatchError if rank 0 does not come.
    """
    if not isinstance(request.mode, Asked):
        return parallelize(graph, fake_mode, request)
    request = replace(request, mesh=request.mode.hardware.on(request.mesh))
    if rank == 0:
        result = parallelize(graph, fake_mode, request)
        agree.gather(f"the plan of {name}", json.dumps(result.plan.to_dict()))
        return result
    text, *_ = agree.gather(f"the plan of {name}", "")
    plan = Plan.from_dict(json.loads(text))
    return parallelize(graph, fake_mode, replace(request, mode=plan))
