"""Makes a program of nodes of a bound graph.

In: nodes of a graph after ``order_collectives``, in order, and which of them others
read. Out: an ``Outline``: the program, and its arguments: nodes, numbers, the name of
the group. Values that differ between ranks or between identical layers become numbers
or are left out: where a slice of random numbers begins, which seed, devices, the
group. Never changes the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.fusion.kernels.region_program import (
    GroupName,
    Number,
    Ref,
    RegionProgram,
    Statement,
    Tensor,
    contiguous,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
prims = torch.ops.prims

# Passed on to an op when a program runs, or of no consequence in it.
_LEFT_OUT = frozenset({"device", "layout", "pin_memory"})

# A gather on CPU, as ``order_collectives.give_outputs`` leaves it, is a plain one
# again.
_OWN_GATHER = "fxpar.all_gather_into_tensor.default"
_OWN_WAIT = "fxpar.wait_gather.default"
_INSTEAD = {
    _OWN_GATHER: "_c10d_functional.all_gather_into_tensor.default",
    _OWN_WAIT: "_c10d_functional.wait_tensor.default",
}


@dataclass(frozen=True)
class Outline:
    """Holds a region's program, and the nodes of the graph that it replaces."""

    program: RegionProgram  # its values have names of their own
    inputs: tuple[fx.Node, ...]  # nodes, in the program's order
    outputs: tuple[fx.Node, ...]  # nodes, in the program's order
    numbers: tuple[int, ...]  # the integers that the program takes
    group: str  # the name of its process group, or ""
    names: Mapping[str, fx.Node]  # nodes by the names of their lines


def op_name(node: fx.Node) -> str:
    """Return a name such as ``aten.mul.Tensor``; "getitem" for a result of several."""
    if isinstance(node.target, _torch.inductor.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def outline(
    members: Sequence[fx.Node],
    outputs: Collection[fx.Node],
    ranks_of: Callable[[str], int],
) -> Outline:
    """Return the program of ``members``, of which ``outputs`` are read by others.
    ``ranks_of``: returns the size of a group."""
    return _Outliner(set(members)).outline(members, outputs, ranks_of)


@dataclass
class _Outliner:
    members: set[fx.Node]  # nodes of the region
    name_of: dict[fx.Node, str] = field(default_factory=dict)  # names of values so far
    inputs: dict[fx.Node, Tensor] = field(default_factory=dict)  # by node outside
    lines: list[Statement] = field(default_factory=list)  # lines so far
    numbers: list[int] = field(default_factory=list)  # that the program takes
    group: str = ""  # the process group that it communicates in
    counts: dict[str, int] = field(default_factory=dict)  # how often a name was given
    names: dict[str, fx.Node] = field(default_factory=dict)  # by names of lines

    def outline(
        self,
        members: Sequence[fx.Node],
        outputs: Collection[fx.Node],
        ranks_of: Callable[[str], int],
    ) -> Outline:
        for node in members:
            self._line(node)
        ordered = [n for n in members if n in outputs]
        results = tuple(
            _dense(tensor_of(self.name_of[n], n.meta["val"])) for n in ordered
        )
        program = RegionProgram(
            tuple(self.inputs.values()),
            tuple(self.lines),
            results,
            len(self.numbers),
            ranks_of(self.group) if self.group else 1,
        )
        return Outline(
            program,
            tuple(self.inputs),
            tuple(ordered),
            tuple(self.numbers),
            self.group,
            self.names,
        )

    def _line(self, node: fx.Node) -> None:
        op = op_name(node)
        args, kwargs = _RECAST.get(op, _as_it_is)(node, self._number)
        in_group = op.startswith("_c10d_functional.") and isinstance(args[-1], str)
        if in_group or op == _OWN_GATHER:
            self.group, args = args[-1], (*args[:-1], GroupName())
        pairs = tuple(
            (k, self._argument(v)) for k, v in kwargs.items() if k not in _LEFT_OUT
        )
        encoded = tuple(self._argument(a) for a in args)
        op = {"prims.inductor_random.default": "fxpar.random.default"}.get(op, op)
        op = _INSTEAD.get(op, op)
        result = node.args[0] if op_name(node) == _OWN_WAIT else node
        assert isinstance(result, fx.Node)
        value = result.meta["val"]
        name = self._name(op)
        tensor = value if isinstance(value, torch.Tensor) else None
        shape = tuple(map(int, tensor.shape)) if tensor is not None else ()
        dtype = _text(tensor.dtype) if tensor is not None else "tuple"
        self.lines.append(Statement(name, op, encoded, pairs, shape, dtype))
        self.name_of[result] = name
        self.names[name] = result

    def _name(self, op: str) -> str:
        word = op.split(".")[1] if "." in op else op
        word = word.strip("_")
        count = self.counts[word] = self.counts.get(word, -1) + 1
        return f"{word}_{count}" if count else word

    def _number(self, x: int) -> Number:
        self.numbers.append(int(x))
        return Number(len(self.numbers) - 1)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            if x not in self.name_of:
                name = f"in{len(self.inputs)}"
                self.inputs[x] = tensor_of(name, x.meta["val"])
                self.name_of[x] = name
            return Ref(self.name_of[x])
        if isinstance(x, (tuple, list)):
            return tuple(self._argument(part) for part in x)
        return x


def tensor_of(name: str, value: torch.Tensor) -> Tensor:
    """Return a fake tensor as data."""
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return Tensor(name, shape, stride, _text(value.dtype))


def _dense(t: Tensor) -> Tensor:
    """Return an output with memory for every element."""
    is_expanded = any(n > 1 and not s for n, s in zip(t.shape, t.stride, strict=True))
    return dataclasses.replace(t, stride=contiguous(t.shape)) if is_expanded else t


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Recast = Callable[[fx.Node, Callable[[int], Number]], tuple[tuple[Any, ...], Any]]


def _as_it_is(node: fx.Node, number: Any) -> tuple[tuple[Any, ...], Any]:
    return node.args, node.kwargs


def _draw(node: fx.Node, number: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments with numbers for the begin of the slice, which differs
    between ranks."""
    size, seed, mode, whole, offset = node.args
    return (size, seed, mode, whole, [number(x) for x in offset]), {}


def _draw_whole(node: fx.Node, number: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of our op for Inductor's own, which compiled draws the
    same."""
    size, seed, mode = node.args
    return (size, seed, mode, size, [0] * len(size)), {}


def _seed(node: fx.Node, number: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments with a number for the seed's index, which differs between
    layers."""
    seeds, index = node.args
    return (seeds, number(index)), {}


_RECAST: dict[str, Recast] = {
    "fxpar.random.default": _draw,
    "prims.inductor_random.default": _draw_whole,
    "prims.inductor_lookup_seed.default": _seed,
}
