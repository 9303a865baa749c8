"""Variants of a graph: for sizes that stay open, or for those of a call alone.

In: a Dynamo graph with what it is fed, of the same sizes on all ranks, and what is
asked of each variant, a ``CompileJob``. Out: a compiled callable, and what is known of
the variants so far (``Variants``). All ranks come here in the same order. Never meets
other ranks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.config import Options
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.runtime.calls.call_layouts import for_any_strides
from fxpar.runtime.calls.call_sizes import Fed, Sizes
from fxpar.runtime.calls.open_sizes import (
    DivisorsAsked,
    OpenProgram,
    OpenSize,
    OpenSizesRefused,
    PlanStands,
    SizeRange,
    open_program,
)
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.plan import Plan
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec

# So many times as large sizes may be better off with another plan.
TWICE = 2.0

# What could not be left open for so many sets of sizes is fixed from then on.
MOST_REFUSALS = 2


@dataclass(frozen=True)
class CompileJob:
    """One graph to compile: everything but the graph itself."""

    # Of the compiled function, as they were read.
    options: Options
    # This rank in the mesh, and its process groups.
    ranks: Ranks
    # One for each input of the graph, in order.
    named_inputs: Sequence[NamedInput]
    # Specs that results must have, by position.
    rests: Mapping[int, Spec] = field(default_factory=dict)
    # Inputs are written, and keep their layout.
    writes: bool = False
    # The graph takes its open sizes as symbols.
    open: OpenProgram | None = None
    # A plan to follow; None: one is made.
    recalled: Plan | None = None
    # A plan that is left only for one that is faster by ``options.replan``.
    rival: Plan | None = None
    # As of the request.
    sent_room: int | None = None
    # What the plan says of how it came about.
    notes: tuple[str, ...] = ()


# Compiles a graph with its examples as a job says.
CompileGraph = Callable[[CompileJob, fx.GraphModule, Sequence[Any]], Any]


@dataclass
class Variants:
    """What is compiled of graphs of one content."""

    # By number, which all ranks count alike.
    run: dict[int, Callable[..., Any]] = field(default_factory=dict)
    # The number for sizes.
    keys: dict[Sizes, int] = field(default_factory=dict)
    # The number last run for sizes.
    last: dict[Sizes, int] = field(default_factory=dict)
    # Of variants that leave sizes open, by number, the sizes they hold for.
    ranges: dict[int, SizeRange] = field(default_factory=dict)
    # Why the last one could not be made; "" if it could.
    refused: str = ""
    # How many could not be made; no more than MOST_REFUSALS are tried.
    refusals: int = 0
    # Names of sizes that could not be left open.
    closed: set[str] = field(default_factory=set)
    # Sizes that a plan was made for, or looked for, and the variant that they run.
    planned_for: dict[Sizes, int] = field(default_factory=dict)

    def in_range(self, sizes: Sizes, *, far: bool = True) -> int:
        """The number of a variant that leaves sizes open, and holds for these: of the
        nearest ones that were planned for. 0 if none does, or, unless they may be
        ``far`` from these, if one is twice or half of what it was."""
        hold = {
            number
            for number in set(self.planned_for.values())
            if self.ranges[number].contains(sizes.shapes, sizes.numbers)
        }
        if far and len(hold) < 2:
            return next(iter(hold), 0)
        distances = [
            (sizes.apart(near), number)
            for near, number in self.planned_for.items()
            if number in hold
        ]
        apart, number = min(distances, default=(math.inf, 0))
        return number if far or apart < TWICE else 0


@dataclass(frozen=True, kw_only=True)
class VariantCompiler:
    """Compiles one Dynamo graph, as it is called, for sizes."""

    # As Dynamo gave it.
    gm: fx.GraphModule
    # What is asked of each variant.
    job: CompileJob
    # Which inputs ranks feed, and their sizes.
    fed: Fed
    # Those that Dynamo keeps open.
    sizes: Sequence[OpenSize]
    # Whether any size may be left open.
    opens: bool
    # Compiles what this hands it.
    compile: CompileGraph
    # What is known so far; kept up to date.
    variants: Variants

    def for_sizes(
        self, args: Sequence[Any]
    ) -> tuple[Callable[..., Any], SizeRange | None]:
        """The variant for the sizes of these arguments, and those that it holds for if
        it leaves some open."""
        return self._open(args) or (self._fixed(args), None)

    def _open(self, args: Sequence[Any]) -> tuple[Callable[..., Any], SizeRange] | None:
        """A variant that leaves sizes open, and the sizes that it holds for; one that
        is there, if it holds for these sizes, and its plan stands. None if they are to
        be fixed."""
        sizes = self._to_open(args)
        if not self.opens and sizes:
            self.variants.refused = "what is asked for takes sizes that are known"
        if not sizes or not self.opens or self.variants.refusals == MOST_REFUSALS:
            return None
        mesh, replan = self.job.ranks.mesh, self.job.options.replan
        parts = mesh.count(batch_axes(mesh))
        units = {
            size.name: math.gcd(size.of(args), parts) for size in sizes if size.dim == 0
        }
        plan = rival = None
        held = self.variants.in_range(self.fed.sizes(args))
        if held and replan is not None:
            rival = self.variants.ranges[held].plan
        while True:
            try:
                return self._opened(args, sizes, units, plan, rival)
            except PlanStands:
                return self.variants.run[held], self.variants.ranges[held]
            except OpenSizesRefused as error:
                if held and replan is not None:
                    return self.variants.run[held], self.variants.ranges[held]
                self.variants.refused = str(error)
                self.variants.refusals += 1
                return None
            except DivisorsAsked as asked:
                plan, rival = asked.plan, None
                for name, divisor in asked.divisors.items():
                    units[name] = units.get(name, 1) * divisor

    def _opened(
        self,
        args: Sequence[Any],
        sizes: Sequence[OpenSize],
        units: Mapping[str, int],
        plan: Plan | None,
        rival: Plan | None,
    ) -> tuple[Callable[..., Any], SizeRange]:
        """``_open`` of these sizes, multiples of their ``units``, by a plan if one is
        given. Raises PlanStands if ``rival`` is not to be replaced."""
        gm = _torch.dynamo.copy_graph(self.gm)
        several = [x for x in sizes if x.of(args) > units.get(x.name, 1)]
        if not several:
            raise OpenSizesRefused(f"{sizes[0].text} is one row of each rank")
        sizes = several
        named_inputs = self.job.named_inputs
        opened = open_program(gm, args, named_inputs, self.fed, sizes, units)
        job = replace(self.job, named_inputs=opened.inputs, open=opened)
        job = replace(job, recalled=plan, rival=rival)
        run = self.compile(job, opened.graph, opened.examples)
        self.variants.closed |= {size.name for size in run.sizes.fixed}
        self.variants.refused = ""
        size_range = replace(run.sizes, plan=run.plan)
        return opened.caller(run, run.sizes.written), size_range

    def _to_open(self, args: Sequence[Any]) -> list[OpenSize]:
        """Sizes to leave open: those that Dynamo does."""
        sizes = [x for x in self.sizes if x.name not in self.variants.closed]
        return [x for x in sizes if x.of(args) > 1]

    def _fixed(self, args: Sequence[Any]) -> Callable[..., Any]:
        """A variant for the sizes of these arguments alone."""
        gm = _torch.dynamo.copy_graph(self.gm)
        refused = self.variants.refused
        notes = (f"sizes are fixed: {refused}",) if refused else ()
        run = self.compile(replace(self.job, notes=notes), gm, list(args))
        strides = {i: args[i].stride() for i in self.fed.tensors if is_strided(args[i])}
        return for_any_strides(run, strides, getattr(run, "written", ()))


def is_strided(x: Any) -> bool:
    """Whether a value is a tensor that lies by strides, and no rank's part."""
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return strided and not isinstance(x, DTensor)
