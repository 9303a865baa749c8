"""Holds a request to plan as data: a ``Request``, with the meshes that a search may
choose from.

It pickles, so that a rank can send it and a test can hold it.
In: a mesh, or text such as ``"auto:4x8"`` (nodes x devices) with the hardware; layouts
of inputs and outputs; hints; the mode; the user's ``Options``.
Out: the Request, its mesh and signature as they are planned; the factorisations of the
ranks into axes, fewest axes first.
Never: plans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxpar.config import Options
from fxpar.errors import DeviceError, MeshError, OptionError
from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.cost.hardware_table import Hardware, detect, lookup
from fxpar.sharding.factors import Axes
from fxpar.sharding.hints import Entries
from fxpar.sharding.manual_axes import ManualAxes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import Pipeline, is_pipeline, pipeline_axis, split_off
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Signature
from fxpar.sharding.propagate.conventions import expert_axes
from fxpar.sharding.rest_over_stages import of_one_stage
from fxpar.sharding.search.run_search import SearchOptions

_FORM = 'write FXPAR_MESH="auto", or "auto:4x8" for 4 nodes of 8 devices'
_AUTO = re.compile(r"auto(?::([1-9]\d*)(?:x([1-9]\d*))?)?")

# Names of the outer, the middle and the inner axis. Where each rank feeds its own
# part of the batch, every axis is one of the batch by its name.
NAMES = ("dp", "cp", "tp")
# The most places that stages are tried on.
MOST_PLACES = 32
# Microbatches for each stage where nobody says how many.
PARTS = 4


@dataclass(frozen=True)
class Auto:
    """Is a mesh to be chosen."""

    # Number of ranks; None: as many as there are.
    ranks: int | None = None
    # Devices of a node; None: as the hardware has them.
    devices: int | None = None


def read_auto(mesh: Any) -> Auto | None:
    """Return the request that text such as ``"auto:4x8"`` makes; None for any other
    mesh.

    Raises MeshError if text begins so and cannot be read.
    """
    if not isinstance(mesh, str) or not mesh.strip().startswith("auto"):
        return None
    text = mesh.strip()
    match = _AUTO.fullmatch(text)
    if match is None:
        if "=" in text:  # an axis of such a name
            return None
        raise MeshError(f"cannot read mesh {mesh!r}", fix=_FORM)
    first, devices = (int(n) if n else None for n in match.groups())
    return Auto(first * (devices or 1) if first else None, devices)


def in_nodes(hardware: Hardware, devices: int | None) -> Hardware:
    """Return the hardware with ``devices`` in a node. Hardware whose network has a
    single level knows no nodes and stays as it is."""
    if devices is None or len(hardware.levels) == 1:
        return hardware
    *inner, node, between = hardware.levels
    inside = [replace(x, devices=math.gcd(x.devices, devices)) for x in inner]
    levels = (*inside, replace(node, devices=devices), between)
    return replace(hardware, levels=levels)


def candidates(ranks: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """Return every ordered factorisation of the ranks into at most three axes, each of
    which is inside nodes, between nodes, or all there is."""
    names_by_count = {1: NAMES[:1], 2: (NAMES[0], NAMES[2]), 3: NAMES}
    node = hardware.levels[-2].devices if len(hardware.levels) > 1 else 0
    several = node and ranks > node and ranks % node == 0
    return tuple(
        Mesh(tuple(zip(names_by_count[count], sizes, strict=True)))
        for count in names_by_count
        for sizes in _splits(ranks, count)
        if count == 1 or not several or _is_within_nodes(sizes, node)
    )


def staged_candidates(ranks: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """Return meshes with an outer axis of stages and every candidate of at most two
    axes inside a stage."""
    return tuple(
        Mesh((("pp", places), *(axis for axis in inner.axes if axis[1] > 1)))
        for places in range(2, min(ranks, MOST_PLACES) + 1)
        if ranks % places == 0
        for inner in candidates(ranks // places, hardware)
        if len(inner.axes) <= 2
    )


def _splits(ranks: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered factorisations into ``count`` sizes above 1; 1 itself into one."""
    if count == 1:
        yield (ranks,)
        return
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            for others in _splits(ranks // first, count - 1):
                yield (first, *others)


def _is_within_nodes(sizes: Sequence[int], node: int) -> bool:
    stride = 1
    for size in reversed(sizes):
        if stride % node and node % (stride * size):
            return False
        stride *= size
    return True


def distinct(meshes: Sequence[Mesh], hardware: Hardware) -> tuple[Mesh, ...]:
    """Return the meshes without those that differ from an earlier one only in the order
    of axes with one kind of link: where nothing names an axis, their plans take the
    same time."""
    first: dict[Any, Mesh] = {}
    for mesh in meshes:
        links = hardware.links(mesh)
        axes = [
            (is_pipeline(name), size, link)
            for (name, size), link in zip(mesh.axes, links, strict=True)
        ]
        first.setdefault(tuple(sorted(axes, key=repr)), mesh)
    return tuple(first.values())


Mode = str | SearchOptions | Plan


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
    # Whether the graph contains the backward of its step.
    step: bool = False
    # Whether dims are split into equal shards only.
    even: bool = False
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
            axes = self.manual.axes
            signature = signature.with_layouts(
                lambda end, spec: replace(end, at_rest=spec.clear_of(axes))
            )
        if self.pipeline is not None:
            signature = of_one_stage(signature, self.pipeline.axis)
        if not self.mesh.is_refined:
            return signature
        return signature.with_layouts(
            lambda end, spec: replace(end, at_rest=spec.refined(self.mesh))
        )

    @property
    def expert_axes(self) -> Axes:
        """Return the axes that experts are split over."""
        over = self.experts_over
        return expert_axes(self.mesh) if over is None else over

    @property
    def is_in_parts(self) -> bool:
        """Return whether a rank may run its batch in parts, one after the other."""
        return self.pipeline is not None or (self.microbatches or 1) > 1

    @property
    def has_unlike_ranks(self) -> bool:
        """Return whether ranks have speeds or shares of their own, or a plan may give
        them such."""
        mesh = self.mesh
        return isinstance(self.mode, Plan) or bool(mesh.unlike) or any(mesh.shares)

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
    def parts(self) -> int:
        """Return the number of microbatches to cut the batch into."""
        if self.microbatches is not None:
            return self.microbatches
        return 1 if self.pipeline is None else PARTS * self.pipeline.places

    @property
    def pipeline_order(self) -> str:
        """Return the name of the schedule of a pipeline, if there is one."""
        if self.options.pipeline != "auto":
            return self.options.pipeline
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

    def with_open_mesh(self, mesh: Mesh) -> Request:
        """Return the request for a mesh that its mode chooses. ``mesh``: all ranks
        along one axis, the first of its choices."""
        mode = self.mode
        if isinstance(mode, SearchOptions):
            staged = staged_candidates(mesh.size, mode.hardware)
            meshes = candidates(mesh.size, mode.hardware)
            return replace(self, meshes=meshes, staged=staged)
        meshes = (mesh,)
        if isinstance(mode, Plan) and mode.mesh.size == mesh.size:
            meshes = tuple(dict.fromkeys((mesh, Mesh(mode.mesh.axes))))
        return replace(self, meshes=meshes)

    def on(self, mesh: Mesh) -> Request:
        """Return the request for one of ``meshes`` or of ``staged``."""
        if pipeline_axis(mesh) is None:
            return replace(self, mesh=mesh, meshes=(), staged=())
        planned, pipeline = split_off(mesh)
        return replace(self, mesh=planned, meshes=(), staged=(), pipeline=pipeline)


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


def plan_mode(text: str, options: Options, ranks: int, graph: str = "") -> Mode:
    """Return a mode of the pipeline, or the Plan a file holds; of a folder written by
    FXPAR_DUMP, the plan of this ``graph``. ``ranks``: how many run the program.

    Raises PlanError, OptionError on unknown hardware and what is no mode, DeviceError
    on a device without known figures.
    """
    if not isinstance(text, str | Path):
        raise OptionError(
            f"mode cannot be {text!r}",
            fix="give search, propagate, replicate, or a file of plan.save()",
        )
    if text == "search":
        on = machine(options, ranks)
        return SearchOptions(on, options.search_seconds, options.memory)
    if text in ("propagate", "replicate"):
        return text
    path = Path(text)
    return Plan.load(path / graph / "plan.json" if path.is_dir() else path)
