"""Describes a program whose batch is cut into parts, as the search prices it: one part.

In: a Program and which factors of its ops follow the batch (``BatchCut``). Out: the
``PartProgram``: the same ops and values, at the sizes of one part; a part is charged
its share of work and values that exist once for all parts (weights, sums of gradients,
the update). The price is for one part, as stages need, or for a step of all parts.
For a place of a pipeline it gives the memory held: its stage's share of weights,
activations of the parts in flight. Never: looks at specs, or changes a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.sharding.cost.program_kernels import ProgramKernels, Work, kernels_of
from fxpar.sharding.factors import Rule
from fxpar.sharding.program import Op, Program, Value, is_contraction, phase_of
from fxpar.sharding.search.memory_constraints import Entry

# The least bytes of an element that is accumulated over parts.
WIDE = 4

# Kinds of entries that a stage holds all the time, for its own part of the program.
STATIC = ("parameter", "optimizer", "buffer", "gradient", "gathered", "accumulated")


@dataclass(frozen=True)
class BatchCut:
    """Says which factors, dims and values of a program follow the batch."""

    # Factors of each op that follow the batch.
    factors: tuple[frozenset[str], ...]
    # Dims of each value that follow the batch.
    dims: tuple[frozenset[int], ...]
    # Values that are summed over parts.
    sums: frozenset[int]
    # The largest number that divides the rows of the batch and the sizes of all
    # ``factors``; the number of parts must divide it.
    rows: int


@dataclass(frozen=True, eq=False)
class PartProgram:
    """Is one of several parts of a program."""

    # The program of the whole batch.
    whole: Program
    # The factors and dims of it that follow the batch.
    cut: BatchCut
    # Number of parts.
    count: int
    # Number of places that stages run on.
    places: int = 1
    # Parts that the first stage holds at a time.
    in_flight: int = 1
    # Number of parts that are priced: one, or all.
    paid: int = 1

    @cached_property
    def program(self) -> Program:
        """Return the program at the sizes of one part."""
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
            kernel_cache={},
        )

    def _value(self, value: Value) -> Value:
        dims = self.cut.dims[value.index]
        shape = (n // self.count if d in dims else n for d, n in enumerate(value.shape))
        return replace(value, shape=tuple(shape), open=()) if dims else value

    @cached_property
    def kernels(self) -> ProgramKernels:
        """Return the kernels of one part."""
        whole_kernels = kernels_of(self.whole)
        works = (
            self._work(op, work)
            for op, work in zip(self.whole.ops, whole_kernels.works, strict=True)
        )
        return replace(whole_kernels, program=self.program, works=tuple(works))

    def _work(self, op: Op, work: Work) -> Work:
        cut = self.cut.factors[op.index]
        if not cut:
            return work
        parts = [
            [1 if cut.isdisjoint(dim) else self.count for dim in dims]
            for dims in op.rule.tensors
        ]
        shapes = (
            tuple(n // part for n, part in zip(shape, own, strict=True))
            for shape, own in zip(work.shapes, parts, strict=bool(work.shapes))
        )
        return replace(
            work,
            flops=work.flops / self.count,
            hidden_flops=work.hidden_flops / self.count,
            moved=tuple((i, n / max(parts[i], default=1)) for i, n in work.moved),
            shapes=tuple(shapes),
        )

    def op_share(self, index: int) -> float:
        """Return how many times an op's seconds are paid: the parts priced, or the
        share of them for an op that runs once for all parts."""
        return self.paid / (1 if self.cut.factors[index] else self.count)

    def value_share(self, value: int) -> float:
        """Return how many times the seconds of resharding a value are paid."""
        return self.paid / (1 if self.cut.dims[value] else self.count)

    @property
    def is_step(self) -> bool:
        """Return whether a whole step is priced."""
        return self.paid == self.count

    @cached_property
    def added(self) -> dict[int, tuple[tuple[int, float], ...]]:
        """Return by op (position among its results, bytes): the bytes moved to add one
        part of its results to the sums over parts.

        The result is read, and the sum so far read and written; the first part is not
        added to anything. A product in the dtype of its sum adds to it as it is made,
        which takes no longer than writing it (``stages.sums_of_parts``).
        """
        program, sums = self.program, self.cut.sums
        out: dict[int, tuple[tuple[int, float], ...]] = {}
        for op in program.ops:
            if sums.isdisjoint(op.results) or phase_of(op.node) == "update":
                continue
            moved = []
            for position, v in enumerate(op.results):
                value = program.values[v]
                wide = value.nbytes * max(1, WIDE // value.dtype.itemsize)
                in_product = wide == value.nbytes and is_contraction(op)
                # Readers that all make such sums from it are added up in its place.
                readers = {self.whole.ops[i].results for i, _ in self.whole.uses[v]}
                passed_on = readers and not any(map(sums.isdisjoint, readers))
                if v in sums and not in_product and not passed_on:
                    nbytes = (value.nbytes + 2 * wide) * (1 - 1 / self.count)
                    moved.append((position, nbytes))
            if moved:
                out[op.index] = tuple(moved)
        return out

    def held(self, live: Sequence[Entry]) -> list[Entry]:
        """Return the entries that occupy a place's memory, given entries of
        ``program``: weights are gathered, and gradients accumulated, once for all
        parts."""
        end = len(self.whole.ops) + 1
        out = []
        for entry in live:
            value = self.whole.values[entry.value]
            if entry.kind == "made" and entry.value in self.cut.sums:
                wide = entry.nbytes * max(1, WIDE // value.dtype.itemsize)
                entry = Entry(entry.value, "accumulated", 0, end, wide)
            elif entry.kind == "gathered":
                if entry.phase:  # the copy of the forward stays
                    continue
                entry = replace(entry, begin=0, end=end)
            elif entry.kind == "passing" and self._is_saved(entry):
                entry = replace(entry, kind="saved")
            nbytes = int(entry.nbytes * self.share(entry))
            out.append(replace(entry, nbytes=nbytes))
        return out

    def share(self, entry: Entry) -> float:
        """Return the share of an entry that a place holds on average."""
        if entry.kind == "saved":
            return self.in_flight / self.places
        if entry.kind not in STATIC:
            return 1.0
        return self.share_at_every(entry) + self.share_at_stage(entry) / self.places

    def share_at_every(self, entry: Entry) -> float:
        """Return the share of an entry that every place holds, whatever its stage."""
        along = self._along(entry)
        return 1 / self.places if along == "split" else float(along == "whole")

    def share_at_stage(self, entry: Entry) -> float:
        """Return the share that a stage holds in addition: an input that is split along
        the axis of stages is gathered there, and a gradient is whole there before it is
        split."""
        put_together = self._along(entry) == "split" and self.places > 1
        together = put_together and entry.kind in ("parameter", "gradient")
        return float(together or self._along(entry) == "own")

    def _along(self, entry: Entry) -> str:
        """Return how an entry that lives throughout is stored along the axis of stages:
        "own", "split" or "whole"."""
        if entry.kind in ("gathered", "accumulated"):
            return "own"
        return self.along_stages.get(entry.value, "own")

    @cached_property
    def along_stages(self) -> dict[int, str]:
        """Return how inputs, and gradients of them, are stored along the axis of
        stages."""
        signature, out = self.whole.signature, dict[int, str]()
        for result, v in self.whole.tensor_outputs:
            if result.kind == "gradient" and result.of is not None:
                out[v] = signature.inputs[result.of].along_stages
        return out | {v: x.along_stages for x, v in self.whole.tensor_inputs}

    def _is_saved(self, entry: Entry) -> bool:
        """Return whether a value of a training step's forward is read by its
        backward."""
        ops, last = self.whole.ops, entry.end - 1
        maker = self.whole.producers.get(entry.value)
        if maker is None or last >= len(ops):
            return False
        phases = phase_of(ops[maker[0]].node), phase_of(ops[last].node)
        return phases == ("forward", "backward")
