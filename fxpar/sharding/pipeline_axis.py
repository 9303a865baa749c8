"""Finds the axis of a mesh along which ranks run stages of a program, and holds the
stages.

A pipeline axis is no axis of specs: a program is planned on the mesh without it, then
cut into stages, each of which runs on the ranks at one place along it.
In: a Mesh. Out: the mesh of one stage, a ``Pipeline`` as requested.
``PipelineStage`` describes a stage in a plan.
Never: cuts a program.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fxpar.errors import MeshError, OptionError
from fxpar.sharding.mesh import Mesh, axis_of

PIPELINE = ("pp", "stage")

# The axis on which a mesh of stages alone is planned.
_ONE = ("dp", 1)


@dataclass(frozen=True)
class Pipeline:
    """Describes a program in stages, as it was requested."""

    # Includes the pipeline axis.
    mesh: Mesh
    # The name of the pipeline axis.
    axis: str

    @property
    def places(self) -> int:
        """Return the number of ranks along the axis."""
        return self.mesh.axis_size(self.axis)

    def speeds(self, places: Sequence[int]) -> tuple[float, ...]:
        """Return the relative speed of the ranks at each of these places."""
        speeds = self.mesh.speeds_of(self.axis)
        return tuple(speeds[place] for place in places)


@dataclass(frozen=True)
class PipelineStage:
    """Describes a contiguous part of the forward, with the backward that belongs to
    it."""

    # In the order of the forward.
    index: int
    # Along the pipeline axis.
    place: int
    # Names of its ops in the local graph, of one microbatch, forward then backward.
    ops: tuple[str, ...]
    # Names of the parameters that it reads.
    parameters: tuple[str, ...]
    # Bytes of its parameters on a rank.
    bytes: int
    # Bytes that it sends to other stages for one microbatch.
    sent_bytes: int
    # Name of the first op of the stage in the one-device program.
    begin: str = ""
    # Predicted for the forward of one microbatch.
    forward_seconds: float = 0.0
    # Predicted for the backward of one microbatch.
    backward_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return predicted seconds of one microbatch, forward and backward."""
        return self.forward_seconds + self.backward_seconds


def is_pipeline(axis: str) -> bool:
    """Return whether an axis is an axis of stages by its name."""
    return axis_of(axis).lower() in PIPELINE


def pipeline_axis(mesh: Mesh) -> str | None:
    """Return the axis of stages, if there is one with several ranks.

    Raises MeshError if there are two, if it has shares, or if ranks of another axis are
    given as unequal.
    """
    axes = [axis for axis, size in mesh.axes if size > 1 and is_pipeline(axis)]
    if len(axes) > 1:
        raise MeshError(
            f"mesh {mesh} has {len(axes)} axes of stages: {', '.join(axes)}",
            fix="give stages one axis: FXPAR_MESH=pp=4,dp=2",
        )
    if axes and ":" in axes[0]:
        raise MeshError(f"{axes[0]!r}: an axis of stages has no parts")
    if axes and set(mesh.unlike) - set(axes):
        raise MeshError(
            f"mesh {mesh} has stages and devices of different speeds along "
            "another axis",
            fix="leave out the speeds, or the axis of stages",
        )
    if axes and mesh.weights_of(axes[0]):
        raise MeshError(
            f"mesh {mesh} has shares along {axes[0]}, an axis of stages",
            fix=f"give {axes[0]} speeds, or pin parameters to stages",
        )
    return axes[0] if axes else None


def with_planned_axis(mesh: Mesh) -> Mesh:
    """Return the mesh; if it has stages alone, with an axis of one rank to plan on."""
    if pipeline_axis(mesh) is None or len(mesh.axes) > 1:
        return mesh
    links, speeds = (*mesh.links, mesh.links[0]), (*mesh.speeds, None)
    return Mesh((*mesh.axes, _ONE), links, speeds)


def split_off(mesh: Mesh, schedule: str = "auto") -> tuple[Mesh, Pipeline | None]:
    """Return the mesh to plan on, and the pipeline, if there is an axis of stages.

    Raises OptionError for a schedule on a mesh without such an axis, MeshError as
    ``pipeline_axis``.
    """
    axis = pipeline_axis(mesh)
    if axis is None:
        if schedule != "auto":
            raise OptionError(
                f"pipeline={schedule!r}: mesh {mesh} has no axis of stages",
                fix="name one: FXPAR_MESH=pp=2,dp=2, or leave pipeline out",
            )
        return mesh, None
    whole = with_planned_axis(mesh)
    return without_stages(whole), Pipeline(whole, axis)


def without_stages(mesh: Mesh) -> Mesh:
    """Return the mesh that one stage runs on."""
    axis = pipeline_axis(mesh)
    return mesh if axis is None else without(mesh, (axis,))


def without(mesh: Mesh, axes: Collection[str]) -> Mesh:
    """Return the mesh of the ranks that differ only along other axes."""
    positions = [i for i, name in enumerate(mesh.names) if name not in axes]
    if len(positions) == len(mesh.names):
        return mesh
    return Mesh(
        tuple(mesh.axes[i] for i in positions),
        tuple(mesh.links[i] for i in positions),
        tuple(mesh.speeds[i] for i in positions),
    )


def with_stages(planned: Mesh, pipeline: Pipeline) -> Mesh:
    """Return the whole mesh of a pipeline, refined and with links like a stage's
    mesh."""
    whole = pipeline.mesh.refined(planned.names)
    links = dict(zip(planned.names, planned.links, strict=True))
    named_links = zip(whole.names, whole.links, strict=True)
    return replace(
        whole, links=tuple(links.get(name, link) for name, link in named_links)
    )


def homes(stages: int, places: int, style: str = "loop") -> tuple[int, ...]:
    """Return the place of each stage: "loop", 0 to the last again and again, or "v",
    forth and back."""
    rounds = range(-(-stages // places))
    way: list[int] = []
    for turn in rounds:
        back = style == "v" and turn % 2
        way += reversed(range(places)) if back else range(places)
    return tuple(way[:stages])
