"""What steps of the pipeline change: the program, one rank of it, one phase of that.

In: what the caller asks. Each step of ``fxpar.pipeline`` gets such a state with its
graph as the step before left it, and changes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpar.fusion.schedule import Schedule
from fxpar.fusion.schedule_attempts import SimulatedRun
from fxpar.graph.builder import Builder
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
    """What steps change."""

    # As the last step left it.
    graph: fx.Graph
    # What is to be planned or run.
    request: Request
    # So many stages were dumped.
    stage_number: int = 0
    # Of each step, by its name.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Where stages are dumped, and what logs begin with."""
        return self.request.label

    @property
    def specs(self) -> Mapping[fx.Node, Sequence[Spec]]:
        """Of the tensors that nodes make, once they are decided."""
        return {}


@dataclass(kw_only=True)
class JointState(PipelineState):
    """The program while it is planned."""

    # Of the values in the graphs.
    fake_mode: Any
    # The one-device graph.
    normalized: fx.Graph
    # Whether sizes are symbols in it.
    open: bool = False
    # What planning reads of the graph; set by an early step.
    program: Program = field(init=False)
    # Rows of the batch, 0 if they are not known.
    rows: int = 0
    # Axes of unlike ranks whose shares a search may choose.
    open_shares: tuple[str, ...] = ()
    # A plan to apply again: that of the request, or one from disk.
    recalled: Plan | None = None
    # The request before that plan's mesh was taken; set with ``recalled``.
    request_before: Request = field(init=False)
    # Of these that whose schedule stands, too, where one would be chosen.
    plan_with_schedule: Plan | None = None
    # Of the plan on disk.
    key: str = ""
    # None before the plan is decided or recalled.
    decision: Decision | None = None
    # Other decisions that may be faster, each with the request that it answers.
    rivals: tuple[tuple[Decision, Request], ...] = ()
    # Predicted seconds of a step, if plans were compared by them.
    step_seconds: float | None = None
    # The local graph before its schedule, if the request is to be tuned.
    unscheduled: fx.Graph | None = None
    # Given, recalled or chosen.
    schedule: Schedule = field(default_factory=Schedule)
    # Of a schedule that was chosen: what was simulated of it.
    run: SimulatedRun | None = None
    # What came near to be the schedule.
    near: tuple[str, ...] = ()
    # Schedules that were simulated and not taken, the fastest first.
    others: tuple[str, ...] = ()
    # What the plan is to say of how it came about.
    notes: tuple[str, ...] = ()
    # As ``Plan.sent_rows``.
    sent_rows: tuple[int, ...] = ()
    # Of a program that is cut into them.
    stages: tuple[PipelineStage, ...] = ()
    # Of the decision; set once that is made.
    plan: Plan = field(init=False)

    @property
    def specs(self) -> Mapping[fx.Node, Sequence[Spec]]:
        program, specs = self.decided.program, defaultdict[fx.Node, list[Spec]](list)
        for (node, _), value in sorted(
            program.value_of.items(), key=lambda item: item[0][1]
        ):
            specs[node].append(self.decided.settled[value])
        return specs

    @property
    def decided(self) -> Decision:
        assert self.decision is not None, "the step plan comes first"
        return self.decision

    @property
    def rewriter(self) -> Builder:
        return Builder(self.graph, self.fake_mode)


@dataclass(kw_only=True)
class RankState(PipelineState):
    """The local graph while one rank is put into it."""

    # Of the values in the graph.
    fake_mode: Any
    # The rank, and its process groups.
    ranks: Ranks
    # The graph goes to Inductor.
    inductor: bool
    # Its coordinates are looked up when it runs.
    at_run_time: bool
    # The last results, which are written to inputs.
    writes: tuple[Write, ...]
    # Positions of the inputs whose written values are copied.
    copied: list[int]


@dataclass(kw_only=True)
class PhaseState(PipelineState):
    """A forward or a backward while its communication is ordered."""

    # ``graph`` as the passes of a phase take it, with settings.
    phase: PhaseGraph
    # "forward" or "backward".
    which: str
    # None where nothing was planned: no regions are fused.
    mesh: Mesh | None
    # All shards have equal shapes; if not, only regions of the schedule are fused.
    even: bool = True
    # The graph goes to Inductor.
    inductor: bool = False
    # Names of the parameters of fxpar.shard that the program reads.
    at_rest: tuple[str, ...] = ()
    # Results of a backward, by position, that a reducer takes where they are made: the
    # argument that each is the gradient of.
    gradients: Mapping[int, int] = field(default_factory=dict)
    # What runs as generated kernels.
    regions: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.request.label}/{self.which}"
