"""Runs a program op by op: the reference for generated kernels, and the way without
them.

In: a program, its input tensors, numbers, and the name of the process group. Out: new
tensors, in the strides that the program says, or the tensors they are written to. Never
changes any other input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fxpar import _torch
from fxpar.fusion.kernels.region_program import (
    GroupName,
    Number,
    Ref,
    RegionProgram,
    replaced,
)
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
from fxpar.passes.normalize import random as _random  # noqa: F401
from fxpar.sharding.op_facts import stated_facts


def run(
    program: RegionProgram,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int] = (),
    group: str = "",
    into: Mapping[int, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the program's outputs; those that ``into`` names are written there."""
    device = device_of(inputs)
    values: dict[str, Any] = dict(
        zip((t.name for t in program.inputs), inputs, strict=True)
    )

    def operand(x: Ref | Number | GroupName) -> Any:
        if isinstance(x, Ref):
            return values[x.name]
        return numbers[x.index] if isinstance(x, Number) else group

    for line, unread in zip(program.lines, last_read(program), strict=True):
        kwargs = {k: replaced(v, operand) for k, v in line.kwargs}
        if stated_facts(line.op).get("constant"):  # made of no operand
            kwargs["device"] = device
        values[line.name] = op_of(line.op)(*replaced(line.args, operand), **kwargs)
        for name in unread:
            del values[name]
    return results(program, values, inputs, into or {})


def results(
    program: RegionProgram,
    values: Mapping[str, torch.Tensor],
    inputs: Iterable[torch.Tensor],
    into: Mapping[int, torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs, among values by name: in memory of their own, or written to
    ``into``. All values are read before any is written."""
    input_storages = {x.untyped_storage().data_ptr() for x in inputs}
    owned = set(input_storages)
    outputs = [
        into[i] if i in into else own(values[t.name], t.stride, owned)
        for i, t in enumerate(program.outputs)
    ]
    written = {i: values[program.outputs[i].name] for i in into}
    for i, value in written.items():
        if value.untyped_storage().data_ptr() in input_storages:
            written[i] = value.clone()  # it may be stored where another goes
    for i, value in written.items():
        if value is not into[i]:
            into[i].copy_(value)
    return outputs


@cache
def last_read(program: RegionProgram) -> tuple[tuple[str, ...], ...]:
    """Return, for each line, the values that no later line reads: they need not be
    kept."""
    read_later = {t.name for t in program.outputs}
    out = []
    for line in reversed(program.lines):
        names = {name for name in (line.name, *line.refs) if name not in read_later}
        read_later |= names
        out.append(tuple(sorted(names)))
    return tuple(reversed(out))


_CPU = torch.device("cpu")


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of most tensors: numbers on the CPU may occur next to tensors
    elsewhere."""
    for x in tensors:
        if not x.is_cpu:
            return x.device
    return _CPU


def own(x: torch.Tensor, stride: Sequence[int], owned: set[int]) -> torch.Tensor:
    """Return ``x`` in memory of its own, which is added to ``owned``, and in these
    strides."""
    place = x.untyped_storage().data_ptr()
    if tuple(x.stride()) != tuple(stride) or (place in owned and x.numel()):
        copy = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)
        x = copy.copy_(x)
    owned.add(x.untyped_storage().data_ptr())
    return x


# Ops that do not run by their own kernels: a gather on CPU runs as
# ``give_outputs`` makes it.
_INSTEAD: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "prims.inductor_lookup_seed.default": lambda seeds, index: seeds[index],
    "_c10d_functional.all_gather_into_tensor.default": lambda x, count, group: _gather(
        x, count, group
    ),
}


def _gather(x: torch.Tensor, count: int, group: str) -> torch.Tensor:
    ours, c10d = torch.ops.fxpar, torch.ops._c10d_functional
    if x.device.type == "cpu" and not x.is_complex():
        return ours.all_gather_into_tensor(x, count, group)
    return c10d.all_gather_into_tensor(x, count, group)


@cache
def op_of(name: str) -> Callable[..., Any]:
    """Return the function that runs an op of a line."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name.startswith("prims."):
        _torch.inductor.inductor_prim("seeds")  # Inductor registers some of them
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part)
    return op
