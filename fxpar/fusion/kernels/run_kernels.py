"""Runs a program op by op, or by its generated kernels with its collectives between
them.

In: a program, tensors, numbers, the name of the process group. Out: new tensors in the
strides that the program says, or the tensors that outputs are written to. Op by op
(``interpret``) is the reference for generated kernels, and the way without them. Else
each part between collectives is one kernel, compiled once per process; its source is
kept as a file next to Inductor's caches, where a debugger finds it. Collectives run as
functional ops. On CPU kernels run in Triton's interpreter if TRITON_INTERPRET is set
(it is read when Triton is first imported), else the program is interpreted op by op; so
is a part that no kernel can have. That choice depends on shapes, dtypes and the device
alone, so that it never differs between ranks. Never changes any other input.
"""

from __future__ import annotations

import contextlib
import linecache
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from fxpar import _torch, cache_files
from fxpar.errors import FxparError
from fxpar.fusion.kernels.emit import Kernel, kernel_of
from fxpar.fusion.kernels.region_program import (
    CannotEmit,
    CollectiveStep,
    GroupName,
    Number,
    Ref,
    RegionProgram,
    Tensor,
    contiguous,
    dtype_of,
    op_named,
    replaced,
    stages_of,
)
from fxpar.graph.custom_ops import all_gather
from fxpar.passes.normalize import random as _random  # noqa: F401
from fxpar.sharding.op_facts import op_facts_of
from fxpar.units import digest


def interpret(
    program: RegionProgram,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int] = (),
    group: str = "",
    into: Mapping[int, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the program's outputs; those that ``into`` names are written there."""
    device = device_of(inputs)
    values: dict[str, Any] = by_input(program, inputs)

    def operand(x: Ref | Number | GroupName) -> Any:
        if isinstance(x, Ref):
            return values[x.name]
        return numbers[x.index] if isinstance(x, Number) else group

    for line, unread in zip(program.lines, last_read(program), strict=True):
        kwargs = {k: replaced(v, operand) for k, v in line.kwargs}
        op = op_of(line.op)
        if op_facts_of(op).constant:  # made of no operand
            kwargs["device"] = device
        values[line.name] = op(*replaced(line.args, operand), **kwargs)
        for name in unread:
            del values[name]
    return results(program, values, inputs, into or {})


def by_input(
    program: RegionProgram, values: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the values of a program's inputs, by name."""
    return {t.name: x for t, x in zip(program.inputs, values, strict=True)}


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


# Ops that do not run by their own kernels.
_INSTEAD: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "prims.inductor_lookup_seed.default": lambda seeds, index: seeds[index],
    "_c10d_functional.all_gather_into_tensor.default": all_gather,
}


@cache
def op_of(name: str) -> Callable[..., Any]:
    """Return the function that runs an op of a line."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name.startswith("prims."):
        _torch.inductor.inductor_prim("seeds")  # Inductor registers some of them
    return op_named(name)


ALIGNED = 16  # bytes of the widest load


def run(
    program: RegionProgram,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int] = (),
    group: str = "",
    into: Mapping[int, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the program's outputs, as ``interpret`` does. Raises FxparError where
    Triton or the device takes no kernel."""
    device, into = device_of(inputs), into or {}
    if not has_kernels(device):
        return interpret(program, inputs, numbers, group, into)
    values = by_input(program, inputs)
    alone = alone_of(program, inputs, device)
    steps = stages_of(program)
    parts = [i for i, step in enumerate(steps) if isinstance(step, RegionProgram)]
    targets = {program.outputs[i].name: x for i, x in into.items()}
    for i, step in enumerate(steps):
        if isinstance(step, CollectiveStep):
            values[step.result] = move(step, values[step.operand], group)
            continue
        kernel = compiled(step, device.type, alone)
        if kernel is None:
            operands = [values[t.name] for t in step.inputs]
            outputs = interpret(step, operands, numbers)
            values |= {t.name: x for t, x in zip(step.outputs, outputs, strict=True)}
            continue
        # A later part could read what an earlier one overwrites.
        into_here = targets if i == parts[-1] else {}
        arguments, writes = arguments_of(kernel, values, numbers, device, into_here)
        call(kernel, arguments, program)
        values |= by_name(kernel, writes)
    return results(program, values, inputs, into)


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether generated kernels run on a device, here: on CPU if Triton was
    imported as an interpreter, of whose kind its own functions are then, too."""
    if device.type == "cuda":
        return True
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    import triton.language as tl

    return type(tl.rand).__name__ == "InterpretedFunction"


def alone_of(
    program: RegionProgram, inputs: Sequence[torch.Tensor], device: torch.device
) -> frozenset[str]:
    """Return the inputs that are numbers on the CPU, while kernels run elsewhere: they
    are given as floats, since copies would wait for the device."""
    if device == _CPU or not any(x.is_cpu for x in inputs):
        return frozenset()
    return frozenset(
        t.name
        for t, x in zip(program.inputs, inputs, strict=True)
        if x.is_cpu and not t.shape and dtype_of(t.dtype).is_floating_point
    )


def move(step: CollectiveStep, operand: torch.Tensor, group: str) -> torch.Tensor:
    """Return the result of a collective, waited for."""
    args = replaced(step.line.args[1:], lambda _: group)
    result = op_of(step.line.op)(operand.contiguous(), *args)
    return torch.ops._c10d_functional.wait_tensor(result)


def arguments_of(
    kernel: Kernel,
    values: Mapping[str, torch.Tensor],
    numbers: Sequence[int],
    device: torch.device,
    targets: Mapping[str, torch.Tensor],
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return the arguments of a kernel, and those of them that it writes: ``targets``
    where that is safe, else new memory."""
    reads = [as_read(values[t.name], t, device) for t in kernel.reads]
    writes = places(kernel, reads, targets, device)
    alone = (values[name].item() for name in kernel.alone)
    return (*reads, *writes, *alone, *(numbers[i] for i in kernel.numbers)), writes


def by_name(kernel: Kernel, writes: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the results of a kernel, by name, with parts of sums added up."""
    sums = kernel.sums
    return {
        t.name: summed(x, t) if t.name in sums else x
        for t, x in zip(kernel.writes, writes, strict=True)
    }


def parts_of(kernel: Kernel, writes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a kernel writes which are parts of sums."""
    pairs = zip(kernel.writes, writes, strict=True)
    return [x for t, x in pairs if t.name in kernel.sums]


# The user's line of a region, by its hash, where this process compiled it.
LINES: dict[str, str | None] = {}


def call(
    kernel: Kernel, arguments: Sequence[Any], region: RegionProgram | None, **how: Any
) -> None:
    """Launch a kernel on the current stream. Raises FxparError, naming the region,
    where Triton does not compile it or the device does not take it."""
    try:
        function_of(kernel)[(kernel.programs,)](
            *arguments, PROGRAMS=kernel.programs, num_warps=kernel.warps, **how
        )
    except Exception as error:  # of Triton and of the device, in many forms
        title = region.title if region else kernel.name
        first = next(iter(str(error).strip().splitlines()), "")
        raise FxparError(
            f"the generated kernel {kernel.name} of {title} did not run: "
            f"{type(error).__name__}: {first}",
            where=LINES.get(region.hash) if region else None,
            fix='compile with options={"fuse": "none"}, and report the kernel: its '
            f"source is in {cache_files.folder() / 'kernels'}",
        ) from error


@cache
def compiled(
    program: RegionProgram, device: str, alone: frozenset[str] = frozenset()
) -> Kernel | None:
    """Return the kernel of a part on a kind of device; None if there can be none.
    ``alone``: inputs that are given as numbers."""
    try:
        return kernel_of(program, random=random_of(device), alone=alone)
    except CannotEmit:
        return None


def random_of(device: str) -> str:
    """Return the name of the generator from which compiled code draws on a kind of
    device."""
    if device == "cpu":
        return "cpp"
    return f"triton_{_torch.inductor.triton_random_lanes()}"


def as_read(x: torch.Tensor, t: Tensor, device: torch.device) -> torch.Tensor:
    """Return ``x`` on the kernel's device, in the strides that the kernel was made for,
    and at a multiple of 16 bytes: else Triton makes other code, and all ranks must run
    the same."""
    if x.device != device:
        x = x.to(device)
    if (x.stride() != t.stride or x.data_ptr() % ALIGNED) and x.numel() > 1:
        return torch.empty_strided(
            t.shape, t.stride, dtype=x.dtype, device=device
        ).copy_(x)
    return x


def places(
    kernel: Kernel,
    reads: Sequence[torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    device: torch.device,
) -> list[torch.Tensor]:
    """Return memory for the results of a kernel: their targets, where a kernel can
    write there."""
    return [
        targets[t.name]
        if t.name in targets and fits(kernel, reads, t, targets[t.name])
        else place(kernel, t, device)
        for t in kernel.writes
    ]


def fits(
    kernel: Kernel, reads: Sequence[torch.Tensor], t: Tensor, target: torch.Tensor
) -> bool:
    """Return whether a kernel can write an output over ``target``: it reads each
    element there only for the same element of the output, in the loop that writes
    it."""
    loop = kernel.loops.get(t.name)
    if loop is None or target.stride() != t.stride or t.name in kernel.sums:
        return False
    if target.data_ptr() % ALIGNED:
        return False
    memory = target.untyped_storage().data_ptr()
    return all(
        kernel.loops.get(read.name) == loop
        and (x.data_ptr(), x.stride(), x.dtype)
        == (target.data_ptr(), target.stride(), target.dtype)
        for read, x in zip(kernel.reads, reads, strict=True)
        if x.untyped_storage().data_ptr() == memory
    )


def place(kernel: Kernel, t: Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for an output, or for the parts of one."""
    if t.name in kernel.sums:
        return empty((kernel.programs, t.count), (t.count, 1), torch.float32, device)
    return empty(t.shape, t.stride, dtype_of(t.dtype), device)


def empty(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return memory for a kernel to write; tests put NaNs there."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def summed(parts: torch.Tensor, t: Tensor) -> torch.Tensor:
    """Return an output, given the parts that programs wrote of it."""
    total = parts.sum(0).to(dtype_of(t.dtype)).view(t.shape)
    if t.stride == contiguous(t.shape):
        return total
    return empty(t.shape, t.stride, total.dtype, total.device).copy_(total)


def function_of(kernel: Kernel) -> Any:
    """Return the kernel as a function of Triton."""
    return getattr(module_of(kernel.name, kernel.text), kernel.name)


@cache
def module_of(name: str, text: str) -> Any:
    """Return a source text as a module. Its file is written and not read, since it may
    have changed: Triton finds the source of a function in ``linecache``."""
    path = cache_files.folder() / "kernels" / f"{name}_{digest(text)}.py"
    with contextlib.suppress(OSError):
        cache_files.write_file(path, text)
    module = ModuleType(f"fxpar_kernels.{path.stem}")
    module.__file__ = file = str(path)
    lines = text.splitlines(keepends=True)
    linecache.cache[file] = (len(text), None, lines, file)  # None: it is never checked
    exec(compile(text, file, "exec"), module.__dict__)
    return module
