"""Represents a region of a graph as a program: plain data that is printed, kept, hashed
and run.

A program has inputs, lines (one op each, in order) and outputs; of the process group
(an argument when it runs) it holds only the number of ranks. Numbers that differ
between ranks or layers (where a mask begins, which seed) are arguments too. Names are
made from ops, so equal regions of different layers are one program with one hash. In:
text or parts. Out: text, a hash. Never looks at a graph (``trace_region`` makes
programs of one) and runs nothing (``interpret`` does).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

FORMAT = "fxpar region 1"


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


@dataclass(frozen=True)
class Tensor:
    """Describes an input or an output."""

    name: str  # for an output, the name of a line
    shape: tuple[int, ...]  # in elements
    stride: tuple[int, ...]  # in elements
    dtype: str  # as text ("float32")

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Statement:
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
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

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
                "inputs": [_tensor_text(t) for t in self.inputs],
                "lines": [_line_text(line) for line in self.lines],
                "outputs": [_tensor_text(t) for t in self.outputs],
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @cached_property
    def hash(self) -> str:
        """Return a digest of the content."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

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
        return RegionProgram(
            tuple(map(_as_tensor, data["inputs"])),
            tuple(map(_as_line, data["lines"])),
            tuple(map(_as_tensor, data["outputs"])),
            data["numbers"],
            data["ranks"],
        )

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
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(1, shape[i + 1])
    return tuple(strides)


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


def _tensor_text(t: Tensor) -> list[Any]:
    return [t.name, list(t.shape), list(t.stride), t.dtype]


def _as_tensor(row: Any) -> Tensor:
    name, shape, stride, dtype = row
    return Tensor(name, tuple(shape), tuple(stride), dtype)


def _line_text(line: Statement) -> list[Any]:
    kwargs = [[k, _encode(v)] for k, v in line.kwargs]
    shape = list(line.shape)
    return [line.name, line.op, _encode(line.args), kwargs, shape, line.dtype]


def _as_line(row: Any) -> Statement:
    name, op, args, kwargs, shape, dtype = row
    pairs = tuple((k, _decode(v)) for k, v in kwargs)
    return Statement(name, op, _decode(args), pairs, tuple(shape), dtype)


def _encode(x: Any) -> Any:
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
        return [_encode(part) for part in x]
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": str(x)}
    assert x is None or isinstance(x, (bool, int, float, str)), x
    return x


def _decode(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(_decode(part) for part in x)
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    read: dict[str, Callable[[Any], Any]] = {
        "value": Ref,
        "number": Number,
        "group": lambda _: GroupName(),
        "dtype": dtype_of,
        "layout": lambda name: getattr(torch, name),
        "float": float,
    }
    return read[kind](value)
