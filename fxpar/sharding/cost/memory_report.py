"""What a rank holds under a plan, by kind, when it holds most.

In: a Decision. Out: (kind, bytes) at the peak of a training step or of a forward. Where
the search counts what its choices decide one by one (``search.memory_constraints``),
here every reshard is known: each value in each of its specs is a buffer, from what
makes it to what last reads it. Never changes the Decision and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpar.sharding.cost.fused_work import Regions
from fxpar.sharding.cost.liveness import NEVER, lifetimes
from fxpar.sharding.decide import Decision, route
from fxpar.sharding.program import backward_ops, is_view
from fxpar.sharding.propagate.at_rest import derived, gathered_again, resting
from fxpar.sharding.reshard.needed import Reshard
from fxpar.sharding.search.memory_constraints import MOMENTS
from fxpar.sharding.spec import Spec

# In the order in which they are told.
KINDS = (
    "parameters",
    "gathered parameters",
    "optimizer state",
    "gradients",
    "inputs and buffers",
    "saved for the backward",
    "passing",
    "buffers of collectives",
)

# A value in one of its specs.
Version = tuple[int, Spec]

# (kind, bytes, first op, last op)
_Buffer = tuple[str, int, int, int]


def footprint(
    decision: Decision, *, keep_gathered: bool = False
) -> tuple[tuple[str, int], ...]:
    """(kind, bytes a rank holds) at the peak, kinds of which there is nothing left out.

    Optimizer state is that of ``memory_constraints.MOMENTS``, of parameters that have a
    gradient. ``keep_gathered``: parameters at rest are gathered once for both phases.
    """
    held = list(_Holding(decision, keep_gathered).all())
    change = [0] * (len(decision.program.ops) + 3)
    for _, size, first, last in held:
        change[first] += size
        change[last + 1] -= size
    most = total = at = 0
    for time, step in enumerate(change):
        total += step
        if total > most:
            most, at = total, time
    by_kind = dict.fromkeys(KINDS, 0)
    for kind, size, first, last in held:
        if first <= at <= last:
            by_kind[kind] += size
    return tuple((kind, size) for kind, size in by_kind.items() if size)


@dataclass
class _Span:
    """When a buffer is made and last read in the forward (``early``) and the backward
    (``late``; ``first``: when it is first read there). ``sent``: a reshard makes
    another of it, so it is in memory."""

    born: int = NEVER
    early: int = NEVER
    late: int = NEVER
    first: int = NEVER
    sent: bool = False

    def use(self, early: int, late: int) -> None:
        """A reader in the forward, in the backward, or in both."""
        self.early, self.late = max(self.early, early), max(self.late, late)
        if late != NEVER:
            self.first = late if self.first == NEVER else min(self.first, late)


class _Holding:
    """All buffers of a plan, one per value and spec; views share what they look at."""

    def __init__(self, decision: Decision, keep_gathered: bool) -> None:
        self.decision, self.program = decision, decision.program
        program = self.program
        self.backward = backward_ops(program)
        self.ours = derived(program, resting(program))
        self.apart = set() if keep_gathered else gathered_again(program)
        pairs = zip(program.signature.inputs, program.inputs, strict=True)
        self.parameters = {v for i, v in pairs if i.kind == "parameter"}
        self.regions = Regions(program, self.backward)
        self.lives = lifetimes(program, self.regions, self.backward, self.apart)
        self.end = len(program.ops)
        self.seen: dict[Version, Version] = {}
        self.spans: dict[Version, _Span] = {}
        self._follow()

    def _follow(self) -> None:
        """The spans of all versions."""
        self._share()
        for reshard in self.decision.edges.reshards:
            target = reshard.value, reshard.target
            if target not in self.seen:
                self._span(target).born = self._place(reshard)
                self._send(reshard)
        for op in self.program.ops:
            if not is_view(op):
                for i, v in enumerate(op.operands):
                    span = self._span((v, self.decision.edges.reads[op.index, i]))
                    span.use(*self.lives.reads[op.index])
        for kind, v, spec in self._outputs():
            if kind != "gradient":
                late = v in self.program.producers and self._maker(v) in self.backward
                when = (NEVER, self.end) if late else (self.end, NEVER)
                self._span((v, spec)).use(*when)

    def _share(self) -> None:
        """Views, and parts of what is there, are no buffers of their own."""
        edges = self.decision.edges
        for op in self.program.ops:
            if is_view(op):
                source = op.operands[0], edges.reads[op.index, 0]
                self.seen[op.results[0], edges.made[op.results[0]]] = source
        for reshard in edges.reshards:
            way = route(self.decision, reshard)
            if all(step.local for step in way) and not reshard.target.partial:
                source = reshard.value, reshard.source
                self.seen[reshard.value, reshard.target] = source

    def _outputs(self) -> Iterator[tuple[str, int, Spec]]:
        """(kind, value, where it rests)."""
        program, edges = self.program, self.decision.edges
        declared = program.signature.outputs
        for out, v, spec in zip(declared, program.outputs, edges.outputs, strict=True):
            if v is not None and spec is not None:
                yield out.kind, v, spec

    def _maker(self, v: int) -> int:
        """The op that makes a value; of an input the first."""
        return self.program.producers.get(v, (0, 0))[0]

    def _place(self, reshard: Reshard) -> int:
        """The op beside which a reshard stands."""
        if reshard.early:
            return self._maker(reshard.value)
        return self.end if reshard.reader is None else reshard.reader

    def _send(self, reshard: Reshard) -> None:
        """The source of a reshard is read by it."""
        at, v = self._place(reshard), reshard.value
        late = at in self.backward
        if at == self.end:
            late = v in self.program.producers and self._maker(v) in self.backward
        span = self._span((v, reshard.source))
        span.use(*((NEVER, at) if late else (at, NEVER)))
        span.sent = True

    def _root(self, version: Version) -> Version:
        while version in self.seen:
            version = self.seen[version]
        return version

    def _span(self, version: Version) -> _Span:
        return self.spans.setdefault(self._root(version), _Span())

    def _size(self, v: int, spec: Spec) -> int:
        mesh = self.decision.mesh
        return self.program.values[v].nbytes // mesh.count(spec.sharded_axes)

    def all(self) -> Iterator[_Buffer]:
        """Every buffer with its kind and when it is there."""
        yield from self._inputs()
        gradients = self._gradients()
        for (v, spec), begin in gradients.items():
            yield "gradients", self._size(v, spec), begin, self.end
        given = set(self.program.inputs)
        for (v, spec), span in self.spans.items():
            made = spec == self.decision.edges.made[v]
            kernel = made and not (v in self.lives.written or span.sent)
            if not (kernel or (made and v in given) or (v, spec) in gradients):
                yield from self._buffer(v, spec, span, made)

    def _buffer(self, v: int, spec: Spec, span: _Span, made: bool) -> Iterator[_Buffer]:
        """A version of a value, once for each time it is made."""
        size, born = self._size(v, spec), span.born
        if made:
            born = self._maker(v)
        late = born in self.backward
        kind = self._kind(v, spec, crosses=not late and span.late != NEVER)
        if not late and (v in self.apart or (made and v in self.lives.again)):
            if span.early != NEVER:
                yield kind, size, min(born, span.early), span.early
            if span.first != NEVER and v in self.apart:
                yield kind, size, span.first, span.late
        else:
            yield kind, size, born, max(born, span.early, span.late)

    def _kind(self, v: int, spec: Spec, *, crosses: bool) -> str:
        if v in self.parameters or v in self.ours:
            return "gathered parameters"
        if crosses and v not in self.lives.again:
            return "saved for the backward"
        settles = spec == self.decision.settled[v]
        return "passing" if settles else "buffers of collectives"

    def _inputs(self) -> Iterator[_Buffer]:
        signature = self.program.signature
        trained = {out.of for out in signature.outputs if out.kind == "gradient"}
        pairs = zip(signature.inputs, self.program.inputs, strict=True)
        for k, (_, v) in enumerate(pairs):
            if v is None:
                continue
            size = self._size(v, self.decision.edges.made[v])
            ours = v in self.parameters
            kind = "parameters" if ours else "inputs and buffers"
            yield kind, size, 0, self.end
            if ours and k in trained:
                yield "optimizer state", MOMENTS * size, 0, self.end

    def _gradients(self) -> dict[Version, int]:
        """Where gradients rest, and since when."""
        out: dict[Version, int] = {}
        for kind, v, spec in self._outputs():
            if kind == "gradient":
                root = self._root((v, spec))
                born = self.spans[root].born if root in self.spans else NEVER
                out[root] = max(self._maker(self.regions.base[v]), born)
        return out
