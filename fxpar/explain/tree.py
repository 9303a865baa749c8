"""Arrange the ops of a plan as a tree of modules, identical layers folded into one.

In: per row the module it belongs to (``forward/layers.0.mlp``, as ``NodePlan.module``)
and a key, equal for rows that do the same. Out: nested ``ModuleGroup``s of row numbers,
each row in exactly one of them, at every level in the order of the program. Never: a
plan read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class ModuleGroup:
    """Is a module, or, where ``is_repeated`` is set, neighbouring layers that do the
    same."""

    label: str  # the module's name; for several the first and the last
    items: tuple[ModuleGroup | int, ...]  # groups and rows within, in order
    is_repeated: bool = False  # items are neighbouring layers that do the same


def tree(
    modules: Sequence[str | None], keys: Sequence[Hashable]
) -> list[ModuleGroup | int]:
    """Return the rows by phase and module. Rows without a module are at the top."""
    paths = []
    for i, module in enumerate(modules):
        phase, _, path = (module or "").partition("/")
        paths.append(([phase, *path.split(".")] if path else [phase] * bool(phase), i))
    numbers: dict[Hashable, int] = {}
    return _fold(_nest(paths), keys, numbers)[0]


def _nest(paths: Sequence[tuple[list[str], int]]) -> list[ModuleGroup | int]:
    """Return groups at their first row. Lists of layers are replaced by the layers."""
    members: dict[str, list[tuple[list[str], int]]] = {}
    order: list[str | int] = []
    for path, i in paths:
        if not path:
            order.append(i)
        elif path[0] not in members:
            order.append(path[0])
        if path:
            members.setdefault(path[0], []).append((path[1:], i))
    out: list[ModuleGroup | int] = []
    for item in order:
        out += [item] if isinstance(item, int) else _named(item, _nest(members[item]))
    return out


def _named(label: str, items: list[ModuleGroup | int]) -> list[ModuleGroup | int]:
    """Return a module's group, or its layers with the module's name in front."""
    groups = [item for item in items if isinstance(item, ModuleGroup)]
    if len(groups) == len(items) and all(g.label[0].isdigit() for g in groups):
        return [replace(g, label=f"{label}.{g.label}") for g in groups]
    if len(items) == 1 and groups:
        return [replace(groups[0], label=f"{label}.{groups[0].label}")]
    return [ModuleGroup(label, tuple(items))]


def _fold(
    items: Sequence[ModuleGroup | int],
    keys: Sequence[Hashable],
    numbers: dict[Hashable, int],
) -> tuple[list[ModuleGroup | int], list[int]]:
    """Return the items, runs of identical layers folded; and a number per item given,
    equal for those that do the same."""
    folded: list[ModuleGroup | int] = []
    same: list[int] = []
    for item in items:
        key: Hashable
        if isinstance(item, int):
            key = ("row", keys[item])
        else:
            inner, inside = _fold(item.items, keys, numbers)
            item = replace(item, items=tuple(inner))
            key = ("group", _stem(item.label), tuple(inside))
        folded.append(item)
        same.append(numbers.setdefault(key, len(numbers)))
    return list(_runs(folded, same)), same


def _runs(
    items: Sequence[ModuleGroup | int], same: Sequence[int]
) -> Iterator[ModuleGroup | int]:
    """Yield the items; neighbouring layers that do the same become one group."""
    pairs = zip(items, same, strict=True)
    for _, run in groupby(pairs, lambda pair: pair[1]):
        members = [item for item, _ in run]
        first, last = members[0], members[-1]
        # Neighbours of one stem differ by a number.
        if (
            isinstance(first, ModuleGroup)
            and isinstance(last, ModuleGroup)
            and len(members) > 1
        ):
            yield ModuleGroup(
                f"{first.label} … {last.label}", tuple(members), is_repeated=True
            )
        else:
            yield from members


def _stem(label: str) -> str:
    """Return a label without its numbers, by which equal layers differ."""
    return ".".join("#" if part.isdigit() else part for part in label.split("."))
