"""Counts memory over time for the search: which value occupies it from when to when.

In: a Program and its kernels. Out: entries (value, which version of it, from which op
to which), of which ``formulate`` makes ``solver.Live``.
Time counts ops, and an op's result lives from when its kernel runs: a forward op may be
traced among those of the backward. Parameters live throughout, and with them the
optimizer's state; a gradient lives from the op that makes it to the end. A parameter
whose spec at rest is not the one it is read in is copied: for the forward and again for
the backward, or once from its first reader to its last, if it is kept gathered or if
the plan chooses its layout. Values that are written to memory live to their last
reader, those that the backward is given across the peak; a value that the backward
computes again lives twice. Memory between two nodes (a copy made for one reader, the
buffers of a collective) belongs to none of them and is left out; partial results, which
are always brought to another spec, are counted in addition to it while their op runs.

Never: counts what the optimizer needs while it steps, or workspaces of libraries.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fxpar.sharding.cost.program_kernels import NEVER, ProgramKernels
from fxpar.sharding.program import Program

# The optimizer is not known when a step is compiled. This assumes Adam as in
# torch.optim: so many tensors for each trained parameter, of its shape and dtype.
# Moments in float32 of parameters in bfloat16 are twice as large.
MOMENTS = 2

# Values smaller than this share of the largest are left out if they live in one phase.
SMALL = 1e-3


@dataclass(frozen=True)
class Entry:
    """Is a value that occupies memory, from when to when."""

    value: int  # index of the value
    # "parameter", "optimizer", "buffer", "input", "gradient", "gathered" (a copy of a
    # parameter), "saved" (the backward reads it), "passing", "made" (an op's result
    # before it is resharded to the spec it settles in), or "accumulated" (a sum over
    # parts of the batch).
    kind: str
    begin: int  # the first op at which it lives
    end: int  # the first at which it does not
    nbytes: int  # bytes of the whole value
    phase: int = 0  # the phase that a copy is made for: 0 forward, 1 backward


def entries(program: Program, kernels: ProgramKernels) -> list[Entry]:
    """Return entries in order of inputs, then of ops. Small values that live within one
    phase are left out."""
    spans, end = _read_spans(program, kernels), len(program.ops) + 1
    return [
        *_inputs(program, spans),
        *(
            Entry(v, "gradient", begin, end, program.values[v].nbytes)
            for result, v in program.tensor_outputs
            for begin in [kernels.written_at(kernels.base[v])]
            if result.kind == "gradient"
        ),
        *_results(program, kernels, spans),
    ]


# By base and phase (0 forward, 1 backward): the first and last time it is read there.
_ReadSpans = defaultdict[tuple[int, int], tuple[int, int]]


def _read_spans(program: Program, kernels: ProgramKernels) -> _ReadSpans:
    out = _ReadSpans(lambda: (NEVER, NEVER))
    reads = [(v, kernels.runs[op.index]) for op in program.ops for v in op.operands]
    end = len(program.ops)
    for result, v in program.tensor_outputs:
        if result.kind != "gradient":
            maker = program.producers.get(kernels.base[v], (NEVER,))[0]
            late = maker in program.backward
            reads.append((v, (NEVER, end) if late else (end, NEVER)))
    for v, times in reads:
        for phase, time in enumerate(times):
            if time != NEVER:
                first, last = out[kernels.base[v], phase]
                first = time if first == NEVER else min(first, time)
                out[kernels.base[v], phase] = first, max(last, time)
    return out


def _inputs(program: Program, spans: _ReadSpans) -> list[Entry]:
    out, end = [], len(program.ops) + 1
    trained = {out.of for out in program.signature.outputs if out.kind == "gradient"}
    pairs = zip(program.signature.inputs, program.inputs, strict=True)
    for k, (declared, v) in enumerate(pairs):
        if v is None:
            continue
        size, kind = program.values[v].nbytes, declared.kind
        if kind not in ("parameter", "buffer"):
            kind = "input"
        out.append(Entry(v, kind, 0, end, size))
        if kind != "parameter":
            continue
        if k in trained:
            out.append(Entry(v, "optimizer", 0, end, MOMENTS * size))
        times = [spans[v, 0], spans[v, 1]]
        read = [time for time in times if time[1] != NEVER]
        if read and v not in program.gathered_twice:  # one copy for all phases
            times = [(read[0][0], read[-1][1])]
        for phase, (first, last) in enumerate(times):
            if last != NEVER:
                out.append(Entry(v, "gathered", first, last + 1, size, phase))
    return out


def _results(
    program: Program, kernels: ProgramKernels, spans: _ReadSpans
) -> list[Entry]:
    out: list[Entry] = []
    floor = SMALL * max((value.nbytes for value in program.values), default=0)
    for op in program.ops:
        late = op.index in program.backward
        for v in op.results:
            if v not in kernels.written:
                continue
            at, size = kernels.written_at(v), program.values[v].nbytes
            (_, early), (first, last) = spans[v, 0], spans[v, 1]
            recomputed = v in kernels.recomputed and not late
            saved = not late and last != NEVER and not recomputed
            if not saved and size < floor:
                continue
            until = max(at, early if recomputed else max(early, last)) + 1
            out.append(Entry(v, "saved" if saved else "passing", at, until, size))
            out.append(Entry(v, "made", at, at + 1, size))
            if not recomputed or last == NEVER:
                continue
            if v in program.gathered_twice:
                out.append(Entry(v, "gathered", first, last + 1, size, 1))
            elif v in kernels.written_late:
                again = kernels.runs[op.index][1]
                out.append(Entry(v, "passing", again, max(again, last) + 1, size))
    return out
