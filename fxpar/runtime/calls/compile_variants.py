"""Variants of a graph: for sizes left open, for parts of one size, for the batch whole.

In: a Dynamo graph with what it is fed, and the sizes of all ranks, how these go
together. Out: a compiled callable, and what is known of the variants so far
(``Variants``). All ranks come here alike. Where parts of the batch are equal the
program is planned for the global batch; where they are not, every rank computes the
batch whole (``uneven_batch``). Never meets other ranks by itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar._torch.dynamo import example_of
from fxpar.errors import FxparWarning, compose
from fxpar.runtime.caches.program_identity import NamedInput, placeholders
from fxpar.runtime.calls.call_layouts import (
    Strides,
    contiguous_strides,
    for_any_strides,
)
from fxpar.runtime.calls.call_sizes import SAME, UNEVEN, Fed, SizeAgreement, Sizes
from fxpar.runtime.calls.open_sizes import (
    DivisorsAsked,
    OpenSize,
    OpenSizesRefused,
    PlanStands,
    SizeRange,
    open_program,
)
from fxpar.runtime.calls.uneven_batch import Parts, Whole, parts_of
from fxpar.runtime.ranks.groups import Ranks
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import user_line
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec

# So many times as large sizes may be better off with another plan.
TWICE = 2.0

# What could not be left open for so many sets of sizes is fixed from then on.
MOST_REFUSALS = 2

# Compiles a graph for sizes that go together so: on concrete shapes or, of an
# ``OpenProgram``, on open ones, by a plan if one is given, and with notes in it.
CompileGraph = Callable[..., Callable[..., Any]]


@dataclass
class Variants:
    """What is compiled of graphs of one content."""

    # By number, which all ranks count alike.
    run: dict[int, Callable[..., Any]] = field(default_factory=dict)
    # The number for the sizes of all ranks.
    keys: dict[tuple[Sizes, ...], int] = field(default_factory=dict)
    # The number last run for a rank's own sizes.
    last: dict[Sizes, int] = field(default_factory=dict)
    # Of variants that leave sizes open, by number, the sizes they hold for.
    ranges: dict[int, SizeRange] = field(default_factory=dict)
    # Why the last one could not be made; "" if it could.
    refused: str = ""
    # How many could not be made; no more than MOST_REFUSALS are tried.
    refusals: int = 0
    # Names of sizes that could not be left open.
    closed: set[str] = field(default_factory=set)
    # Results that hold the batch, once known.
    rows: frozenset[int] | None = None
    # Whether it was said that some hold it, and leave whole.
    whole_said: bool = False
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
    # Names and kinds, in order.
    inputs: Sequence[NamedInput]
    # Positions of inputs of which each rank feeds a part.
    local: frozenset[int]
    # Positions of inputs that Dynamo would keep open.
    marked: frozenset[int]
    # Positions of results that leave as each rank's summand.
    counts: frozenset[int]
    # Which inputs ranks feed, and their sizes.
    fed: Fed
    # That run it.
    ranks: Ranks
    # Those that Dynamo keeps open.
    sizes: Sequence[OpenSize]
    # Whether any size may be left open.
    opens: bool
    # The user's line.
    where: str | None
    # As the option.
    replan: float | None
    # Compiles what this hands it.
    compile: CompileGraph
    # What is known so far; kept up to date.
    variants: Variants

    def for_sizes(
        self, key: tuple[Sizes, ...], agreement: SizeAgreement, args: Sequence[Any]
    ) -> tuple[Callable[..., Any], SizeRange | None]:
        """The variant for the sizes of all ranks, and those that it holds for if it
        leaves some open."""
        if agreement.kind == SAME and (opened := self._open(args)):
            return opened
        if agreement.kind == UNEVEN:
            return self._whole(key, agreement, args), None
        return self._in_parts(agreement, args), None

    def _open(self, args: Sequence[Any]) -> tuple[Callable[..., Any], SizeRange] | None:
        """A variant that leaves sizes open, and the sizes that it holds for; one that
        is there, if it holds for these sizes, and its plan stands. None if they are to
        be fixed."""
        sizes = self._to_open(args)
        if not self.opens and sizes:
            self.variants.refused = "what is asked for takes sizes that are known"
        if not sizes or not self.opens or self.variants.refusals == MOST_REFUSALS:
            return None
        parts = self.ranks.mesh.count(batch_axes(self.ranks.mesh))
        units = {
            size.name: math.gcd(size.of(args), parts)
            for size in sizes
            if size.dim == 0 and size.place not in self.local
        }
        plan = rival = None
        held = self.variants.in_range(self.fed.sizes(args))
        if held and self.replan is not None:
            rival = self.variants.ranges[held].plan
        while True:
            try:
                return self._opened(args, sizes, units, plan, rival)
            except PlanStands:
                return self.variants.run[held], self.variants.ranges[held]
            except OpenSizesRefused as error:
                if held and self.replan is not None:
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
        parts = self.ranks.mesh.count(batch_axes(self.ranks.mesh))
        several = [x for x in sizes if x.of(args) > units.get(x.name, 1)]
        if not several:
            raise OpenSizesRefused(f"{sizes[0].text} is one row of each rank")
        sizes = several
        opened = open_program(gm, args, self.inputs, self.fed, sizes, units, parts)
        run: Any = self.compile(
            SizeAgreement(SAME),
            opened.graph,
            opened.examples,
            open_program=opened,
            recalled=plan,
            rival=rival,
        )
        self._note_rows(run)
        self.variants.closed |= {size.name for size in run.sizes.fixed}
        self.variants.refused = ""
        size_range = replace(run.sizes, plan=run.plan)
        return opened.caller(run, run.sizes.written), size_range

    def _to_open(self, args: Sequence[Any]) -> list[OpenSize]:
        """Sizes to leave open: those that Dynamo does, but for the rows of a part of
        the batch that were one number so far."""
        sizes = [x for x in self.sizes if x.name not in self.variants.closed]
        return [x for x in sizes if x.of(args) > 1 and self._varies(x, args)]

    def _varies(self, size: OpenSize, args: Sequence[Any]) -> bool:
        """Whether a size is to be open, as far as is known."""
        if size.place not in self.marked or size.dim != 0:
            return True
        n, now = self.fed.tensors.index(size.place), size.of(args)
        return any(sizes.shapes[n][0] != now for sizes, *_ in self.variants.keys)

    def _in_parts(
        self, agreement: SizeAgreement, args: Sequence[Any]
    ) -> Callable[..., Any]:
        """The variant in which every rank computes as the plan splits the program."""
        axes = batch_axes(self.ranks.mesh)
        parts = self.ranks.mesh.count(axes)
        rows = {i: args[i].shape[0] * parts for i in self.local}
        gm = _torch.dynamo.copy_graph(self.gm)
        refused = self.variants.refused
        notes = (f"sizes are fixed: {refused}",) if refused else ()
        run = self.compile(agreement, gm, self._global(args, rows), notes=notes)
        self._note_rows(run)
        strides = self._strides(args)
        for i in strides.keys() & self.local:  # as ``_global`` makes them
            strides[i] = contiguous_strides(args[i].shape)
        return for_any_strides(run, strides, getattr(run, "written", ()))

    def _strides(self, args: Sequence[Any]) -> dict[int, Strides]:
        """How inputs lie whose sizes may differ between calls, by position."""
        return {i: args[i].stride() for i in self.fed.tensors if is_strided(args[i])}

    def _note_rows(self, run: Callable[..., Any]) -> None:
        """Which results hold the batch, as a compiled graph has them."""
        specs, axes = getattr(run, "results", None), batch_axes(self.ranks.mesh)
        if self.local and specs is not None:
            self.variants.rows = frozenset(
                i for i, spec in specs.items() if spec.dims[:1] == (axes,)
            )
            self._say_results_whole(specs)

    def _say_results_whole(self, specs: Mapping[int, Spec]) -> None:
        """Warn of results that hold the batch, and leave with that of all ranks."""
        if self.variants.whole_said or self.ranks.rank != 0:
            return
        results = self.gm.graph.output_node().args[0]
        for i, dims in _batch_dims(self.gm, self.local).items():
            if i in self.counts or i not in specs or not specs[i].is_whole:
                continue
            self.variants.whole_said = True
            why = "a rank's part lies along dim 0"
            if 0 in dims:
                why = "rows of the batch were joined, moved or counted there"
            text = compose(
                f"with FXPAR_INPUTS=local result {results[i].name} leaves whole, with "
                f"the samples of all ranks along its dim {dims[0]}: {why}",
                where=user_line(results[i]),
                fix="return what each sample has by itself, with the batch as dim 0, "
                "or take this rank's rows of it",
            )
            warnings.warn(text, FxparWarning, stacklevel=2)
            return

    def _whole(
        self, key: tuple[Sizes, ...], agreement: SizeAgreement, args: Sequence[Any]
    ) -> Whole:
        """The variant in which every rank computes the batch whole."""
        mesh, rank = self.ranks.mesh, self.ranks.rank
        other_axes = [axis for axis in mesh.names if axis not in batch_axes(mesh)]
        first = [mesh.group(r, other_axes)[0] == r for r in range(mesh.size)]
        fed = {}
        for n, i in enumerate(self.fed.tensors):
            if i in self.local:
                counts = [
                    sizes.shapes[n][0]
                    for sizes, one in zip(key, first, strict=True)
                    if one
                ]
                fed[i] = parts_of(counts, mesh, rank)
        rows = {i: parts.total for i, parts in fed.items()}
        values, gm = self._global(args, rows), _torch.dynamo.copy_graph(self.gm)
        numbers = {i: values[i] for i in self.fed.sources if values[i] != args[i]}
        run = self.compile(agreement, gm, values)
        strides = self._strides(args)
        for i in strides.keys() & self.local:  # they come gathered
            del strides[i]
        run = for_any_strides(run, strides, getattr(run, "written", ()))
        batch_results = self.variants.rows
        parts = next(iter(fed.values()))
        self._say_whole(parts)
        return Whole(
            run,
            fed,
            numbers,
            frozenset(i for i, x in enumerate(self.inputs) if x.kind == "summand"),
            _batch_results(self.gm, self.local)
            if batch_results is None
            else batch_results,
            self.counts,
            parts,
        )

    def _say_whole(self, parts: Parts) -> None:
        if self.ranks.rank == 0:
            sizes = ", ".join(map(str, parts.counts))
            text = compose(
                f"parts of the batch have {sizes} samples: every rank computes all "
                f"{parts.total} of them",
                where=self.where,
                fix="for speed, feed parts of one size, as DataLoader(drop_last=True) "
                "does",
            )
            warnings.warn(text, FxparWarning, stacklevel=2)

    def _global(self, args: Sequence[Any], rows: Mapping[int, int]) -> list[Any]:
        """Arguments as the global program sees them: inputs fed in parts as fakes of so
        many ``rows``, and numbers that are sizes of them."""
        if not rows:
            return list(args)
        mode, values = _torch.fake.new_fake_mode(), list(args)
        for i, count in rows.items():
            x = args[i]
            values[i] = _torch.fake.fake_like(x, (count, *x.shape[1:]), mode)
        for i, (source, dim) in self.fed.sources.items():
            values[i] = values[source].shape[dim]
        return values


def is_strided(x: Any) -> bool:
    """Whether a value is a tensor that lies by strides, and no rank's part."""
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return strided and not isinstance(x, DTensor)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(example_of(node), torch.Tensor)


def _batch_results(gm: fx.GraphModule, local: Collection[int]) -> frozenset[int]:
    """Results whose dim 0 counts the rows of an input that is fed in parts."""
    return frozenset(i for i, dims in _batch_dims(gm, local).items() if 0 in dims)


def _batch_dims(gm: fx.GraphModule, local: Collection[int]) -> dict[int, list[int]]:
    """The dims of results that count the rows of an input that is fed in parts."""
    values = [example_of(node) for node in placeholders(gm)]
    symbols = {str(s) for i in local for s in _symbols(values[i].shape[0])}
    dims_of = dict[int, list[int]]()
    for i, node in enumerate(gm.graph.output_node().args[0]):
        shape = example_of(node).shape if is_tensor(node) else ()
        counting = [{str(s) for s in _symbols(n)} & symbols for n in shape]
        if any(counting):
            dims_of[i] = [d for d, counted in enumerate(counting) if counted]
    return dims_of


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()
