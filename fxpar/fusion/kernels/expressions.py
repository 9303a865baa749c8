"""Maps each op of a graph to its expression in Triton, by a table.

A value of a kernel is of one of three kinds: "float" (float32, whatever the tensor's
own float is), "int" (int64) or "bool". Integers of fewer bits wrap at their own size,
as torch's do. A cast to a float of fewer bits rounds; other ops on such floats do not.
In: a line of a program and the text of its operands. Out: the text of its result. How
operands are read is a column of the table, so no caller knows single ops. Only ops that
are left of a program after Inductor's decompositions are in it. Never looks at indices
(``placement``) or at memory (``emit``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.fusion.kernels.region_program import Ref, Statement, dtype_of

CAST = "prims.convert_element_type.default"

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int64", "int32", "int16", "int8", "uint8")

_KINDS = dict.fromkeys(FLOATS, "float") | dict.fromkeys(INTS, "int") | {"bool": "bool"}
_CASTS = {"float": "tl.float32", "int": "tl.int64"}

DTYPES = {name: f"tl.{name}" for name in (*FLOATS, *INTS)} | {"bool": "tl.int1"}


def kind_of(dtype: str) -> str | None:
    """Return the kind of values of a dtype; None if kernels do not have it."""
    return _KINDS.get(dtype)


@dataclass(frozen=True)
class Text:
    """Is an operand or a result in a kernel: its name or a constant."""

    text: str  # as it is written in the kernel
    kind: str  # "float", "int" or "bool"
    block: bool = False  # differs within a block; else one number for all lanes
    value: bool | int | float | None = None  # the number, if it is a literal

    @property
    def is_literal(self) -> bool:
        """Return whether it is a number as it is written."""
        return self.value is not None

    def to(self, kind: str) -> str:
        """Return its text as another kind."""
        if kind == self.kind:
            return self.text
        if self.value is not None:
            return constant(self.value, kind)
        if kind == "bool":
            return f"({self.text} != 0)"
        return f"{self.text}.to({_CASTS[kind]})"


def constant(x: bool | int | float, kind: str) -> str:
    """Return a number of the program as a constant of a kind."""
    if kind == "float":
        value = float(x)
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    return repr(bool(x)) if kind == "bool" else repr(int(x))


# How operands are read: as the result's kind, as the kind they have in common, as
# bools, or the first as a bool and the rest as the result's kind.
RESULT, COMMON, BOOLS, PICK = "result", "common", "bools", "pick"

Write = Callable[..., str]


@dataclass(frozen=True)
class ElementOp:
    """Is an op on elements, as an expression of its operands."""

    write: Write  # ``write(*operands, **kwargs)`` returns the expression
    operands: str = RESULT  # how operands are read: RESULT, COMMON, BOOLS or PICK
    # Whether numbers among them have the dtype that operands are read in; others have
    # more bits.
    rounds: bool = False


def _form(template: str, operands: str = RESULT, *, rounds: bool = False) -> ElementOp:
    """Return an op of a template like ``{0} * {1}``."""
    return ElementOp(lambda *args: template.format(*args), operands, rounds)


def _sum(sign: str) -> ElementOp:
    def write(a: str, b: str, alpha: Any = 1) -> str:
        return f"{a} {sign} {b}" if alpha == 1 else f"{a} {sign} {b} * {alpha}"

    return ElementOp(write)


def _power(x: str, exponent: str) -> str:
    """Return a power as products and roots. Raises LookupError if it is not a few of
    these."""
    n = float(exponent)
    if n in (0.5, -0.5):
        return f"tl.sqrt_rn({x})" if n > 0 else f"tl.rsqrt({x})"
    if n == 0 or n != int(n) or abs(n) > 8:
        raise LookupError(f"a power of {exponent}")
    product = " * ".join([x] * int(abs(n)))
    return product if n > 0 else f"1.0 / ({product})"


def _bounded(sign: str) -> ElementOp:
    """Return a clamp to a bound, which keeps NaN."""

    def write(x: str, bound: str) -> str:
        if "nan" in bound:
            raise LookupError("a bound that is NaN")
        return f"tl.where({x} {sign} {bound}, {bound}, {x})"

    return ElementOp(write, rounds=True)


def _products(a: str, b: str, c: str, sign: str, value: Any) -> str:
    factor = "" if value == 1 else f"{value} * "
    return f"{a} + {factor}{b} {sign} {c}"


def _extreme(sign: str) -> ElementOp:
    form = (
        f"tl.where({{0}} {sign} {{1}}, {{0}}, tl.where({{0}} != {{0}}, {{0}}, {{1}}))"
    )
    return _form(form)


_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = {"mul": _form("{0} * {1}"), "div": _form("{0} / {1}")}
_ARITHMETIC |= {"add": _sum("+"), "sub": _sum("-")}

_BINARY = _ARITHMETIC | {
    word: _form(f"{{0}} {sign} {{1}}", COMMON, rounds=True)
    for word, sign in _SIGNS.items()
}

# Ops on bools. Triton's interpreter (3.7) does not take a bool that is uniform in a
# block together with one that differs within it, in "&" and "|".
_AND, _OR = "tl.where({0}, {1}, False)", "tl.where({0}, True, {1})"
_OF_BOOLS = {
    "aten.bitwise_and.Tensor": _form(_AND),
    "aten.bitwise_or.Tensor": _form(_OR),
    "aten.bitwise_xor.Tensor": _form("{0} != {1}"),
}

OPS: dict[str, ElementOp] = {
    f"aten.{word}.{overload}": op
    for word, op in _BINARY.items()
    for overload in ("Tensor", "Scalar")
} | {
    "aten.neg.default": _form("-{0}"),
    "aten.abs.default": _form("tl.abs({0})"),
    "aten.reciprocal.default": _form("1.0 / {0}"),
    "aten.exp.default": _form("tl.exp({0})"),
    "aten.log.default": _form("tl.log({0})"),
    "aten.sqrt.default": _form("tl.sqrt_rn({0})"),
    "aten.rsqrt.default": _form("tl.rsqrt({0})"),
    "aten.sin.default": _form("tl.sin({0})"),
    "aten.cos.default": _form("tl.cos({0})"),
    "aten.erf.default": _form("tl.erf({0})"),
    "aten.tanh.default": _form("lib.tanh({0})"),
    "aten.sigmoid.default": _form("lib.sigmoid({0})"),
    "aten.relu.default": _form("tl.where({0} < 0, 0, {0})"),
    "aten.sign.default": _form("lib.sign({0})"),
    "aten.pow.Tensor_Scalar": ElementOp(_power),
    "aten.clamp_min.default": _bounded("<"),
    "aten.clamp_max.default": _bounded(">"),
    # Both give NaN where either is, as torch does.
    "aten.maximum.default": _extreme(">"),
    "aten.minimum.default": _extreme("<"),
    "aten.where.self": _form("tl.where({0}, {1}, {2})", PICK),
    "aten.logical_not.default": _form("{0} == 0", BOOLS),
    "aten.logical_and.default": _form(_AND, BOOLS),
    "aten.logical_or.default": _form(_OR, BOOLS),
    "aten.bitwise_and.Tensor": _form("{0} & {1}"),
    "aten.bitwise_or.Tensor": _form("{0} | {1}"),
    "aten.bitwise_xor.Tensor": _form("{0} ^ {1}"),
    "aten.bitwise_not.default": _form("~{0}"),
    "aten.addcmul.default": ElementOp(
        lambda a, b, c, value=1: _products(a, b, c, "*", value)
    ),
    "aten.addcdiv.default": ElementOp(
        lambda a, b, c, value=1: _products(a, b, c, "/", value)
    ),
    "prims.fma.default": _form("{0} * {1} + {2}"),
    CAST: ElementOp(lambda x, _: x),
    "aten.copy.default": ElementOp(lambda _, x: x),
}

# Reductions of a row -> the fill of a block's lanes beyond the row's end.
SUMS = {
    "aten.sum.dim_IntList": 0.0,
    "aten.sum.default": 0.0,
    "aten.mean.dim": 0.0,
    "aten.amax.default": -math.inf,
    "aten.amin.default": math.inf,
    "aten.var.correction": 0.0,
    "aten.var_mean.correction": 0.0,
}
# Reductions that may run along columns.
BY_COLUMN = frozenset({"aten.sum.dim_IntList", "aten.sum.default"})

# Ops that do on bools the same as on numbers. Others would compute with the int1 of a
# device, where True is -1.
_ALIKE = frozenset({"aten.bitwise_not.default", "aten.copy.default", CAST, *_OF_BOOLS})
_ROUNDED = {name: f"({{}}).to(tl.{name}).to(tl.float32)" for name in FLOATS[1:]}
_WRAPPED = {name: f"({{}}).to(tl.{name}).to(tl.int64)" for name in INTS[1:]}


def expression(
    line: Statement, operands: Sequence[Text | Any], result: str, common: str
) -> str:
    """Return the expression of a line.

    operands: a Text for each value read, other arguments as they are. result: its kind.
    common: the dtype that operands are promoted to. Raises LookupError with the reason
    if there is none.
    """
    op = OPS[line.op]
    if result == "bool":
        op = _OF_BOOLS.get(line.op, op)
    kind = kind_of(common) or "float"
    kinds = {RESULT: result, COMMON: kind, BOOLS: "bool", PICK: result}
    if kinds[COMMON] == "bool":
        kinds[COMMON] = "int"
    if result == "bool" and op.operands == RESULT and line.op not in _ALIKE:
        raise LookupError(f"{line.op} of bools")
    dtype = common if op.operands == COMMON else line.dtype
    args = []
    for i, x in enumerate(operands):
        kind = "bool" if op.operands == PICK and i == 0 else kinds[op.operands]
        if isinstance(x, Text):
            args.append(x.to(kind))
        elif isinstance(x, (bool, int, float)):
            if dtype in _WRAPPED and not _is_in_range(x, dtype):
                raise LookupError(f"{x} with an operand of {dtype}")
            args.append(constant(rounded(x, dtype) if op.rounds else x, kind))
        else:
            args.append(x)
    kwargs = {k: v for k, v in line.kwargs if k not in ("dtype", "memory_format")}
    if any(not _is_plain(v) for v in kwargs.values()):
        raise LookupError(f"arguments of {line.op}")
    text = op.write(*args, **kwargs)
    if line.op == CAST and line.dtype in _ROUNDED:
        return _ROUNDED[line.dtype].format(text)
    return _WRAPPED[line.dtype].format(text) if line.dtype in _WRAPPED else text


def is_comparison(line: Statement) -> bool:
    """Return whether operands of a line are read in the dtype that they are promoted
    to."""
    return line.op in OPS and OPS[line.op].operands == COMMON


def promoted(line: Statement, values: Mapping[str, Any]) -> str:
    """Return the dtype that torch promotes a line's operands to. ``values``: those it
    reads, by name."""
    samples = []
    for x in line.args:
        if isinstance(x, Ref):
            shape, dtype = values[x.name].shape, dtype_of(values[x.name].dtype)
            samples.append(torch.empty([1] * len(shape), dtype=dtype))
        else:
            samples.append(x)
    return str(torch.result_type(*samples)).removeprefix("torch.")


def narrowed(text: Text, dtype: str) -> Text:
    """Return a value in a dtype of fewer bits, as torch reads a number with a tensor.
    Raises LookupError if it is known, and does not fit."""
    if text.value is not None:
        value = rounded(text.value, dtype)
        return Text(constant(value, text.kind), text.kind, value=value)
    if dtype in _ROUNDED:
        return Text(_ROUNDED[dtype].format(text.to("float")), "float", text.block)
    if dtype in _WRAPPED:
        return Text(_WRAPPED[dtype].format(text.to("int")), "int", text.block)
    return text


def rounded(x: bool | int | float, dtype: str) -> bool | int | float:
    """Return a number as it is in a tensor of a dtype. Raises LookupError if it does
    not fit."""
    if dtype in _ROUNDED:
        return float(torch.tensor(x, dtype=dtype_of(dtype)))
    if dtype in INTS and not _is_in_range(x, dtype):
        raise LookupError(f"{x} as {dtype}")
    return x


def _is_in_range(x: float, dtype: str) -> bool:
    ends = torch.iinfo(dtype_of(dtype))
    return ends.min <= x <= ends.max


def _is_plain(x: Any) -> bool:
    """Return whether an argument may be written in a kernel's text."""
    return not isinstance(x, (tuple, list)) and (
        not isinstance(x, float) or math.isfinite(x)
    )
