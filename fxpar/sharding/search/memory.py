"""What occupies memory, and when: a peak over time, not a sum.

In: a Program with its fused regions. Out: entries (value, from which op to which,
bytes of the whole value). Time counts ops. Parameters live throughout, and with them
gradients and the optimizer's state; what is written to memory lives from the op that
makes it to the last that reads it, so what the backward reads lives across the peak. A
value that the partitioner computes again from others (light ops) is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program, is_view
from fxpar.sharding.search.work import Regions

# Tensors like a parameter that training holds beside it: the gradient, and two moments
# of Adam.
PER_PARAMETER = 4


@dataclass(frozen=True)
class Entry:
    """``value`` occupies ``nbytes``, whole, from op ``begin`` up to before ``end``.
    ``kind``: "parameter" (with gradient and optimizer state), "buffer", "input",
    "saved" (read in the backward) or "passing"."""

    value: int
    kind: str
    begin: int
    end: int
    nbytes: int


def entries(
    program: Program, mesh: Mesh, regions: Regions, backward: set[int]
) -> list[Entry]:
    """In order of values. Small values (of less than a thousandth of the largest) that
    pass within one phase are left out."""
    signature, end = program.signature, len(program.ops)
    trained = {out.of for out in signature.outputs if out.kind == "gradient"}
    out: list[Entry] = []
    for k, (declared, v) in enumerate(
        zip(signature.inputs, program.inputs, strict=True)
    ):
        if v is None:
            continue
        size = program.values[v].nbytes
        if declared.kind == "parameter":
            copies = PER_PARAMETER if k in trained else 1
            out.append(Entry(v, "parameter", 0, end, copies * size))
        else:
            kind = "buffer" if declared.kind == "buffer" else "input"
            out.append(Entry(v, kind, 0, end, size))
    last = _last_reads(program, regions)
    floor = max((value.nbytes for value in program.values), default=0) / 1000
    for op in program.ops:
        if is_view(op):
            continue
        for v in op.results:
            if v not in regions.written:
                continue
            until = last.get(v, op.index) + 1
            saved = op.index not in backward and (until - 1) in backward
            size = program.values[v].nbytes
            if saved or size >= floor:
                kind = "saved" if saved else "passing"
                out.append(Entry(v, kind, op.index, until, size))
    return out


def _last_reads(program: Program, regions: Regions) -> dict[int, int]:
    """The last op that reads each base, itself or through views."""
    last: dict[int, int] = {}
    for op in program.ops:
        if not is_view(op):
            for v in op.operands:
                last[regions.base[v]] = op.index
    for out in program.outputs:
        if out is not None:
            last[regions.base[out]] = len(program.ops)
    return last
