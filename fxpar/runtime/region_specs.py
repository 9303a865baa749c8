"""Read the specs of manual regions as their user gives them, and check that they fit.

In: the arguments of ``shard_map``. Out: entries, made of tuples and text alone, which
Dynamo traces; an error is text too, and raised by whoever reads it. Never: an
exception.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar.sharding.spec import Spec

Entry = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]


def entries_of(specs: Any, name: str) -> tuple[Entry | None | str, ...]:
    """Return entries as (axes per dim, partial axes), or text on what is wrong."""
    if specs is None or isinstance(specs, (Spec, str)):
        specs = (specs,)
    return tuple(_entry(spec, f"{name}[{i}]") for i, spec in enumerate(specs))


def _entry(spec: Any, name: str) -> Entry | None | str:
    """Return the entry of one spec, or text that says what is wrong with it."""
    if spec is None:
        return None
    if isinstance(spec, Spec):
        return spec.dims, spec.partial
    if isinstance(spec, str) or not isinstance(spec, (tuple, list)):
        return f"{name} is {spec!r}: a spec is a tuple of axes per dim, or None"
    dims: list[tuple[str, ...]] = []
    for axes in spec:
        if axes is None:
            dims.append(())
        elif isinstance(axes, str):
            dims.append((axes,))
        else:
            dims.append(tuple(axes))
    return tuple(dims), ()


def misfit(
    entries: tuple[Entry | None | str, ...],
    tensors: list[torch.Tensor],
    sizes: dict[str, int],
    name: str,
) -> tuple[str, str]:
    """Return what is wrong with specs, and what to do about it; both "" if they fit."""
    what = "arguments" if name == "in_specs" else "results"
    if len(entries) != len(tensors):
        wrong = f"{name} has {len(entries)} entries for {len(tensors)} tensor {what}"
        return wrong, "give one spec per tensor; None is whole"
    for i, entry in enumerate(entries):
        if entry is None:
            continue
        if isinstance(entry, str):
            return entry, 'write ("dp", None, "tp"), Spec(...) or None for each tensor'
        dims, partial = entry
        shape = tensors[i].shape
        if len(dims) > len(shape):
            wrong = f"{name}[{i}] has {len(dims)} dims, its tensor {list(shape)}"
            return wrong, "give at most one entry per dim"
        used = [axis for split in dims for axis in split] + [a for a, _ in partial]
        for axis in used:
            if used.count(axis) > 1:
                return f"{name}[{i}] uses axis {axis!r} twice", "name it once"
            if sizes and axis not in sizes:
                wrong = (
                    f"{name}[{i}] names axis {axis!r}, which is none of the region's"
                )
                return wrong, f"name one of them: {', '.join(sizes)}"
        if partial and name == "in_specs":
            wrong = f"{name}[{i}] is partial: no rank's summand is given"
            return wrong, "let it enter whole, or split"
        for d, split in enumerate(dims if sizes and name == "in_specs" else ()):
            count = 1
            for axis in split:
                count *= sizes[axis]
            if shape[d] % count:
                wrong = (
                    f"{name}[{i}]: dim {d} of size {shape[d]} does not divide over "
                    f"{'+'.join(split)} ({count} ranks)"
                )
                return wrong, "pad it outside, or leave the dim whole"
    return "", ""


def spelled(entry: Any, ndim: int) -> tuple[list[Any], str]:
    """Return the axes of every dim, and the spec as text."""
    split, partial = entry if entry is not None else ((), ())
    dims = [*split, *[()] * (ndim - len(split))]
    text = "[" + ", ".join(["+".join(axes) or "_" for axes in dims]) + "]"
    if partial:
        clauses = ", ".join([f"{op}: {axis}" for axis, op in partial])
        text += f" partial({clauses})"
    return dims, text


def hint_of(dims: list[Any]) -> str:
    """Return axes per dim as the text of a hint, each dim open to more axes."""
    return ",".join(["+".join(axes) + "?" for axes in dims])
