"""Bounds from below the bytes that a rank holds under any plan, on any mesh of a number
of ranks.

In: entries (``memory_constraints.Entry``) of whole values, and the number of ranks; the
``PartProgram`` if the batch is cut. Out: the peak if ranks shared every value evenly
and made no copies. A search on any of these meshes counts at least as much, so if the
peak is over the budget no mesh is searched. Never: looks at a mesh or a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.at_rest import gathered_again
from fxpar.sharding.search.batch_parts import PartProgram, SharedKernels
from fxpar.sharding.search.memory_constraints import SMALL, Entry, entries

# Kinds of entries that a plan may do without.
_COPIES = ("gathered", "made")


def whole_entries(
    program: Program,
    *,
    keep_gathered: bool = False,
    shared: SharedKernels | None = None,
) -> list[Entry]:
    """Return the entries of the whole batch. ``shared``: as
    ``PartProgram.whole_kernels``."""
    gathered = set() if keep_gathered else gathered_again(program)
    key, shared = frozenset(gathered), {} if shared is None else shared
    if key not in shared:
        shared[key] = kernels_of(program, gathered)
    kernels = shared[key]
    return entries(program, kernels, program.backward, gathered)


def least_held(
    program: Program,
    whole: Sequence[Entry],
    ranks: int,
    part: PartProgram | None = None,
) -> list[tuple[Entry, float]]:
    """Return the entries that are live at the peak, each with its bytes on a rank.
    ``ranks``: how many share a value, in stages the ranks of one stage; inputs that are
    whole at rest are not shared."""
    live = [entry for entry in whole if entry.kind not in _COPIES]
    if part is not None:
        sizes = [_of_part(entry, part) for entry in live]
        floor = SMALL * max((entry.nbytes for entry in sizes), default=0)
        live = part.held([x for x in sizes if x.kind != "passing" or x.nbytes >= floor])
    whole_at_rest = {
        v
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None and declared.at_rest is not None and declared.at_rest.is_whole
    }
    changes = np.zeros(len(program.ops) + 3)
    held = []
    for entry in live:
        share = entry.nbytes / (1 if entry.value in whole_at_rest else ranks)
        held.append((entry, share))
        changes[entry.begin] += share
        changes[entry.end] -= share
    at = int(changes.cumsum().argmax())
    return [pair for pair in held if pair[0].begin <= at < pair[0].end]


def _of_part(entry: Entry, part: PartProgram) -> Entry:
    """Return an entry at the size of one part of the batch."""
    if not part.cut.dims[entry.value]:
        return entry
    return entry.sized(entry.nbytes // part.count)
