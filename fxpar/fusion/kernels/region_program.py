"""Represents a region of a graph as a program: plain data that is printed, kept, hashed
and run.

A program has inputs, lines (one op each, in order) and outputs; of the process group
(an argument when it runs) it holds only the number of ranks. Names are made from ops,
so equal regions of different layers are one program with one hash. What differs between
ranks or identical layers (where a slice of random numbers begins, which seed) becomes a
number that is given when it runs, or is left out (devices, the group). In: text, or
nodes of a graph after ``order_collectives`` in order, and which of them others read.
Out: text, a hash; an ``Outline``: a program and its arguments. Never changes the graph
and runs nothing (``run_kernels`` does).

A program is split at its collectives, for several kernels or for one: into steps in
order (``stages_of``), programs without collectives and collectives
(``CollectiveStep``), which pass values on by name; or into a ``SplitProgram``, from
which one kernel is made. Lines that do not depend on a collective and are not needed
for one run as late as they can, together with their readers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.units import digest

FORMAT = "fxpar region 1"


class CannotEmit(Exception):
    """Says that kernels of one space cannot have a line: ``line``, ``why``."""

    def __init__(self, line: str, why: str) -> None:
        super().__init__(f"{line}: {why}")
        self.line, self.why = line, why


@dataclass(frozen=True)
class Ref:
    """Refers to a value of the program, as an argument of a line."""

    name: str  # name of an input, or of the line that makes it


@dataclass(frozen=True)
class Number:
    """Is an integer given when the program runs, as an argument of a line."""

    index: int  # among those that the program is given


@dataclass(frozen=True)
class GroupName:
    """Stands for the name of the process group, as an argument of a line."""


class _Shaped:
    """Is a value of known shape and dtype."""

    shape: tuple[int, ...]
    dtype: str  # as text ("float32")

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.count * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Tensor(_Shaped):
    """Describes an input or an output."""

    name: str  # for an output, the name of a line
    shape: tuple[int, ...]  # in elements
    stride: tuple[int, ...]  # in elements
    dtype: str  # as text ("float32")


@dataclass(frozen=True)
class Statement(_Shaped):
    """Is one op: ``name = op(*args, **kwargs)``."""

    name: str  # name of its result
    # "aten.mul.Tensor", or "getitem" of an op with several results, which has the dtype
    # "tuple".
    op: str
    args: tuple[Any, ...]  # names are ``Ref``s
    kwargs: tuple[tuple[str, Any], ...]  # (name, argument); as ``args``
    shape: tuple[int, ...]  # shape of the result
    dtype: str  # dtype of the result, without ``torch.``

    @property
    def refs(self) -> tuple[str, ...]:
        """Return the names of the values it reads, in order."""
        return tuple(refs_in((self.args, self.kwargs)))


@dataclass(frozen=True)
class RegionProgram:
    """Is a region as text of its ops, for which a kernel is written."""

    inputs: tuple[Tensor, ...]  # input tensors, in order
    lines: tuple[Statement, ...]  # in order
    outputs: tuple[Tensor, ...]  # results of its lines, in order
    numbers: int = 0  # number of integers it takes
    ranks: int = 1  # members of its group, 1 if nothing is communicated

    @cached_property
    def text(self) -> str:
        """Return the program as JSON, which ``parse`` reads."""
        return json.dumps(
            {
                "format": FORMAT,
                "ranks": self.ranks,
                "numbers": self.numbers,
                "inputs": list(map(_row, self.inputs)),
                "lines": list(map(_row, self.lines)),
                "outputs": list(map(_row, self.outputs)),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @cached_property
    def hash(self) -> str:
        """Return a digest of the content."""
        return digest(self.text)

    def __hash__(self) -> int:
        # Programs are keys of caches asked at every call: once is enough.
        return hash(self.hash)

    @staticmethod
    def parse(text: str) -> RegionProgram:
        """Return the program of a text: inverse of ``text``. Raises ValueError if it is
        none."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("not the text of a region's program")
        inputs, outputs = (
            tuple(Tensor(*map(_decoded, row)) for row in data[key])
            for key in ("inputs", "outputs")
        )
        lines = tuple(Statement(*map(_decoded, row)) for row in data["lines"])
        return RegionProgram(inputs, lines, outputs, data["numbers"], data["ranks"])

    @cached_property
    def title(self) -> str:
        """Return the name of the region in a profile: its first ops and its hash."""
        words = [line.op.split(".")[1] for line in self.lines if "." in line.op]
        ops = dict.fromkeys(w for w in words if w not in _UNTOLD)
        return f"fxpar::region {' '.join(list(ops)[:6])} {self.hash}"

    @cached_property
    def values(self) -> Mapping[str, Tensor | Statement]:
        """Return inputs and lines by name."""
        inputs: dict[str, Tensor | Statement] = {t.name: t for t in self.inputs}
        return inputs | {line.name: line for line in self.lines}

    def __str__(self) -> str:
        lines = [f"region {self.hash} of {self.ranks} ranks"]
        lines += [f"{t.name}: {short(t)} = input {t.stride}" for t in self.inputs]
        for line in self.lines:
            args = [_text_of(a) for a in line.args]
            args += [f"{k}={_text_of(v)}" for k, v in line.kwargs]
            lines.append(f"{line.name}: {short(line)} = {line.op}({', '.join(args)})")
        return "\n".join([*lines, f"return {', '.join(t.name for t in self.outputs)}"])


# Ops that say nothing in a title.
_UNTOLD = frozenset({"wait_tensor", "view", "reshape", "expand", "full"})

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def short(value: Tensor | Statement) -> str:
    """Return dtype and shape, as in ``f32[8, 64]``."""
    word = value.dtype.rstrip("0123456789")
    dtype = _SHORT.get(word, word) + value.dtype[len(word) :]
    return f"{dtype}{list(value.shape)}"


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype of a name without "torch."."""
    dtype = getattr(torch, text)
    assert isinstance(dtype, torch.dtype)
    return dtype


def op_named(name: str) -> Callable[..., Any]:
    """Return the op of a name such as "aten.mul.Tensor"."""
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part)
    return op


def refs_in(x: Any) -> list[str]:
    """Return the names of the values in (nested) arguments."""
    if isinstance(x, Ref):
        return [x.name]
    if isinstance(x, (tuple, list)):
        return [name for part in x for name in refs_in(part)]
    return []


def replaced(x: Any, fn: Any) -> Any:
    """Return arguments with ``fn(x)`` in place of every Ref, Number and GroupName
    ``x``."""
    if isinstance(x, (Ref, Number, GroupName)):
        return fn(x)
    if isinstance(x, (tuple, list)):
        return tuple(replaced(part, fn) for part in x)
    return x


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that is stored row by row."""
    return torch.empty(shape, device="meta").stride()


def _text_of(x: Any) -> str:
    if isinstance(x, Ref):
        return x.name
    if isinstance(x, Number):
        return f"n{x.index}"
    if isinstance(x, GroupName):
        return "group"
    if isinstance(x, tuple):
        return f"[{', '.join(map(_text_of, x))}]"
    return str(x).removeprefix("torch.")


def _row(x: Tensor | Statement) -> list[Any]:
    """Return the fields of a record as JSON has them."""
    return [_encoded(getattr(x, f.name)) for f in dataclasses.fields(x)]


def _encoded(x: Any) -> Any:
    """Return data of a program as JSON has it: what JSON lacks is {its kind: it}."""
    if isinstance(x, Ref):
        return {"value": x.name}
    if isinstance(x, Number):
        return {"number": x.index}
    if isinstance(x, GroupName):
        return {"group": True}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, torch.memory_format):
        return {"layout": str(x).removeprefix("torch.")}
    if isinstance(x, (tuple, list)):
        return [_encoded(part) for part in x]
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": str(x)}
    assert x is None or isinstance(x, (bool, int, float, str)), x
    return x


def _decoded(x: Any) -> Any:
    """Return the data of ``_encoded``."""
    if isinstance(x, list):
        return tuple(map(_decoded, x))
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    return _KINDS[kind](value)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "value": Ref,
    "number": Number,
    "group": lambda _: GroupName(),
    "dtype": dtype_of,
    "layout": lambda name: getattr(torch, name),
    "float": float,
}


# Passed on to an op when a program runs, or of no consequence in it.
_LEFT_OUT = frozenset({"device", "layout", "pin_memory"})


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
    of = _Outliner()
    for node in members:
        of.line(node)
    ordered = tuple(n for n in members if n in outputs)
    results = (_dense(tensor_of(of.name_of[n], n.meta["val"])) for n in ordered)
    program = RegionProgram(
        tuple(of.inputs.values()),
        tuple(of.lines),
        tuple(results),
        len(of.numbers),
        ranks_of(of.group) if of.group else 1,
    )
    numbers = tuple(of.numbers)
    return Outline(program, tuple(of.inputs), ordered, numbers, of.group, of.names)


@dataclass
class _Outliner:
    name_of: dict[fx.Node, str] = field(default_factory=dict)  # names of values so far
    inputs: dict[fx.Node, Tensor] = field(default_factory=dict)  # by node outside
    lines: list[Statement] = field(default_factory=list)  # lines so far
    numbers: list[int] = field(default_factory=list)  # that the program takes
    group: str = ""  # the process group that it communicates in
    counts: dict[str, int] = field(default_factory=dict)  # how often a name was given
    names: dict[str, fx.Node] = field(default_factory=dict)  # by names of lines

    def line(self, node: fx.Node) -> None:
        """Add the line of an op."""
        op = op_name(node)
        args, kwargs = node.args, node.kwargs
        if op in _RECAST:
            args, kwargs = _RECAST[op](self._number, *args), {}
        if op.startswith("_c10d_functional.") and isinstance(args[-1], str):
            self.group, args = args[-1], (*args[:-1], GroupName())
        pairs = tuple(
            (k, self._argument(v)) for k, v in kwargs.items() if k not in _LEFT_OUT
        )
        encoded = tuple(self._argument(a) for a in args)
        op = {"prims.inductor_random.default": "fxpar.random.default"}.get(op, op)
        value, name = node.meta["val"], self._name(op)
        tensor = value if isinstance(value, torch.Tensor) else None
        shape = tuple(map(int, tensor.shape)) if tensor is not None else ()
        dtype = _text(tensor.dtype) if tensor is not None else "tuple"
        self.lines.append(Statement(name, op, encoded, pairs, shape, dtype))
        self.name_of[node] = name
        self.names[name] = node

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


# Op -> (what makes a number of an integer, its arguments) -> those of a line. Numbers
# are where the slice of a draw begins, which differs between ranks, and the index of a
# seed, which differs between layers. Inductor's own op for draws that were compiled is
# ours of all elements.
_RECAST: dict[str, Callable[..., tuple[Any, ...]]] = {
    "fxpar.random.default": lambda number, size, seed, mode, whole, offset: (
        *(size, seed, mode, whole),
        [number(x) for x in offset],
    ),
    "prims.inductor_random.default": lambda number, size, seed, mode: (
        *(size, seed, mode, size),
        [0] * len(size),
    ),
    "prims.inductor_lookup_seed.default": lambda number, seeds, index: (
        seeds,
        number(index),
    ),
}


WAIT = "_c10d_functional.wait_tensor.default"
ALL_REDUCE = "_c10d_functional.all_reduce.default"
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
ALL_GATHER = "_c10d_functional.all_gather_into_tensor.default"
MOVES = frozenset({ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER})


@dataclass(frozen=True)
class CollectiveStep:
    """Is a collective with its wait."""

    line: Statement  # the line of the collective itself
    operand: str  # name of the value that it moves; contiguous
    result: str  # name of its wait's result; contiguous

    @property
    def kind(self) -> str:
        """Return one of "all_reduce", "reduce_scatter_tensor",
        "all_gather_into_tensor"."""
        return self.line.op.split(".")[1]


@cache
def stages_of(program: RegionProgram) -> tuple[RegionProgram | CollectiveStep, ...]:
    """Return the steps of a program: collectives, and the lines between them, each as a
    separate program."""
    moves = [line for line in program.lines if line.op in MOVES]
    stage = _stages(program)
    steps: list[RegionProgram | CollectiveStep] = []
    for k in range(len(moves) + 1):
        lines = [
            line
            for line in program.lines
            if stage[line.name] == k and line.op not in MOVES and line.op != WAIT
        ]
        if lines:
            steps.append(_part(program, lines))
        if k < len(moves):
            (operand,), name = moves[k].refs, moves[k].name
            wait = next(w for w in program.lines if w.op == WAIT and name in w.refs)
            steps.append(CollectiveStep(moves[k], operand, wait.name))
    return tuple(steps)


def _stages(program: RegionProgram) -> dict[str, int]:
    """Return, for each line, the number of collectives that are done when it runs."""
    least: dict[str, int] = {}  # by its operands
    started = 0
    for line in program.lines:
        after = max((least.get(name, 0) for name in line.refs), default=0)
        if line.op == WAIT:
            after += 1
        elif line.op in MOVES:
            assert after <= started, "a collective needs one that is after it"
            after, started = started, started + 1
        least[line.name] = after
    last_stage: dict[str, int] = {}  # by its readers
    end = started
    for line in reversed(program.lines):
        free = least[line.name] == 0 and line.op not in MOVES
        if free and line.name in last_stage:
            least[line.name] = last_stage[line.name]
        stage = least[line.name]
        for name in line.refs:
            last_stage[name] = min(last_stage.get(name, end), stage)
    return least


def _part(program: RegionProgram, lines: Sequence[Statement]) -> RegionProgram:
    """Return lines as a program; its outputs are the values that others read."""
    inside = {line.name for line in lines}
    read = {name: None for line in lines for name in line.refs if name not in inside}
    inputs = {t.name: t for t in program.inputs}
    results = {t.name: t for t in program.outputs}
    read_outside = {
        name
        for other in program.lines
        if other.name not in inside
        for name in other.refs
    }
    outputs = [
        results.get(line.name, row_major(line))
        for line in lines
        if line.name in read_outside or line.name in results
    ]
    operands = [inputs.get(name) or row_major(program.values[name]) for name in read]
    # A collective's operand is stored row by row.
    collective_operands = {n for x in program.lines if x.op in MOVES for n in x.refs}
    outputs = [row_major(t) if t.name in collective_operands else t for t in outputs]
    return RegionProgram(
        tuple(operands), tuple(lines), tuple(outputs), program.numbers, program.ranks
    )


def row_major(value: Statement | Tensor) -> Tensor:
    """Return a value as a tensor that is stored row by row."""
    return Tensor(value.name, value.shape, contiguous(value.shape), value.dtype)


@dataclass(frozen=True)
class SplitProgram:
    """Is a program split for one kernel with all of it."""

    moves: tuple[CollectiveStep, ...]  # in order
    # Before, between and after ``moves``, one more than these; may have no lines.
    parts: tuple[RegionProgram, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of the collectives, in order."""
        return tuple(move.kind for move in self.moves)


def cut(program: RegionProgram) -> SplitProgram:
    """Split a program for one kernel: each part gives all that the kernel must write.

    That includes values that pass from one collective to the next, or through one to
    the caller. Raises CannotEmit.
    """
    moves: list[CollectiveStep] = []
    parts: dict[int, RegionProgram] = {}
    for step in stages_of(program):
        if isinstance(step, CollectiveStep):
            moves.append(step)
        else:
            parts[len(moves)] = step
    output_names = {t.name for t in program.outputs}
    full = []
    for k in range(len(moves) + 1):
        part = parts.get(k, RegionProgram((), (), (), program.numbers, program.ranks))
        if k and moves[k - 1].result in output_names:
            part = _passing_on(part, row_major(program.values[moves[k - 1].result]))
        if k < len(moves) and moves[k].operand not in {t.name for t in part.outputs}:
            part = _passing_on(part, _operand(program, moves, k))
        full.append(part)
    return SplitProgram(tuple(moves), tuple(full))


def _operand(program: RegionProgram, moves: Sequence[CollectiveStep], k: int) -> Tensor:
    """Return the operand of a collective that no line before it makes: an input, or the
    result of the collective before. Raises CannotEmit."""
    name = moves[k].operand
    available = {t.name for t in program.inputs} | {move.result for move in moves[:k]}
    if name not in available:
        raise CannotEmit(name, "is given to a collective long after it is made")
    return next(
        (t for t in program.inputs if t.name == name), row_major(program.values[name])
    )


def _passing_on(part: RegionProgram, t: Tensor) -> RegionProgram:
    """Return a part that also passes on one of its inputs."""
    inputs = part.inputs
    if t.name not in {x.name for x in inputs}:
        inputs = (*inputs, t)
    handed_on = dataclasses.replace(t, stride=contiguous(t.shape))
    return dataclasses.replace(part, inputs=inputs, outputs=(*part.outputs, handed_on))
