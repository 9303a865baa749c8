"""The pass hung on the joint graph of AOTAutograd: traced in, one rank's graph out.

In: a ``CompileJob``, all that is known of one graph to compile but the graph itself.
``JointPass`` runs ``fxpar.pipeline`` on the joint graph, then on forward and backward
by themselves, and keeps what it gave: the plan, specs of results, what is launched. No
algorithms.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar import _torch, choose_plan, pipeline
from fxpar._fast.old_objects import old_objects_kept
from fxpar._fast.quick_graphs import quick_graphs
from fxpar.errors import FxparWarning, HintError, PlanError, RuleError, ScheduleError
from fxpar.explain import status_line
from fxpar.explain.dump import report, show_seconds
from fxpar.graph import size_nodes
from fxpar.graph.graph_bodies import hold
from fxpar.job_request import CompileJob, planned_request, request_of
from fxpar.passes import writes_as_results
from fxpar.passes.boundaries import absorb, read_signature
from fxpar.passes.simulate.launches import crossings
from fxpar.runtime.caches import known_programs
from fxpar.runtime.caches.compile_once import CompileGraph, compile_once
from fxpar.runtime.caches.known_programs import KnownProgram, PlanMisfit
from fxpar.runtime.calls.call_sizes import agree_on_launches
from fxpar.runtime.calls.open_sizes import (
    DivisorsAsked,
    OpenSizesRefused,
    PlanStands,
    SizeRange,
    refusal_of,
)
from fxpar.runtime.calls.outside_graphs import warnings_of_plans
from fxpar.runtime.ranks import consensus, presence
from fxpar.runtime.ranks.groups import settle
from fxpar.runtime.ranks.program_numbers import agree_on_numbers
from fxpar.runtime.stage_times import table as stage_table
from fxpar.runtime.steps.binding import is_of_all
from fxpar.runtime.steps.verify import feeds_of, verify
from fxpar.runtime.train_step.forward import StepInput
from fxpar.runtime.train_step.trace import restore_meta
from fxpar.sharding.pipeline_schedule import AUTO_APART
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Input, Output
from fxpar.sharding.spec import Spec

# What comes of a program itself, at every start; not of a rank that did not come.
_REFUSALS = (
    *(HintError, PlanError, RuleError, ScheduleError, OpenSizesRefused),
    _torch.symbols.Inexpressible,
)


def _apart(schedule: str) -> str:
    return (
        f"pipeline={schedule!r} is for fxpar.train_step: forward and backward are two "
        f"calls here, so stages run {AUTO_APART!r}"
    )


class JointPass:
    """The pass hung on the joint graph: traced in, this rank's bound graph out."""

    def __init__(
        self,
        job: CompileJob,
        number: int,
        broken_at: str | None,
        entry: KnownProgram | None = None,
        *,
        leads: bool = False,
    ) -> None:
        self.job, self.number, self.broken_at = job, number, broken_at
        self.entry = entry
        # The other ranks wait for what this one plans and compiles, and take it over.
        self.leads = leads
        self.has_told = False  # the others its plan
        self.is_shared = False  # what is compiled serves all ranks
        self.ranks = job.ranks  # on the mesh that was chosen, once one is
        self.places: list[int | None] = []  # of graph inputs among the arguments
        self.declared: list[Input] = []
        self.at_rest: set[int] = set()  # inputs that are parameters of fxpar.shard
        self.root = torch.nn.Module()  # holds the graph's constants
        # What is asked of the pipeline, and what it gives.
        self.request = request_of(job, f"graph{number}")
        self.result: pipeline.Result | None = None
        self.regions: list[str] = []
        self.launches: list[str] = []  # collectives in order, forward then backward
        self.is_taken = False  # from AOTAutograd's cache: there is no result
        self.sizes: SizeRange | None = None  # that it holds for, where sizes are open
        self.is_agreed = False  # ranks know that they launch the same

    @property
    def plan(self) -> Any:
        if self.result is None:
            return self.entry.plan if self.entry and self.is_taken else None
        return self.result.plan

    @property
    def compiled_plan(self) -> Any:
        """With what is known once forward and backward are compiled."""
        notes, pipeline_option = self.job.notes, self.job.options.pipeline
        is_apart = self.plan and self.plan.stages and not self.job.writes
        if is_apart and pipeline_option not in ("auto", AUTO_APART):
            notes = (*notes, _apart(pipeline_option))
        if self.sizes is not None:
            notes = (*notes, f"holds for {self.sizes.text}")
        return self.plan and replace(
            self.plan,
            regions=tuple(self.regions),
            notes=tuple(dict.fromkeys((*self.plan.notes, *notes))),
        )

    def __call__(self, gm: fx.GraphModule) -> fx.Graph | None:
        """The graph to compile instead of ``gm``'s; None leaves it (a subgraph). Raises
        PlanMisfit where the plan that is known of the program cannot be followed."""
        first = next(iter(gm.graph.nodes))
        if "desc" not in first.meta:
            return None
        if self.entry is None or self.entry.plan is None:
            return self._parallelized(gm)
        try:
            return self._parallelized(gm)
        except Exception as error:
            if consensus.was_told(error):
                raise
            raise PlanMisfit(f"{type(error).__name__}: {error}") from error

    def _parallelized(self, gm: fx.GraphModule) -> fx.Graph:
        options, ranks = self.job.options, self.ranks
        fake_mode = (
            _torch.fake.fake_mode_of(
                [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
            )
            or _torch.fake.new_fake_mode()
        )
        _torch.inductor.replace_random(gm, fake_mode)
        self.root = gm
        if self.job.open is not None:
            size_nodes.lift_sizes(gm.graph)
            if not size_nodes.is_open(gm.graph):
                raise OpenSizesRefused("tracing the program fixed all of them")
        name = self.request.name
        writes = writes_as_results.lift(gm.graph)
        if self.job.writes:
            restore_meta(gm.graph)
        whole = ranks.whole
        axes = ranks.manual.axes if ranks.manual else ()
        boundaries = absorb(gm.graph, fake_mode, whole.mesh, axes)
        self.at_rest = set(boundaries.inputs)
        signature = read_signature(gm.graph, self._input, self._output)
        self._refuse_parts()
        request = self.request = planned_request(
            self.job,
            self.request,
            boundaries.declare(signature),
            self.entry.plan if self.entry else self.job.recalled,
        )
        rival, times = self.job.rival, options.replan
        if (
            rival is not None
            and times is not None
            and choose_plan.stands(gm.graph, fake_mode, request, rival, times)
        ):
            raise PlanStands(request.name)
        with said_by_rank_0(ranks.rank):
            plan = choose_plan.searched if self.leads else choose_plan.planned
            self.result = plan(gm.graph, fake_mode, request)
        planned_before = self.entry is not None and self.entry.plan is not None
        if self.job.open is not None and (divisors := self.job.open.divisors_asked()):
            self._keep_asked(divisors)
            raise DivisorsAsked(divisors, self.plan)
        if ranks.open:
            ranks = self.ranks = settle(ranks, self.plan.mesh)
            request = self.request = request.on(self.plan.mesh)
        inductor = options.codegen == "inductor"
        if options.tune:
            self.result = pipeline.tuned(
                self.result, request, fake_mode, ranks.whole, gm, inductor=inductor
            )
        if self.leads:
            known_programs.tell_plan(name, self._record())
            self.has_told = True
        elif not planned_before:
            consensus.agree(name, self.plan.hash, str(self.plan))
            agree_on_numbers(f"numbers of {name}", self.result.local, gm)
        self._report(self.plan)
        ends = [out.of for out in signature.outputs if out.kind == "mutation"]
        bound = pipeline.bound(
            self.result,
            request,
            fake_mode,
            ranks.whole,
            inductor=inductor,
            writes=writes,
            copied=[of for of in ends if of is not None],
        )
        self.is_shared = self.leads and is_of_all(bound)
        hold(gm, bound)
        return bound

    def _refuse_parts(self) -> None:
        """Raise PlanError for a global value of parts of the batch in local mode."""
        for i in sorted(self.at_rest) if self.ranks.manual is not None else ():
            if self.declared[i].kind == "input":
                raise PlanError(
                    f"fxpar.global_value of {self.declared[i].name} with "
                    "FXPAR_INPUTS=local, where each rank computes on its own part",
                    fix="leave FXPAR_INPUTS=local out: DTensors say what each rank has",
                )

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Inside, a rank that leads plans and compiles; the others hear of its plan,
        or that there is none, and of its end."""
        if not self.leads:
            yield
            return
        name = self.request.name
        with presence.works(f"compiles {name} for all ranks"):
            try:
                yield
            except Exception as error:
                self._tell_failure(error)
                raise
        if self.has_told:
            known_programs.tell_compiled(
                name, shared=self.is_shared, launches=self.launches
            )
        else:
            known_programs.tell_plan(name, None)

    def _tell_failure(self, error: Exception) -> None:
        """Tell the ranks that wait for this one that it failed. With open sizes they
        then do as it does: fix them, or trace with the divisors that the plan asks."""
        name, entry = self.request.name, self.entry
        assert entry is not None
        if isinstance(error, DivisorsAsked):
            known_programs.tell_plan(name, self._asked(error.divisors))
        elif self.job.open is None:
            if not self.has_told:
                known_programs.tell_plan(name, None)
        elif self.has_told:
            refused = refusal_of(error)
            known_programs.tell_compiled(
                name, shared=False, launches=(), refused=refused
            )
        else:
            record = known_programs.describe_refusal(entry, refusal_of(error))
            known_programs.tell_plan(name, record)
            if isinstance(error, _REFUSALS):
                known_programs.keep(entry, record)

    def _asked(self, divisors: Mapping[str, int]) -> dict[str, Any]:
        """What is known of a program whose plan asks its open sizes to divide."""
        assert self.entry is not None
        return known_programs.describe(
            self.entry, self.plan, {}, (), fx.Graph(), divisors=divisors
        )

    def _keep_asked(self, divisors: Mapping[str, int]) -> None:
        """Leave on disk what the plan asks of open sizes, for the next start."""
        if self.entry is not None and self.ranks.rank == 0:
            known_programs.keep(self.entry, self._asked(divisors))

    def report_known_plan(self) -> None:
        """The plan of a program that was taken from AOTAutograd's cache as it is."""
        entry = self.entry
        if self.result is None and entry is not None and entry.plan is not None:
            self.is_taken, self.launches = True, list(entry.launches)
            self._report(entry.plan)

    def _report(self, plan: Plan) -> None:
        rank, name, warned = self.ranks.rank, self.request.name, warnings_of_plans()
        count = self.ranks.mesh.size
        report(plan, self.job.options, rank, count, name, self.broken_at, warned)

    def keep(self) -> None:
        """Leave the program on disk for the next start, if it is a new one. What has
        generated kernels is not kept: they are made when it is compiled."""
        entry, result = self.entry, self.result
        if entry is None or entry.plan is not None or result is None or self.regions:
            return
        if self.ranks.rank == 0:
            known_programs.keep(entry, self._record())

    def _record(self) -> dict[str, Any]:
        """What is known of the program by now."""
        assert self.entry is not None
        assert self.result is not None
        return known_programs.describe(
            self.entry,
            self.compiled_plan,
            self.results(),
            self.launches,
            self.result.local,
            shared=self.is_shared,
            written=self.written(),
        )

    def lower(self, graph: fx.Graph, which: str, generate: CompileGraph) -> Any:
        """What runs a "forward" or a "backward", scheduled by itself.

        A backward that is lowered when it is first called, behind its forward's
        agreement, has one of its own, so that all ranks return or raise. Raises
        RankMismatchError as ``agree_on_launches`` does.
        """
        with self.job.ranks.inside():
            return self._lower_agreed(graph, which, generate)

    def _lower_agreed(self, graph: fx.Graph, which: str, generate: CompileGraph) -> Any:
        if not self.is_agreed:
            return self._lower(graph, which, generate)
        forward = len(self.launches)
        try:
            compiled = self._lower(graph, which, generate)
            if self._meets_in_backward():
                tag = f"the backward of graph{self.number} is compiled"
                agree_on_launches(tag, self.launches[forward:])
        except Exception as error:
            consensus.abort(error)
            raise
        return compiled

    def _meets_in_backward(self) -> bool:
        """Whether all ranks lower a backward late, and may launch collectives in it."""
        if self.entry is not None and self.entry.plan is not None:
            return False  # a rank may have it from AOTAutograd's cache
        return bool(self.plan and self.plan.collectives)

    def _lower(self, graph: fx.Graph, which: str, generate: CompileGraph) -> Any:
        with old_objects_kept(), quick_graphs():
            self._schedule(graph, which)
            if self.job.options.codegen == "inductor":
                return self._compile_once(graph, which, generate)
            return generate(None)

    def _schedule(self, graph: fx.Graph, which: str) -> None:
        """What is done to a forward or a backward by itself."""
        result, inductor = self.result, self.job.options.codegen == "inductor"
        self.regions += pipeline.scheduled(
            graph,
            self.request,
            result,
            backward=which == "backward",
            inductor=inductor,
            gradients=self._gradients(graph) if which == "backward" else {},
            at_rest=[self.declared[i].name for i in sorted(self.at_rest)],
        )
        even = result is None or result.decision.is_even
        if self.request.pipeline is None:  # whose ranks run different programs
            self.launches += crossings(graph, even=even)
        status_line.begin(pipeline.INDUCTOR[which])

    def _gradients(self, backward: fx.Graph) -> dict[int, int]:
        """Results of a backward, by position, that are gradients of whole parameters:
        the position of each among the arguments."""
        if self.result is None or self.request.manual is None:
            return {}
        count = len(backward.output_node().args[0])  # one for each argument, in order
        return {
            i: place
            for i, end in enumerate(self.declared[:count])
            if end.kind == "parameter" and i not in self.at_rest
            if (place := self.places[i]) is not None
        }

    def _compile_once(self, graph: fx.Graph, which: str, generate: CompileGraph) -> Any:
        """What Inductor makes of a forward or a backward, by one rank for all."""

        def compile_here(text: str | None) -> Any:
            status_line.rename(pipeline.INDUCTOR[which])
            return generate(text)

        status_line.rename(f"waiting for the rank that compiles the {which}")
        compiled = compile_once(graph, f"{self.request.name}/{which}", compile_here)
        if which == "backward":
            self.say_seconds(which)
        return compiled

    def say_seconds(self, which: str) -> None:
        """Where the seconds until a forward or a backward was compiled went."""
        options, ranks = self.job.options, self.ranks
        show_seconds(self.request.name, which, stage_table(), options, ranks.rank)

    def agree_on_launches(self, *, compiled: bool = True) -> bool:
        """Return once all ranks have compiled what launches the same collectives; False
        on all ranks if one has not ``compiled``, since its known plan does not fit.

        Raises RankMismatchError if they do not.
        """
        tag = f"graph{self.number} is compiled"
        launches = self.launches if compiled else None
        self.is_agreed = agree_on_launches(tag, launches)
        return self.is_agreed

    def written(self) -> set[int]:
        """Positions of the arguments that the program writes to."""
        if self.result is None:
            return set(self.entry.written) if self.entry and self.is_taken else set()
        signature = self.request.signature
        places = (
            self.places[out.of]
            for out in signature.outputs
            if out.kind == "mutation" and out.of is not None
        )
        return {i for i in places if i is not None}

    def results(self) -> dict[int, Spec]:
        """Specs of the results, by position among the graph's own results."""
        if self.result is None:
            return dict(self.entry.results) if self.entry and self.is_taken else {}
        decision = self.result.decision
        outputs = decision.program.signature.outputs
        pairs = zip(outputs, decision.edges.outputs, strict=True)
        return {
            int(out.name.removeprefix("output_")): spec.joined(decision.mesh)
            for out, spec in pairs
            if out.kind == "output" and spec is not None
        }

    def verify(self, args: Sequence[Any]) -> None:
        """``FXPAR_VERIFY``, with the arguments of the first call."""
        if self.result is None:
            return
        local, normalized = self.result.local, self.result.normalized
        feeds = feeds_of(normalized, args, self.places)
        verify(local, normalized, self.result.decision, self.root, feeds)

    def _input(self, kind: str, payload: Any, node: fx.Node) -> Input:
        self.places.append(payload if kind == "input" else None)
        self.declared.append(self._declare(kind, payload, node))
        return self.declared[-1]

    def _declare(self, kind: str, payload: Any, node: fx.Node) -> Input:
        whole = Spec.whole(node.meta["val"].dim()) if _is_tensor(node) else None
        if kind == "input":
            end = self.job.named_inputs[payload]
            if isinstance(end, StepInput):
                return Input(end.name, end.kind, end.rest or whole, end.use)
            return Input(end.name, end.kind, whole)
        rest = None if kind == "tangent" else whole
        return Input(f"{kind}_{node.name}", kind, rest)

    def _output(self, kind: str, name: str, of: int | None) -> Output:
        if self.job.writes and kind == "mutation" and of is not None:
            return Output(name, kind, of, self.declared[of].rest)
        rest_spec = None
        if kind == "output":
            rest_spec = self.job.rests.get(int(name.removeprefix("output_")))
        open_ended = self.job.options.outputs == "dtensor" and kind == "output"
        return Output(name, kind, of, rest_spec, "even" if open_ended else "whole")


@contextlib.contextmanager
def said_by_rank_0(rank: int) -> Iterator[None]:
    """What planning warns of is the same on every rank: said once per job."""
    if rank == 0:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        yield


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
