"""Says where no plan fits in memory: a lower bound on what any plan holds, and the
error, with what needs the memory and which fixes need less.

``least_held``. In: entries (``memory_constraints.Entry``) of whole values, and the
number of ranks; the ``PartProgram`` if the batch is cut. Out: the peak if ranks shared
every value evenly and made no copies. A search on any mesh of these ranks counts at
least as much, so if the peak is over the budget no mesh is searched.

``nothing_fits``. In: the entries that are live at the peak of the smallest known plan.
Out: a TooLargeError that lists them by kind and by the user's lines, and fixes with
what each saves, from the same bytes; "up to" marks an upper bound. Never: plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fxpar.errors import TooLargeError
from fxpar.sharding.cost.recompute import tag
from fxpar.sharding.program import Program, user_line
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.memory_constraints import SMALL, Entry
from fxpar.units import short_bytes, short_place, sizes_as_text

# Kinds of entries that a plan may do without.
_COPIES = ("gathered", "made")


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
        cut, count = part.cut.dims, part.count
        sizes = [
            replace(x, nbytes=x.nbytes // count) if cut[x.value] else x for x in live
        ]
        floor = SMALL * max((entry.nbytes for entry in sizes), default=0)
        live = part.held([x for x in sizes if x.kind != "passing" or x.nbytes >= floor])
    whole_at_rest = _whole_at_rest(program)
    changes = np.zeros(len(program.ops) + 3)
    held = []
    for entry in live:
        share = entry.nbytes / (1 if entry.value in whole_at_rest else ranks)
        held.append((entry, share))
        changes[entry.begin] += share
        changes[entry.end] -= share
    at = int(changes.cumsum().argmax())
    return [pair for pair in held if pair[0].begin <= at < pair[0].end]


# Name in a plan's memory of each kind of entry, in the order of the message.
_CALLED = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "saved": "saved for the backward",
    "input": "inputs and buffers",
    "buffer": "inputs and buffers",
    "passing": "passing",
    "made": "passing",
    "accumulated": "passing",
}

# Most lines that are named of a kind, the largest first, and most fixes.
_LINES, _FIXES = 2, 3
# The least share of all bytes that is listed.
_LEAST = 0.02

Sizes = defaultdict[str, float]
Held = list[tuple[Entry, float]]  # (entry, its bytes on a rank)


def nothing_fits(
    program: Program, limit: float, held: Held, ranks: int, *, least: bool = False
) -> TooLargeError:
    """Return the error. ``held``: entries that are live at the peak; ``least``: whether
    any plan on ``ranks`` ranks needs them, not only the smallest that was found."""
    need = sum(nbytes for _, nbytes in held)
    room, peak = sizes_as_text(limit, need)
    how = f"on {ranks} ranks every plan needs at least {peak}"
    if not least:
        how = f"the smallest found needs {peak}"
    what = f"no plan fits in {room} a rank: {how}, of which"
    return TooLargeError(
        "\n".join([what, *_by_kind(program, held, need)]),
        fix=", or ".join(_fixes(program, held, ranks, need)),
    )


def _by_kind(program: Program, held: Held, need: float) -> Iterator[str]:
    names = {v: x.name for x, v in program.tensor_inputs}
    names |= {v: x.name for x, v in program.tensor_outputs if x.kind == "gradient"}
    sizes, lines = Sizes(float), dict[str, Sizes]()
    for entry, nbytes in held:
        kind = _CALLED[entry.kind]
        sizes[kind] += nbytes
        lines.setdefault(kind, Sizes(float))[_place(program, entry, names)] += nbytes
    for kind in dict.fromkeys(_CALLED.values()):
        if sizes[kind] < _LEAST * need:
            continue
        largest = sorted(lines[kind].items(), key=lambda x: -x[1])[:_LINES]
        where = ", ".join(f"{short_bytes(n)} {line}" for line, n in largest)
        yield f"    {short_bytes(sizes[kind]):>8} {kind}: {where}"


def _place(program: Program, entry: Entry, names: Mapping[int, str]) -> str:
    """Return the name of the parameter or input that a value is or is the gradient of;
    for other values the user's line."""
    maker = program.producers.get(entry.value)
    if maker is None or entry.kind == "gradient":
        return names.get(entry.value, program.values[entry.value].name)
    line = user_line(program.ops[maker[0]].node)
    if line is None:
        return program.values[entry.value].name
    return short_place(line)


def _fixes(program: Program, held: Held, ranks: int, need: float) -> Iterable[str]:
    """Yield the fixes, the largest gain first."""
    sizes = Sizes(float)
    whole, inputs = 0.0, _whole_parameters(program)
    for entry, nbytes in held:
        sizes[_CALLED[entry.kind]] += nbytes
        is_static = entry.kind in ("parameter", "optimizer", "gradient")
        whole += nbytes * (is_static and entry.value in inputs)
    batch = sizes["saved for the backward"] + sizes["passing"]
    gains = [
        (batch / 2, "up to", "fewer rows, half of them or FXPAR_MICROBATCHES=2"),
        (whole * (1 - 1 / ranks), "", "fxpar.shard(model)"),
        (whole / 2, "up to", "stages, pp=2 in the mesh"),
        (need / 2, "up to", "twice as many ranks"),
    ]
    if not any(tag(op.node) for op in program.ops):
        most = sizes["saved for the backward"]
        fix = "checkpoint layers (torch.utils.checkpoint; Hugging Face: "
        gains.append((most, "up to", f"{fix}gradient_checkpointing_enable)"))
    gains = sorted((x for x in gains if x[0] > _LEAST * need), reverse=True)
    for gain, bound, fix in gains[:_FIXES]:
        yield f"{fix}: {bound} {short_bytes(gain)} less".replace(":  ", ": ")


def _whole_at_rest(program: Program) -> set[int]:
    inputs = program.tensor_inputs
    return {v for x, v in inputs if x.at_rest is not None and x.at_rest.is_whole}


def _whole_parameters(program: Program) -> set[int]:
    """Return the parameters that every rank holds whole, and their gradients."""
    out = _whole_at_rest(program)
    out &= {v for x, v in program.tensor_inputs if x.kind == "parameter"}
    for result, v in program.tensor_outputs:
        of = program.inputs[result.of] if result.of is not None else None
        if result.kind == "gradient" and of in out:
            out.add(v)
    return out
