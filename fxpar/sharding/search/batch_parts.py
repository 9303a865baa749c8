"""A program whose batch is cut into parts, as the search prices it: one part of it.

In: a Program and which factors of its ops follow the batch (``BatchCut``). Out: the
``PartProgram``: the same ops and values, at the sizes of one part; what is there once
for all parts (weights, sums of gradients, the update) costs a part its share. Of a
place of a pipeline it says what it holds: its stage's share of weights, activations of
the parts in flight. Never looks at specs, and changes no graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.sharding.cost.program_kernels import ProgramKernels, Work, kernels_of
from fxpar.sharding.factors import Rule
from fxpar.sharding.program import Op, Program, Value
from fxpar.sharding.search.memory_constraints import Entry

# Bytes of an element that is accumulated over parts, at least.
_WIDE = 4

# What a stage holds all the time, of its own part of the program.
STATIC = ("parameter", "optimizer", "buffer", "gradient", "gathered", "accumulated")


@dataclass(frozen=True)
class BatchCut:
    """What of a program follows the batch. ``rows``: that parts must divide."""

    # Of each op.
    factors: tuple[frozenset[str], ...]
    # Of each value.
    dims: tuple[frozenset[int], ...]
    # Values that are summed over parts.
    sums: frozenset[int]
    rows: int


@dataclass(frozen=True, eq=False)
class PartProgram:
    """One of ``count`` parts of a program that runs in ``places`` stages, of which the
    first holds ``in_flight`` parts at a time."""

    whole: Program
    cut: BatchCut
    count: int
    places: int = 1
    in_flight: int = 1

    @cached_property
    def program(self) -> Program:
        """At the sizes of one part."""
        rules: dict[tuple[Rule, frozenset[str]], Rule] = {}

        def smaller(op: Op, cut: frozenset[str]) -> Op:
            if not cut:
                return op
            if (op.rule, cut) not in rules:
                sizes = tuple(
                    (f, n // self.count if f in cut else n) for f, n in op.rule.sizes
                )
                rules[op.rule, cut] = replace(op.rule, sizes=sizes)
            return replace(op, rule=rules[op.rule, cut])

        return replace(
            self.whole,
            ops=[
                smaller(op, cut)
                for op, cut in zip(self.whole.ops, self.cut.factors, strict=True)
            ],
            values=list(map(self._value, self.whole.values)),
        )

    def _value(self, value: Value) -> Value:
        dims = self.cut.dims[value.index]
        shape = (n // self.count if d in dims else n for d, n in enumerate(value.shape))
        return replace(value, shape=tuple(shape), open=()) if dims else value

    def kernels(self, gathered: Collection[int]) -> ProgramKernels:
        """The kernels of one part."""
        whole_kernels = kernels_of(self.whole, gathered)
        works = (
            self._work(op, work)
            for op, work in zip(self.whole.ops, whole_kernels.works, strict=True)
        )
        return replace(whole_kernels, program=self.program, works=tuple(works))

    def _work(self, op: Op, work: Work) -> Work:
        cut = self.cut.factors[op.index]
        if not cut:
            return work
        shares = [
            1 / self.count if any(f in cut for dim in dims for f in dim) else 1.0
            for dims in op.rule.tensors
        ]
        pairs = zip(work.points, shares, strict=False)
        return replace(
            work,
            flops=work.flops / self.count,
            moved=tuple((i, nbytes * shares[i]) for i, nbytes in work.moved),
            points=tuple(int(n * share) for n, share in pairs),
        )

    def op_share(self, index: int) -> float:
        """The share of an op's seconds that one part pays."""
        return 1.0 if self.cut.factors[index] else 1 / self.count

    def value_share(self, value: int) -> float:
        """The share of the seconds that one part pays to bring a value elsewhere."""
        return 1.0 if self.cut.dims[value] else 1 / self.count

    def held(self, live: Sequence[Entry]) -> list[Entry]:
        """What occupies a place's memory, of entries of ``program``: weights are
        gathered, and gradients accumulated, once for all parts."""
        end = len(self.whole.ops) + 1
        out = []
        for entry in live:
            value = self.program.values[entry.value]
            if entry.kind == "made" and entry.value in self.cut.sums:
                wide = entry.nbytes * max(1, _WIDE // value.dtype.itemsize)
                entry = Entry(entry.value, "accumulated", 0, end, wide)
            elif entry.kind == "gathered":
                if entry.phase:  # the copy of the forward stays
                    continue
                entry = replace(entry, begin=0, end=end)
            out.append(replace(entry, nbytes=int(entry.nbytes * self._share(entry))))
        return out

    def _share(self, entry: Entry) -> float:
        if entry.kind in STATIC:
            return 1 / self.places
        return self.in_flight / self.places if entry.kind == "saved" else 1.0
