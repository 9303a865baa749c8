"""Reads hints: the user's specs for parameters, buffers, inputs and values of a
program.

A hint table maps name patterns (``fnmatch``) to entries per dim: an axis, a tuple of
axes, ``None``/``"_"`` (closed: whole on this dim), ``"?"`` (open), ``"tp?"`` (split and
open to more). ``"tp:2"``, a part of an axis, may stand for an axis (see ``mesh``).
Dims left out are open. ``"tp p2"``, an entry with a priority, propagates after entries
with lower numbers. Two words belong to the tensor, not to a dim: ``"!tp"`` keeps it
whole along tp, and ``"|"`` lets no axis pass between it and its readers. A table comes
from ``hints=`` or, as TOML, from ``FXPAR_HINTS``:

    "layers.*.up.weight" = ["tp", "_"]
    "layers.0.*" = "pp=0"

The second line pins the ops that read a parameter to a stage, on a mesh with stages.

In: a table, a Program, a Mesh. Out: seeds of propagation, pins of stages.
Never: drops a hint that does not fit; it raises a HintError that names the hint.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpar.errors import HintError, MeshError, SpecError
from fxpar.sharding import shard_sizes
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh, axis_of, full_name
from fxpar.sharding.program import Program, user_line
from fxpar.sharding.propagate.conventions import is_batch_name
from fxpar.sharding.propagate.propagation import Seed
from fxpar.sharding.spec import Spec

# Batch first, then parameters, so that where both name an axis activations keep it.
PRIORITY = {"input": 0, "tangent": 0, "value": 0, "buffer": 1, "parameter": 1}

Entries = Sequence[Any] | Spec | str

_FORM = 'write TOML lines such as "*.up.weight" = ["tp", "_"], or a dict of the same'

# A stage by its number.
_PIN = re.compile(r"\s*(\w+)\s*=\s*(\d+)\s*")


def load(source: str | Path | Mapping[str, Entries] | None) -> dict[str, Entries]:
    """Return a hint table from a mapping or a TOML file. Raises HintError if
    unreadable."""
    if isinstance(source, Mapping) or source is None:
        table, where = dict(source or {}), ""
    else:
        try:
            toml = tomllib.loads(Path(source).read_text())
        except (OSError, TypeError, ValueError) as error:
            raise HintError(
                f"cannot read the hints file {source}: {error}", fix=_FORM
            ) from error
        table, where = dict(_flatten(toml)), f"{source}: "
    for name, hint in table.items():
        if not isinstance(name, str) or not isinstance(hint, str | Spec | list | tuple):
            what = f"{where}hint {name!r}: cannot read {hint!r}"
            raise HintError(what, fix=_FORM)
    return table


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield entries with joined names: TOML reads ``a.b = ...`` as nested tables."""
    for key, entry in table.items():
        if isinstance(entry, Mapping):
            yield from _flatten(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def spec_hints(table: Mapping[str, Entries]) -> dict[str, Entries]:
    """Return the table without the lines that pin to stages."""
    return {name: hint for name, hint in table.items() if _pin(hint) is None}


def pinned_stages(
    table: Mapping[str, Entries], names: Iterable[str], axis: str, stages: int
) -> dict[str, int]:
    """Return parameter -> stage, for ``names`` that are pinned.

    Raises HintError for an axis other than the stages' axis, a stage that does not
    exist, or a pattern without match.
    """
    names, pins = list(names), dict[str, int]()
    for pattern, hint in table.items():
        pin = _pin(hint)
        if pin is None:
            continue
        what, hits = f"hint {pattern!r}", fnmatch.filter(names, pattern)
        if pin[0] != axis or pin[1] >= stages:
            raise HintError(
                f"{what}: {pin[0]}={pin[1]} is no stage of the program",
                fix=f"stages are {axis}=0 to {axis}={stages - 1}",
            )
        if not hits:
            raise HintError(
                f"{what} matches no parameter",
                fix=f"names are such as {', '.join(names[:6])}",
            )
        pins |= dict.fromkeys(hits, pin[1])
    return pins


def pins_unfit(pinned: Mapping[str, int], ops: int, stages: int) -> HintError:
    """Return the error for pins that no cut of a chain of ops into stages satisfies."""
    names = ", ".join(f"{name} to {stage}" for name, stage in list(pinned.items())[:6])
    return HintError(
        f"parameters are pinned to stages, but no cut of {ops} ops into {stages} "
        f"stages in a row has them there: {names}",
        fix="pin them in the order in which the forward reads them",
    )


def _pin(hint: Entries) -> tuple[str, int] | None:
    """Return (axis, stage) of a line that pins to a stage; None for another line."""
    match_ = _PIN.fullmatch(hint) if isinstance(hint, str) else None
    return (match_[1], int(match_[2])) if match_ else None


@dataclass(frozen=True)
class Hint:
    """Holds a parsed hint on one tensor."""

    # Axes of each dim, major to minor.
    dims: tuple[Axes, ...]
    # Whether each dim is closed to further axes.
    closed: tuple[bool, ...]
    # Priority of each dim, lower numbers propagate first; None: the default of the
    # tensor's kind (``PRIORITY``).
    priorities: tuple[int | None, ...]
    # Axes, or parts of axes, that split no dim.
    whole: Axes = ()
    # Whether no axis passes between the tensor and its readers.
    barrier: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Return the entries of the hint as text, which ``read`` parses."""
        dims = zip(self.dims, self.closed, self.priorities, strict=True)
        entries = (
            ("+".join(axes) or "_" * shut)
            + "?" * (not shut)
            + (f" p{priority}" if priority is not None else "")
            for axes, shut, priority in dims
        )
        return (*entries, *(f"!{axis}" for axis in self.whole), *"|" * self.barrier)


def is_dim(entry: Any) -> bool:
    """Return whether an entry of a hint belongs to a dim, not to the whole tensor."""
    return not (isinstance(entry, str) and entry[:1] in ("!", "|"))


def read(hint: Entries, ndim: int, what: str) -> Hint:
    """Return the parsed hint on a tensor of ``ndim`` dims.

    Raises HintError on unreadable entries or more entries than dims.
    """
    if isinstance(hint, str):
        hint = Spec.parse(hint)
    if isinstance(hint, Spec):
        if hint.partial:
            raise HintError(f"{what}: a hint cannot be partial, got {hint}")
        hint = hint.dims
    dims = [_dim(entry, what) for entry in filter(is_dim, hint)]
    if len(dims) > ndim:
        raise HintError(
            f"{what}: {len(dims)} entries for a tensor of {ndim} dims",
            fix="give at most one entry per dim; dims left out are open",
        )
    dims += [((), False, None)] * (ndim - len(dims))
    axes, closed, priorities = zip(*dims, strict=True) if dims else ((), (), ())
    words = [str(entry) for entry in hint if not is_dim(entry)]
    for word in words:
        if word != "|" and not _WHOLE.fullmatch(word):
            raise HintError(f"{what}: cannot read entry {word!r}", fix=_WORDS)
    whole = [a for word in words if word != "|" for a in word[1:].split("+")]
    return Hint(axes, closed, priorities, tuple(whole), "|" in words)


# "!tp+dp", axes that split no dim, and "tp p2", an entry with its priority.
_WHOLE = re.compile(r"!\w+(?:\+\w+)*")
_PRIORITY = re.compile(r"(.*\S)\s+p(\d+)\s*")
_WORDS = 'write "!tp" for whole axes, "|" for a barrier, "tp p1" for a priority'


def _dim(entry: Any, what: str) -> tuple[Axes, bool, int | None]:
    """Return the entry of a dim as (axes, whether it is closed, priority)."""
    match_ = _PRIORITY.fullmatch(entry) if isinstance(entry, str) else None
    entry, priority = (match_[1], int(match_[2])) if match_ else (entry, None)
    if entry is None or entry in ("_", "", ()):
        if priority is not None:
            raise HintError(
                f"{what}: a dim that stays whole has no priority, got p{priority}",
                fix="leave out the priority, or open the dim with '?'",
            )
        return (), True, None
    if isinstance(entry, str):
        names = [name for name in entry.rstrip("?").split("+") if name]
        return tuple(map(full_name, names)), not entry.endswith("?"), priority
    if isinstance(entry, Iterable):
        names = list(entry)
        axes = tuple(full_name(n) for n in names if n != "?")
        return axes, "?" not in names, None
    raise HintError(f"{what}: cannot read entry {entry!r}")


def axes_of(hint: Entries, what: str) -> list[str]:
    """Return the axes, and parts of axes, that a hint splits over. Raises as
    ``read``."""
    if _pin(hint) is not None:
        return []
    hint = Spec.parse(hint) if isinstance(hint, str) else hint
    ndim = len(hint.dims) if isinstance(hint, Spec) else len(hint)
    return [axis for axes in read(hint, ndim, what).dims for axis in axes]


def check(hint: Hint, mesh: Mesh, what: str) -> None:
    """Raise HintError if axes, or parts of axes, are unknown, used twice or overlap."""
    all_axes = [axis for axes in hint.dims for axis in axes]
    try:
        for axis in (*all_axes, *hint.whole):
            mesh.axis_size(axis)
        Spec.of(hint.dims)
    except MeshError as error:
        raise HintError(f"{what}: {error.what}", fix=error.fix) from error
    except SpecError as error:
        fix = "an axis may split one dim of a tensor only"
        raise HintError(f"{what}: {error.what}", fix=fix) from error
    for axis in all_axes:
        if axis_of(axis) in hint.whole:
            raise HintError(
                f"{what}: axis {axis!r} splits a dim, and the tensor is to be whole "
                f"along it",
                fix=f"leave out {axis!r} or '!{axis_of(axis)}'",
            )


def check_chunks(
    dims: Sequence[Axes], shape: Sequence[int], mesh: Mesh, what: str
) -> None:
    """Raise HintError if a DTensor cannot have this layout: if axes do not divide a dim
    and are parts, have shares, or are in another order than in the mesh."""
    for d, axes in enumerate(dims):
        if not shard_sizes.is_in_chunks(shape[d], mesh, axes):
            raise HintError(
                f"{what}: dim {d} of size {shape[d]} does not divide over "
                f"{'+'.join(axes)} ({mesh.count(axes)} shards)",
                fix="hint a dim that they divide, or whole axes in the order of the "
                "mesh, without shares",
            )


def make_seed(
    program: Program, value: int, entry: Entries, mesh: Mesh, kind: str, what: str
) -> Seed:
    """Return the seed of one hint. Raises HintError, with the line that makes the
    value, if it does not fit."""
    shape = program.values[value].shape
    try:
        hint = read(entry, len(shape), what)
        check(hint, mesh, what)
    except HintError as error:
        producer = program.producers.get(value)
        line = user_line(program.ops[producer[0]].node) if producer else None
        raise HintError(error.what, where=line, fix=error.fix) from error
    dims = tuple(map(mesh.parts, hint.dims))
    # An axis of another name may move to another dim where that is cheaper.
    batch = kind == "input" and bool(dims) and any(map(is_batch_name, dims[0]))
    return Seed(
        value,
        dims,
        hint.closed,
        what,
        PRIORITY.get(kind, 0),
        batch,
        priorities=hint.priorities,
        whole=mesh.parts(hint.whole),
        barrier=hint.barrier,
    )


def match(program: Program, table: Mapping[str, Entries], mesh: Mesh) -> list[Seed]:
    """Return seeds of a table's patterns; a later matching line overrides an earlier
    one.

    Patterns match names of inputs, parameters, buffers, and of values in the graph.
    Raises HintError for a pattern without match, naming similar names.
    """
    seeds: dict[int, Seed] = {}
    values_by_name: dict[str, list[tuple[int, str]]] = {}
    for declared, value in program.tensor_inputs:
        if declared.kind != "tangent":
            values_by_name.setdefault(declared.name, []).append((value, declared.kind))
    inputs = set(program.inputs)
    for inner in program.values:
        if inner.index not in inputs:
            values_by_name.setdefault(inner.name, []).append((inner.index, "value"))
    for pattern, hint in spec_hints(table).items():
        hits = [name for name in values_by_name if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            raise HintError(
                f"hint {pattern!r} matches no parameter, buffer or input",
                fix=f"names are such as {', '.join(list(values_by_name)[:6])}",
            )
        for name in hits:
            for value, kind in values_by_name[name]:
                what = f"hint {pattern!r} on {name}"
                seeds[value] = make_seed(program, value, hint, mesh, kind, what)
    return list(seeds.values())
