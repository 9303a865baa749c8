"""Compiles variants of a graph: for sizes that stay open, or for one call's sizes.

In: a Dynamo graph with its arguments, of the same sizes on all ranks, and a
``CompileJob`` for each variant. Out: a compiled callable, and a record of the variants
so far (``Variants``). Dynamo traces code again for a tensor with other strides (columns
of a larger one, as ``ids[:, :-1]``), and gives the same program: inputs with other
strides than it was compiled for are copied, and what it writes to a copy is written
back. All ranks come here in the same order. Never: a meeting with other ranks that this
module starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.config import Options
from fxpar.runtime.caches.program_identity import NamedInput
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

Strides = tuple[int, ...]


def for_any_strides(
    run: Callable[..., Any], strides: Mapping[int, Strides], written: Collection[int]
) -> Callable[..., Any]:
    """Return ``run`` for inputs of any strides. ``strides``: those that ``run`` takes,
    by input position; ``written``: positions of the inputs that ``run`` writes to."""
    if not strides:
        return run

    def call(*args: Any) -> Any:
        copies = {
            i: _copied(args[i], stride)
            for i, stride in strides.items()
            if args[i].stride() != stride and not _lies_so(args[i], stride)
        }
        if not copies:
            return run(*args)
        results = run(*(copies.get(i, x) for i, x in enumerate(args)))
        with torch.no_grad():
            for i in copies.keys() & set(written):
                args[i].copy_(copies[i])
        return results

    return call


def _lies_so(x: torch.Tensor, stride: Strides) -> bool:
    """Return whether ``x`` has these strides; dims of one element do not count."""
    if not x.numel():
        return True
    dims = zip(x.shape, x.stride(), stride, strict=True)
    return all(n == 1 or own == other for n, own, other in dims)


def _copied(x: torch.Tensor, stride: Strides) -> torch.Tensor:
    """Return a copy with other strides, through which gradients flow. Along dims of
    stride 0 only the first element is copied."""
    rows = x
    for d, step in enumerate(stride):
        rows = rows if step else rows.narrow(d, 0, min(x.shape[d], 1))
    copy = torch.empty_strided(rows.shape, stride, dtype=x.dtype, device=x.device)
    return copy.copy_(rows).expand(x.shape)


# Sizes that differ by this factor may be better off with another plan.
TWICE = 2.0

# After so many failures to leave sizes open, all sizes are fixed.
MOST_REFUSALS = 2


@dataclass(frozen=True)
class CompileJob:
    """Holds all that the compilation of a graph takes, except the graph itself."""

    # Options of the compiled function, as they were read.
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
    """Holds what was compiled of graphs with the same content."""

    # Compiled callables by number, which is the same on all ranks.
    run: dict[int, Callable[..., Any]] = field(default_factory=dict)
    # The number of the variant for sizes.
    keys: dict[Sizes, int] = field(default_factory=dict)
    # The number of the variant last run for sizes.
    last: dict[Sizes, int] = field(default_factory=dict)
    # By number: the sizes that a variant with open sizes holds for.
    ranges: dict[int, SizeRange] = field(default_factory=dict)
    # Why the last variant with open sizes could not be made; "" if it could.
    refused: str = ""
    # How many of those could not be made; MOST_REFUSALS end the attempts.
    refusals: int = 0
    # Names of sizes that could not be left open.
    closed: set[str] = field(default_factory=set)
    # Sizes that a plan was made for, or looked for, and the variant that they run.
    planned_for: dict[Sizes, int] = field(default_factory=dict)

    def in_range(self, sizes: Sizes, *, far: bool = True) -> int:
        """Return the number of the variant with open sizes that holds for ``sizes``,
        the one planned for the nearest sizes. 0 if none does, or, unless ``far``, if
        some size differs from the planned one by TWICE or more."""
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
    """Compiles a Dynamo graph for the sizes of a call."""

    # The graph as Dynamo gave it.
    gm: fx.GraphModule
    # What is asked of each variant.
    job: CompileJob
    # Which inputs ranks feed, and their sizes.
    fed: Fed
    # Sizes that Dynamo keeps open.
    sizes: Sequence[OpenSize]
    # Whether any size may be left open.
    opens: bool
    # Compiles a graph as a job says.
    compile: CompileGraph
    # Variants so far; ``for_sizes`` updates it.
    variants: Variants

    def for_sizes(
        self, args: Sequence[Any]
    ) -> tuple[Callable[..., Any], SizeRange | None]:
        """Return a variant for the sizes of these arguments, and the sizes that it
        holds for, None if it leaves none open."""
        return self._open(args) or (self._fixed(args), None)

    def _open(self, args: Sequence[Any]) -> tuple[Callable[..., Any], SizeRange] | None:
        """Return a variant that leaves sizes open, and the sizes that it holds for: an
        existing one if it holds for these sizes and its plan stands, else a new one.
        None if sizes are to be fixed."""
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
        """Compile a variant with ``sizes`` open, as multiples of ``units``, by ``plan``
        if given. Raises PlanStands if ``rival`` is not to be replaced."""
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
        """Return the sizes to leave open: above 1, open in Dynamo, and not closed."""
        sizes = [x for x in self.sizes if x.name not in self.variants.closed]
        return [x for x in sizes if x.of(args) > 1]

    def _fixed(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Return a variant for the sizes of these arguments alone."""
        gm = _torch.dynamo.copy_graph(self.gm)
        refused = self.variants.refused
        notes = (f"sizes are fixed: {refused}",) if refused else ()
        run = self.compile(replace(self.job, notes=notes), gm, list(args))
        strides = {i: args[i].stride() for i in self.fed.tensors if is_strided(args[i])}
        return for_any_strides(run, strides, getattr(run, "written", ()))


def is_strided(x: Any) -> bool:
    """Return whether a value is a tensor with strides, and not a DTensor."""
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return strided and not isinstance(x, DTensor)
