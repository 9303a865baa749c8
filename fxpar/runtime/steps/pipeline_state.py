"""Define what steps of the pipeline know: of the program, of one rank, of one phase.

In: what the caller asks. Each step of ``fxpar.pipeline`` gets the graph as the step
before left it, and such a state as its context, to which it adds its results. Out: the
decision on the program, and the graphs made from it. Never: compiled code, or a graph
of other ranks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpar.fusion.choose_schedule import Attempts, SimulatedRun
from fxpar.fusion.schedule import Schedule
from fxpar.graph.builder import Builder
from fxpar.graph.size_nodes import at_hints
from fxpar.passes.order.order_collectives import PhaseGraph
from fxpar.passes.writes_as_results import Write
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.decide import Decision
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import PipelineStage
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.spec import Spec


@dataclass(kw_only=True)
class PipelineState:
    """Holds the graph of one run of the pipeline, and what its steps share."""

    # As the last step left it.
    graph: fx.Graph
    # The caller's request.
    request: Request
    # How many stages were dumped.
    stage_number: int = 0
    # Seconds that each step took, by its name.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return where stages are dumped, and what logs begin with."""
        return self.request.label

    @property
    def inductor(self) -> bool:
        """Return whether the graph goes to Inductor."""
        return self.request.options.codegen == "inductor"

    @property
    def specs(self) -> Mapping[fx.Node, Sequence[Spec]]:
        """Return the specs of the results of nodes, empty before they are decided."""
        return {}


@dataclass(kw_only=True)
class JointState(PipelineState):
    """Is the program while it is planned; at the end it holds decision and plan."""

    # Mode of the fake values in the graphs.
    fake_mode: Any
    # The one-device graph that is planned.
    normalized: fx.Graph
    # Whether sizes in the graph are symbols.
    open: bool = False
    # The graph as planning reads it; set by an early step.
    program: Program = field(init=False)
    # Rows of the batch, 0 if they are not known.
    rows: int = 0
    # Axes with ranks of different speed whose shares a search may choose.
    open_shares: tuple[str, ...] = ()
    # A plan to apply again, from the request or from disk.
    recalled: Plan | None = None
    # ``recalled`` if its schedule is to be taken too, instead of one that is chosen.
    plan_with_schedule: Plan | None = None
    # Key of the plan on disk; "" if none is looked for.
    key: str = ""
    # None before the plan is decided or recalled.
    decision: Decision | None = None
    # Other decisions that may be faster, each with the request that it answers.
    rivals: tuple[tuple[Decision, Request], ...] = ()
    # Predicted seconds of a step, if plans were compared by them.
    step_seconds: float | None = None
    # The simulation without a schedule that the choice of one begins with.
    attempts: Attempts | None = None
    # The local graph before its schedule, if the request is to be tuned.
    unscheduled: fx.Graph | None = None
    # Given, recalled or chosen.
    schedule: Schedule = field(default_factory=Schedule)
    # The simulated run of a schedule that was chosen.
    run: SimulatedRun | None = None
    # Near misses: rewrites that were almost in the schedule, with the reason.
    near_misses: tuple[str, ...] = ()
    # Schedules that were simulated and not taken, the fastest first.
    others: tuple[str, ...] = ()
    # Notes for the plan on how it was made.
    notes: tuple[str, ...] = ()
    # As ``Plan.sent_rows``.
    sent_rows: tuple[int, ...] = ()
    # Empty if the program is not cut into stages.
    stages: tuple[PipelineStage, ...] = ()
    # The decision as data; set by the step ``describe``.
    plan: Plan = field(init=False)

    @property
    def specs(self) -> Mapping[fx.Node, Sequence[Spec]]:
        """Return the specs in which the results of each node settle."""
        program, specs = self.decided.program, defaultdict[fx.Node, list[Spec]](list)
        for (node, _), value in sorted(
            program.value_of.items(), key=lambda item: item[0][1]
        ):
            specs[node].append(self.decided.settled[value])
        return specs

    @property
    def at_hints(self) -> fx.Graph:
        """Return the graph; open sizes are those it was traced with."""
        return at_hints(self.graph, self.fake_mode) if self.open else self.graph

    @property
    def local(self) -> fx.Graph:
        """Return the graph that every rank runs, once the last step is done."""
        return self.graph

    def noted(self, *notes: str) -> JointState:
        """Return the state, with more notes in its plan."""
        self.plan = replace(self.plan, notes=(*self.plan.notes, *notes))
        return self

    @property
    def decided(self) -> Decision:
        """Return the decision, which must be made already."""
        assert self.decision is not None, "the step plan comes first"
        return self.decision

    @property
    def build(self) -> Builder:
        """Return a builder that adds nodes to the graph, which is a local one once it
        is another than the normalized one."""
        is_local = self.graph is not self.normalized
        mesh = self.decided.mesh if is_local else None
        return Builder(self.graph, self.fake_mode, mesh)


@dataclass(kw_only=True)
class RankState(PipelineState):
    """Is the local graph while it is bound to one rank."""

    # Mode of the fake values in the graph.
    fake_mode: Any
    # The rank, and its process groups.
    ranks: Ranks
    # The rank's coordinates are looked up when the graph runs.
    at_run_time: bool
    # The last results of the graph, which are written to inputs.
    writes: tuple[Write, ...]
    # Positions of the inputs whose written values are copied.
    copied: list[int]


@dataclass(kw_only=True)
class PhaseState(PipelineState, PhaseGraph):
    """Is the graph of a forward or a backward while its communication is ordered."""

    # "forward" or "backward".
    which: str
    # None where nothing was planned: no regions are fused.
    mesh: Mesh | None
    # Whether all shards have equal shapes; if not, only regions of the schedule are
    # fused.
    even: bool = True
    # Names of the parameters sharded by fxpar.shard that the program reads.
    at_rest: tuple[str, ...] = ()
    # Of results of a forward, by position, keys of their memory in the user's program;
    # None in a backward, whose results share none.
    memories: Mapping[int, Hashable] | None = None
    # Results of a backward that a reducer takes where they are made: by position, the
    # argument whose gradient the result is.
    gradients: Mapping[int, int] = field(default_factory=dict)
    # Texts about the regions that run as generated kernels.
    regions: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.request.label}/{self.which}"


def on_cpu_by_default() -> contextlib.AbstractContextManager[object]:
    """Return a context in which tensors are made on the CPU unless a device is named.
    It costs nothing where that is so anyway: a default device slows every call of
    torch."""
    if torch.get_default_device().type == "cpu":
        return contextlib.nullcontext()
    return torch.device("cpu")
