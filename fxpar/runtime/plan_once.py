"""What ``FXPAR_PLAN`` asks for, and planning so that all ranks have one plan."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from fxpar.config import Options
from fxpar.errors import DeviceError
from fxpar.fusion.schedule_stage import Reschedule, rescheduler
from fxpar.passes import Request, Result, parallelize
from fxpar.runtime import consensus, plan_store, presence
from fxpar.sharding.cost.hardware_table import Hardware, detect, lookup
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Program
from fxpar.sharding.search.mesh_candidates import candidates, in_nodes, read_auto
from fxpar.sharding.search.run_search import Asked

log = logging.getLogger("fxpar")


def machine(options: Options) -> Hardware:
    """What costs are for: that of FXPAR_HARDWARE, else this process's device, in nodes
    as ``FXPAR_MESH="auto:4x8"`` says.

    Raises OptionError on unknown hardware, DeviceError on a device without known
    figures.
    """
    found = lookup(options.hardware) if options.hardware else detect()
    auto = read_auto(options.mesh)
    return in_nodes(found, auto.devices if auto else None)


def known_machine(options: Options) -> Hardware | None:
    """As ``machine``; None on a device without known figures."""
    try:
        return machine(options)
    except DeviceError:
        return None


def named_machine(options: Options) -> Hardware | None:
    """That of FXPAR_HARDWARE; None if it is not set. Raises OptionError."""
    return machine(options) if options.hardware else None


def choices(
    mesh: Mesh, mode: str | Asked | Plan, *, local: bool = False
) -> tuple[Mesh, ...]:
    """The meshes a plan of this mode may choose from, the first of them ``mesh``, which
    is all ranks along one axis. ``local``: each rank feeds its own part of the batch.
    """
    if isinstance(mode, Plan) and mode.mesh.size == mesh.size:
        return tuple(dict.fromkeys((mesh, Mesh(mode.mesh.axes))))
    if isinstance(mode, Asked):
        return candidates(mesh.size, mode.hardware, local=local)
    return (mesh,)


def plan_mode(text: str, options: Options, graph: str = "") -> str | Asked | Plan:
    """A mode of the pipeline, or the Plan a file holds; of a folder as FXPAR_DUMP
    writes it, the plan of this ``graph``.

    Raises PlanError, OptionError on unknown hardware, DeviceError on a device without
    known figures.
    """
    if text == "search":
        return Asked(machine(options), options.search_seconds, options.memory)
    if text in ("propagate", "replicate"):
        return text
    path = Path(text)
    return Plan.load(path / graph / "plan.json" if path.is_dir() else path)


def scheduling(options: Options) -> Reschedule:
    """What is done to a local graph, as the options say."""
    return rescheduler(options.schedule, known_machine(options))


def planned(
    graph: fx.Graph,
    fake_mode: Any,
    request: Request,
    rank: int,
    name: str,
    *,
    keep: bool = True,
) -> Result:
    """What ``parallelize`` gives; of a search, what it gives on rank 0: it depends on
    the clock, so one rank searches and the others follow its plan, mesh and links.
    ``keep``: it looks on disk first, and leaves there what it found.

    Raises as ``parallelize`` does, and RankMismatchError if rank 0 does not come.
    """
    asked = request.mode
    if not isinstance(asked, Asked):
        return parallelize(graph, fake_mode, request)
    request = replace(request, mesh=asked.hardware.on(request.mesh))
    if rank == 0:
        search = _kept if keep and plan_store.allowed() else parallelize
        with presence.works(f"searches the plan of {name}"):
            result = search(graph, fake_mode, request)
        text = json.dumps(result.plan.to_record())
        consensus.gather(f"the plan of {name}", text)
        return result
    text, *_ = consensus.gather(f"the plan of {name}", "")
    plan = Plan.from_dict(json.loads(text))
    return parallelize(graph, fake_mode, replace(request, mode=plan))


def _kept(graph: fx.Graph, fake_mode: Any, request: Request) -> Result:
    """As ``parallelize``: with the plan that is on disk, or leaving it there."""
    asked, keys = request.mode, []
    assert isinstance(asked, Asked)

    def known(program: Program, normalized: fx.Graph) -> Plan | None:
        keys.append(plan_store.key_of(program, normalized, request))
        plan = plan_store.load(keys[0], asked.seconds)
        if plan is not None:
            log.info("a plan found before, nothing is searched: %s", plan.notes[-1])
        return plan

    result = parallelize(graph, fake_mode, replace(request, known=known))
    if result.decision.found is not None:
        plan_store.save(keys[0], result.plan, result.decision.found, asked.seconds)
    return result
