"""A Dynamo graph as it is called: ranks meet, and run one variant for their sizes.

Every rank writes which program it calls, on which sizes, and sums of what it feeds
(``meet``). So all ranks know of all, and decide alike, before anything is launched:
run a variant that all have, compile one, or raise. A variant is for the sizes of all
ranks. Where parts of the batch are equal, it is planned for the global batch; where
they are not, every rank computes the batch whole (``uneven``); where other dims differ,
each rank plans for its own, and nothing but what has one size on all may cross.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import FxparError, FxparWarning, RankMismatchError, compose
from fxpar.runtime import consensus, gradient_sketches, presence
from fxpar.runtime.call_sizes import SAME, UNEVEN, Fed, Sizes, Together, sizes_of
from fxpar.runtime.check_inputs import Checks, Drift
from fxpar.runtime.groups import Ranks
from fxpar.runtime.meeting import ALONE, current, meet
from fxpar.runtime.open_sizes import (
    OPENED_MARK,
    DivisorsAsked,
    OpenSize,
    OpenSizesRefused,
    SizeRange,
    open_program,
    open_sizes,
)
from fxpar.runtime.program_identity import (
    BEGINS,
    Named,
    content,
    digest,
    placeholders,
    program_text,
    value_of,
)
from fxpar.runtime.stage_times import CHECKS, stage
from fxpar.runtime.uneven_batch import Parts, Whole, parts_of
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import user_line
from fxpar.sharding.propagate.conventions import batch_axes

# Owner of graphs that are compiled as they are, without the rest of a step.
FORWARD = "forward"

# What could not be left open for so many sets of sizes is fixed from then on.
MOST_REFUSALS = 2

_OWN_MEMORY = (
    "pass a copy, x.clone(): what is fed part of a larger tensor, a branch or a loop, "
    "Dynamo traces otherwise"
)


@dataclass
class Variants:
    """What is compiled of graphs of one content. ``run``: by number, which all ranks
    count alike; ``keys``: the number for the sizes of all ranks; ``last``: the number
    last run for a rank's own sizes."""

    run: dict[int, Callable[..., Any]] = field(default_factory=dict)
    keys: dict[tuple[Sizes, ...], int] = field(default_factory=dict)
    last: dict[Sizes, int] = field(default_factory=dict)
    # Of variants that leave sizes open, by number, the sizes they hold for; why there
    # are none.
    ranges: dict[int, SizeRange] = field(default_factory=dict)
    refused: str = ""
    refusals: int = 0
    # Names of sizes that could not be left open.
    closed: set[str] = field(default_factory=set)
    rows: frozenset[int] | None = None  # results that hold the batch, once known

    def in_range(self, sizes: Sizes) -> int:
        """The number of a variant that leaves sizes open, and holds for these; 0 if
        none does."""
        return next(
            (
                number
                for number, known in self.ranges.items()
                if known.contains(sizes.shapes, sizes.numbers)
            ),
            0,
        )


# Compiles a graph for sizes that go together so: on concrete shapes or, of an
# ``OpenProgram``, on open ones, by a plan if one is given, and with notes in it.
CompileGraph = Callable[..., Callable[..., Any]]

# Dynamo traces code again for what changes nothing: variants are by content.
_VARIANTS: weakref.WeakValueDictionary[str, Variants] = weakref.WeakValueDictionary()
# Graphs that keep the size of the batch open, by identity.
_OPEN: weakref.WeakValueDictionary[str, Calls] = weakref.WeakValueDictionary()


def forget() -> None:
    """Share nothing of what was compiled so far with graphs to come: what
    ``torch.compiler.reset()`` calls of a backend."""
    _VARIANTS.clear()
    _OPEN.clear()
    gradient_sketches.forget()


class Calls:
    """What Dynamo calls for one of its graphs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        named: Sequence[Named],
        local: Sequence[int],
        counts: Collection[int],
        options: Options,
        ranks: Ranks,
        compile_graph: CompileGraph,
        owner: object,
    ) -> None:
        """``local``: positions of inputs of which each rank feeds a part; ``counts``:
        of results that leave as each rank's summand. ``owner``: graphs of unlike owners
        share nothing."""
        self.gm, self.named, self.compile = gm, named, compile_graph
        self.local, self.options, self.ranks = frozenset(local), options, ranks
        self.counts = frozenset(counts)
        self.where = next(filter(None, map(user_line, gm.graph.nodes)), None)
        self.fed = Fed(gm, named, local, ranks.mesh, self.where)
        self.sizes = open_sizes(gm, named, self.fed)
        more = options.verify or options.tune or options.fuse != "none"
        self.opens = owner == FORWARD and not more and options.microbatches == 1
        self.marked = {i for i in self.local if hasattr(examples[i], OPENED_MARK)}
        self.text = program_text(gm, named)
        self.identity = digest(self.text)
        channel = current()
        inner = (
            content(gm, named, examples),
            options,
            ranks,
            owner,
            channel and channel.prefix,
        )
        key = digest("\n".join(map(str, inner)))
        self.variants = _VARIANTS.setdefault(key, Variants())
        self.drift = self._drift(examples)
        self.fresh = True  # what it is fed was not compared in full
        self.heads: dict[Sizes, str] = {}
        self.ready: dict[tuple[str, ...], Callable[..., Any]] = {}
        self.what = f"a call of the graph at {self.where}" if self.where else "a call"
        if self.local:
            _OPEN[self.identity] = self

    def __call__(self, *args: Any) -> Any:
        sizes = self.fed.sizes(args)
        head = self.heads.get(sizes) or self._head(sizes)
        sums = self.drift.word(args) if self.drift is not None else ""
        words = meet(f"{head}\t{sums}\t{gradient_sketches.word()}", self.what)
        heads, told, noted = zip(*(word.split("\t") for word in words), strict=True)
        if any(noted):
            gradient_sketches.compare(noted)
        run = self.ready.get(heads)
        if run is None:
            with stage(CHECKS):
                run = self._decided(heads, told, args)
        elif self.drift is not None:
            self.drift.compare(told)
        return run(*args)

    def _drift(self, examples: Sequence[Any]) -> Drift | None:
        if self.ranks.mesh.size == 1:
            return None
        from torch.distributed.tensor import DTensor

        fed = {
            i: (named.name, "batch" if i in self.local else "input", examples[i].dim())
            for i, named in enumerate(self.named)
            if i in self.fed.tensors
            and named.kind == "input"
            and not isinstance(examples[i], DTensor)
        }
        return Drift(fed, self.ranks.mesh)

    def _head(self, sizes: Sizes) -> str:
        """The word of a call on these sizes, without sums: which program, the variant
        to run if others have the sizes they had last, whether all must be compared."""
        last = self.variants.last.get(sizes, 0) or self.variants.in_range(sizes)
        entries = [self.identity, last, self.fresh, sizes.shapes, sizes.numbers]
        self.heads[sizes] = json.dumps(entries, default=str)
        return self.heads[sizes]

    def _decided(
        self, heads: tuple[str, ...], sums: Sequence[str], args: Sequence[Any]
    ) -> Callable[..., Any]:
        """The variant to run, the same on every rank, for what all have written."""
        entries = [json.loads(head) for head in heads]
        if len({entry[0] for entry in entries}) > 1:
            self._refuse_others(entries)
        key = tuple(sizes_of(entry) for entry in entries)
        together = self.fed.together(key)
        if self.drift is not None:
            self.drift.compare(sums)
        fresh = any(entry[2] for entry in entries)
        number, *others = {entry[1] for entry in entries}
        if not others and number in self.variants.ranges and together.kind == SAME:
            self.variants.keys.setdefault(key, number)
        if not fresh and not others and self.variants.keys.get(key) == number:
            self.ready[heads] = self.variants.run[number]
            return self.ready[heads]
        mine = self.variants.keys.get(key, 0)
        every = set(map(int, meet(str(mine), self.what)))
        made = mine if every == {mine} else 0
        if fresh or not made:
            Checks(self.named, self.options, self.ranks).run(args)
        number = made or self._new(key, together, args)
        own = key[self.ranks.rank if len(key) > 1 else 0]
        self.variants.last[own] = number
        self.fresh = False
        self.heads.clear()
        self.ready.clear()
        return self.variants.run[number]

    def _refuse_others(self, entries: Sequence[Any]) -> None:
        """Raise RankMismatchError, on all ranks: they call other programs."""
        own = entries[self.ranks.rank]
        shapes = dict(zip(self._names(), own[3], strict=True))
        sizes = [f"{name}: {list(shape)}" for name, shape in shapes.items()]
        text = "\n".join([*sizes, self.text])
        what = "the program they call"
        try:
            consensus.agree("a call", self.identity, text, what=what, fix=ALONE)
        except RankMismatchError as error:
            if BEGINS in error.what:
                clearer = RankMismatchError(error.what, fix=_OWN_MEMORY)
                raise consensus.told(clearer) from None
            raise

    def _names(self) -> list[str]:
        return [self.named[i].name for i in self.fed.tensors]

    def _new(
        self, key: tuple[Sizes, ...], together: Together, args: Sequence[Any]
    ) -> int:
        """Compile for sizes; the number of what was made. All ranks come here alike,
        and if one fails all do: Dynamo forgets the graph then, so that the next call
        reads options again."""
        make = self._whole if together.kind == UNEVEN else self._in_parts
        range_ = None
        try:
            with presence.works(f"compiles {self.what}"):
                if together.kind == SAME and (made := self._open(args)):
                    run, range_ = made
                else:
                    run = make(key, together, args)
        except FxparError:
            torch.compiler.reset()
            raise
        self.variants.run.pop(self.variants.keys.get(key, 0), None)
        number = self.variants.keys[key] = _number()
        self.variants.run[number] = run
        if range_ is not None:
            self.variants.ranges[number] = range_
        return number

    def _open(self, args: Sequence[Any]) -> tuple[Callable[..., Any], Any] | None:
        """A variant that leaves sizes open, and the sizes that it holds for; None if
        they are to be fixed."""
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
        plan = None
        while True:
            try:
                return self._opened(args, sizes, units, plan)
            except OpenSizesRefused as error:
                self.variants.refused = str(error)
                self.variants.refusals += 1
                return None
            except DivisorsAsked as asked:
                plan = asked.plan
                for name, divisor in asked.divisors.items():
                    units[name] = units.get(name, 1) * divisor

    def _opened(
        self,
        args: Sequence[Any],
        sizes: Sequence[OpenSize],
        units: Mapping[str, int],
        plan: Plan | None,
    ) -> tuple[Callable[..., Any], Any]:
        """``_open`` of these sizes, multiples of their ``units``, by a plan if one is
        given."""
        gm = _torch.dynamo.copy_graph(self.gm)
        parts = self.ranks.mesh.count(batch_axes(self.ranks.mesh))
        opened = open_program(gm, args, self.named, self.fed, sizes, units, parts)
        run: Any = self.compile(
            Together(SAME),
            opened.graph,
            opened.examples,
            opened=opened,
            recalled=plan,
        )
        self._note_rows(run)
        self.variants.closed |= {size.name for size in run.sizes.fixed}
        self.variants.refused = ""
        return opened.caller(run, run.sizes.written), run.sizes

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
        self, _: tuple[Sizes, ...], together: Together, args: Sequence[Any]
    ) -> Callable[..., Any]:
        """The variant in which every rank computes as the plan splits the program."""
        axes = batch_axes(self.ranks.mesh)
        parts = self.ranks.mesh.count(axes)
        rows = {i: args[i].shape[0] * parts for i in self.local}
        gm = _torch.dynamo.copy_graph(self.gm)
        refused = self.variants.refused
        notes = (f"sizes are fixed: {refused}",) if refused else ()
        run = self.compile(together, gm, self._global(args, rows), notes=notes)
        self._note_rows(run)
        return run

    def _note_rows(self, run: Callable[..., Any]) -> None:
        """Which results hold the batch, as a compiled graph has them."""
        specs, axes = getattr(run, "results", None), batch_axes(self.ranks.mesh)
        if self.local and specs is not None:
            self.variants.rows = frozenset(
                i for i, spec in specs.items() if spec.dims[:1] == (axes,)
            )

    def _whole(
        self, key: tuple[Sizes, ...], together: Together, args: Sequence[Any]
    ) -> Whole:
        """The variant in which every rank computes the batch whole."""
        mesh, rank = self.ranks.mesh, self.ranks.rank
        rest = [axis for axis in mesh.names if axis not in batch_axes(mesh)]
        first = [mesh.group(r, rest)[0] == r for r in range(mesh.size)]
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
        given, gm = self._global(args, rows), _torch.dynamo.copy_graph(self.gm)
        numbers = {i: given[i] for i in self.fed.sources if given[i] != args[i]}
        run = self.compile(together, gm, given)
        cut = self.variants.rows
        parts = next(iter(fed.values()))
        self._say_whole(parts)
        return Whole(
            run,
            fed,
            numbers,
            frozenset(i for i, x in enumerate(self.named) if x.kind == "summand"),
            _batch_results(self) if cut is None else cut,
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
        mode, out = _torch.fake.new_fake_mode(), list(args)
        for i, count in rows.items():
            x = args[i]
            out[i] = _torch.fake.fake_like(x, (count, *x.shape[1:]), mode)
        for i, (source, dim) in self.fed.sources.items():
            out[i] = out[source].shape[dim]
        return out


def with_open_sizes(
    gm: fx.GraphModule, named: Sequence[Named]
) -> Callable[..., Any] | None:
    """For a graph that Dynamo fixed to one sample, or none: the same program with open
    sizes, if it was traced before."""
    found = _OPEN.get(digest(program_text(gm, named)))
    if found is None or any(i not in found.fed.sources for i in found.fed.numbers):
        return None
    tensors = [i for i, x in enumerate(placeholders(gm)) if _is_tensor(x)]
    places = [i for i, x in enumerate(placeholders(found.gm)) if _is_tensor(x)]
    results = found.gm.graph.output_node().args[0]
    if len(tensors) != len(places) or not all(map(_is_tensor, results)):
        return None

    def call(*args: Any) -> Any:
        given: list[Any] = [None] * (len(places) + len(found.fed.numbers))
        for i, n in zip(places, tensors, strict=True):
            given[i] = args[n]
        for i, (source, dim) in found.fed.sources.items():
            given[i] = given[source].shape[dim]
        return found(*given)

    return call


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def _batch_results(calls: Calls) -> frozenset[int]:
    """Results whose dim 0 counts the rows of an input that is fed in parts."""
    values = [value_of(node) for node in placeholders(calls.gm)]
    symbols = {str(s) for i in calls.local for s in _symbols(values[i].shape[0])}
    results = calls.gm.graph.output_node().args[0]
    return frozenset(
        i
        for i, node in enumerate(results)
        if _is_tensor(node)
        and value_of(node).dim()
        and symbols & {str(s) for s in _symbols(value_of(node).shape[0])}
    )


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


_made = itertools.count(1)  # variants of a process by itself


def _number() -> int:
    """Of what all ranks compile now: that of the call, which they count alike."""
    channel = current()
    return next(_made) if channel is None else channel.calls
