"""Holds a request to plan as data: a ``Request``.

It pickles, so that a rank can send it and a test can hold it.
In: a mesh, or meshes that a search may choose from; layouts of inputs and outputs;
hints; the mode; the user's ``Options``.
Out: the Request, its mesh and signature as they are planned.
Never: plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fxpar.config import Options
from fxpar.errors import DeviceError
from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost.hardware_table import Hardware, detect, lookup
from fxpar.sharding.factors import Axes
from fxpar.sharding.hints import Entries
from fxpar.sharding.manual_axes import ManualAxes, planned_signature
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import Pipeline, pipeline_axis, split_off
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Input, Output, Signature
from fxpar.sharding.propagate.conventions import expert_axes
from fxpar.sharding.rest_over_stages import of_one_stage
from fxpar.sharding.search.mesh_candidates import (
    candidates,
    in_nodes,
    read_auto,
    staged_candidates,
)
from fxpar.sharding.search.run_search import SearchOptions

Mode = str | SearchOptions | Plan

End = TypeVar("End", Input, Output)


@dataclass(frozen=True)
class Request:
    """Describes the plan that the pipeline shall make."""

    # Where a search chooses the mesh, the first of ``meshes``.
    mesh: Mesh
    # The inputs and outputs, each of which is a global value.
    signature: Signature
    # Name pattern -> axes per dim.
    hints: Mapping[str, Entries] = field(default_factory=dict)
    # "propagate", "replicate", SearchOptions, or a Plan to apply again.
    mode: Mode = "propagate"
    # Meshes that a search may choose from; empty: ``mesh`` is named.
    meshes: tuple[Mesh, ...] = ()
    # Meshes with an axis of stages that a search may choose from as well.
    staged: tuple[Mesh, ...] = ()
    # The schedule of the staged meshes, as the option ``pipeline``.
    pipeline_schedule: str = "auto"
    # Layout of parameters with open specs along an axis of stages
    # (``Input.along_stages``).
    free_along_stages: str = "own"
    # Axes along which ranks run programs of their own, of size 1 on ``mesh``.
    manual: ManualAxes | None = None
    # The user's options; a field of the same name comes before an option.
    options: Options = field(default_factory=Options)
    # Parts that a rank cuts its batch into; None: 1, or as stages need.
    microbatches: int | None = None
    # Stages that the program is cut into; ``mesh`` is the mesh of each stage.
    pipeline: Pipeline | None = None
    # Rows that each rank along manual axes may send to experts; 0: none are sent, each
    # rank has all experts. None: as many as this rank sends.
    sent_room: int | None = None
    # Axes that experts are split over; None: the axes that are named for them.
    experts_over: Axes | None = None
    # One choice for each manual region with several bodies; empty: the first of each.
    bodies: tuple[int, ...] = ()
    # The hardware on which schedule "auto" is priced; None: it chooses none.
    hardware: Hardware | None = None
    # A plan by which parameters were laid out: a search compares its own with it.
    laid_out_by: Plan | None = None
    # Whether a searched plan is first looked for on disk, and saved there.
    cached: bool = False
    # Whether the graph contains the backward of its step.
    step: bool = False
    # The graph's name in dumps and logs.
    name: str = "plan"
    # The rank that plans; None: one process plans for all.
    rank: int | None = None

    def with_options(self, **changes: Any) -> Request:
        """Return the request with other options, by name."""
        return replace(self, options=replace(self.options, **changes))

    @property
    def named_hardware(self) -> Hardware | None:
        """Return the hardware of FXPAR_HARDWARE, on which propagation prices ties; None
        if it is not set. Raises OptionError."""
        return machine(self.options, 1) if self.options.hardware else None

    @property
    def as_planned(self) -> Signature:
        """Return the signature as it is planned: its specs in the axes of ``mesh``,
        without axes of stages and manual axes."""
        signature = self.signature
        if self.manual is not None:
            signature = planned_signature(signature, self.manual.axes)
        if self.pipeline is not None:
            signature = of_one_stage(signature, self.pipeline.axis)
        if not self.mesh.is_refined:
            return signature
        return replace(
            signature,
            inputs=tuple(_refined(x, self.mesh) for x in signature.inputs),
            outputs=tuple(_refined(x, self.mesh) for x in signature.outputs),
        )

    @property
    def expert_axes(self) -> Axes:
        """Return the axes that experts are split over."""
        over = self.experts_over
        return expert_axes(self.mesh) if over is None else over

    @property
    def label(self) -> str:
        """Return the name, with the rank before it."""
        return self.name if self.rank is None else f"rank{self.rank}/{self.name}"

    @property
    def is_leader(self) -> bool:
        """Return whether this process prints messages that are equal on every rank."""
        return not self.rank

    @property
    def whole_mesh(self) -> Mesh:
        """Return the mesh with the axis of stages, if there is one."""
        return self.pipeline.mesh if self.pipeline else self.mesh

    @property
    def pipeline_order(self) -> str:
        """Return the name of the pipeline's schedule."""
        assert self.pipeline is not None, "of a program in stages"
        if self.pipeline.schedule != "auto":
            return self.pipeline.schedule
        return schedules.AUTO if self.step else schedules.AUTO_SEPARATE

    def order_of(self, parts: int) -> str:
        """Return the name of the schedule for ``parts`` microbatches: where the batch
        has fewer than requested, as the last one of a loader, a schedule that takes any
        number."""
        assert self.pipeline is not None, "of a program in stages"
        if parts == self.microbatches:
            return self.pipeline_order
        places = self.pipeline.places
        return schedules.order_for(self.pipeline_order, places, parts)

    def on(self, mesh: Mesh) -> Request:
        """Return the request for one of ``meshes`` or of ``staged``."""
        if pipeline_axis(mesh) is None:
            return replace(self, mesh=mesh, meshes=(), staged=())
        planned, pipeline = split_off(mesh, self.pipeline_schedule)
        return replace(self, mesh=planned, meshes=(), staged=(), pipeline=pipeline)


def _refined(end: End, mesh: Mesh) -> End:
    """Return an input or output whose spec at rest has the axes of a refined mesh."""
    return (
        end if end.at_rest is None else replace(end, at_rest=end.at_rest.refined(mesh))
    )


def machine(options: Options, ranks: int) -> Hardware:
    """Return the hardware that costs are for: the one FXPAR_HARDWARE names, else this
    process's device, in nodes as ``FXPAR_MESH="auto:4x8"`` says, else with all
    ``ranks`` on one machine.

    Raises OptionError on unknown hardware, DeviceError on a device without known
    figures.
    """
    hardware = lookup(options.hardware) if options.hardware else detect()
    auto = read_auto(options.mesh)
    devices = auto.devices if auto else None
    return in_nodes(hardware.with_ranks(devices or ranks), devices)


def known_machine(options: Options, ranks: int) -> Hardware | None:
    """Return ``machine``; None on a device without known figures."""
    try:
        return machine(options, ranks)
    except DeviceError:
        return None


def choices(mesh: Mesh, mode: Mode) -> tuple[Mesh, ...]:
    """Return the meshes a plan of this mode may choose from, first ``mesh``, which has
    all ranks along one axis."""
    if isinstance(mode, Plan) and mode.mesh.size == mesh.size:
        return tuple(dict.fromkeys((mesh, Mesh(mode.mesh.axes))))
    if isinstance(mode, SearchOptions):
        return candidates(mesh.size, mode.hardware)
    return (mesh,)


def staged_choices(mesh: Mesh, mode: Mode) -> tuple[Mesh, ...]:
    """Return the meshes with an axis of stages that a plan of this mode may choose
    from. ``mesh``: all ranks along one axis."""
    if isinstance(mode, SearchOptions):
        return staged_candidates(mesh.size, mode.hardware)
    return ()


def plan_mode(text: str, options: Options, ranks: int, graph: str = "") -> Mode:
    """Return a mode of the pipeline, or the Plan a file holds; of a folder written by
    FXPAR_DUMP, the plan of this ``graph``. ``ranks``: how many run the program.

    Raises PlanError, OptionError on unknown hardware, DeviceError on a device without
    known figures.
    """
    if text == "search":
        on = machine(options, ranks)
        return SearchOptions(on, options.search_seconds, options.memory)
    if text in ("propagate", "replicate"):
        return text
    path = Path(text)
    return Plan.load(path / graph / "plan.json" if path.is_dir() else path)
