"""A call of every op that kernels know, and named pieces of models around them.

Shapes are small, with rows that do not fill a block. ``PIECES`` are functions of
tensors; ``OPS`` single calls, whose operands are strings that name what they are made
of (``make``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

BATCH, LENGTH, WIDTH = 3, 5, 24
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (BATCH, LENGTH, WIDTH),
    "y": (BATCH, LENGTH, WIDTH),
    "z": (BATCH, LENGTH, WIDTH),
    "row": (BATCH, LENGTH, 1),
    "col": (WIDTH,),
    "half": (BATCH, LENGTH, WIDTH // 2),
    "one": (BATCH, WIDTH),
    "number": (),
}
NARROW = ("int32", "int16", "int8", "uint8")
# Of x's shape: positive numbers, whole numbers, also of few bits and so large that they
# wrap, bools; and numbers of which some are infinite or NaN. And numbers alone.
NAMES = {*SHAPES, "positive", "small", "ints", "bools", "seed", "seeds", "double"}
NAMES |= {*NARROW, "large", "odd", "strange", "odd_row"}
FULL = SHAPES["x"]
INT, FLOAT, BOOL = torch.int64, torch.float32, torch.bool
NARROW_FLOATS = (torch.bfloat16, torch.float16)


def make(name: str, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """What a name of a sample stands for, random but the same every time."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    if name in SHAPES:
        return torch.randn(SHAPES[name], generator=draw).to(dtype)
    if name == "positive":
        return (torch.rand(FULL, generator=draw) + 0.5).to(dtype)
    if name in ODD:
        x = torch.randn(SHAPES.get(name.removeprefix("odd_"), FULL), generator=draw)
        flat = x.view(-1)
        for first, value in enumerate(_ODD, ODD.index(name)):
            flat[first :: 3 * len(_ODD)] = value
        return x.to(dtype)
    if name in NARROW:
        ends = torch.iinfo(getattr(torch, name))
        whole = torch.randint(ends.min, ends.max, FULL, generator=draw)
        return whole.to(getattr(torch, name))
    if name == "large":  # beyond what float32 tells apart
        return torch.randint(-(2**40), 2**40, FULL, generator=draw)
    if name == "small":
        return torch.randn(FULL, generator=draw).to(dtype) * 1e-4
    if name == "ints":
        return torch.randint(-3, 4, FULL, generator=draw)
    if name == "bools":
        return torch.rand(FULL, generator=draw) > 0.5
    if name == "seed":
        return torch.tensor(-1234567890123)
    if name == "double":
        return torch.tensor(0.3, dtype=torch.float64)
    assert name == "seeds"
    return torch.randint(-(2**62), 2**62, (4,), generator=draw)


ODD = ("odd", "strange", "odd_row")
_ODD = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


_TWO = [_calls("x", "y"), _calls("x", "row"), _calls("col", "x"), _calls("x", "number")]
_ONE = [_calls("x")]
_POSITIVE = [_calls("positive")]
_COMPARED = [_calls("x", "y"), _calls("ints", "row")]

_PLAIN = ["neg", "exp", "sin", "cos", "erf", "sigmoid", "relu", "abs"]
_PLAIN += ["sign", "alias", "detach", "clone", "lift_fresh_copy"]

OPS: dict[str, list[Call]] = {
    "aten.add.Tensor": [*_TWO, _calls("x", "y", alpha=-0.5), _calls("ints", 2)],
    "aten.add.Scalar": [_calls("x", 1.5)],
    "aten.sub.Tensor": [*_TWO, _calls(1, "x"), _calls("x", "double")],
    "aten.sub.Scalar": [_calls("x", 2)],
    "aten.mul.Tensor": [*_TWO, _calls("bools", "x"), _calls("ints", "ints")],
    "aten.mul.Scalar": [_calls("x", -0.5)],
    "aten.div.Tensor": [_calls("x", "positive"), _calls("ints", 3)],
    "aten.div.Scalar": [_calls("x", 32)],
    **{
        f"aten.{word}.Tensor": _COMPARED
        for word in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        f"aten.{word}.Scalar": [_calls("x", 0.1), _calls("ints", 1)]
        for word in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{f"aten.{word}.default": _ONE for word in _PLAIN},
    **{
        f"aten.{word}.default": _POSITIVE
        for word in ("log", "sqrt", "rsqrt", "reciprocal")
    },
    "aten.tanh.default": [_calls("x"), _calls("small")],
    "aten.pow.Tensor_Scalar": [
        _calls("positive", n) for n in (2, 3, 1.0, 0.5, -0.5, -1, -2)
    ],
    "aten.clamp_min.default": [_calls("x", 0.1)],
    "aten.clamp_max.default": [_calls("x", 0.1)],
    "aten.maximum.default": [_calls("x", "y")],
    "aten.minimum.default": [_calls("x", "y")],
    "aten.where.self": [_calls("bools", "x", "row")],
    "aten.logical_not.default": [_calls("bools"), _calls("ints")],
    "aten.logical_and.default": [_calls("bools", "ints")],
    "aten.logical_or.default": [_calls("bools", "ints")],
    "aten.bitwise_and.Tensor": [_calls("bools", "bools"), _calls("ints", "ints")],
    "aten.bitwise_or.Tensor": [_calls("ints", "ints")],
    "aten.bitwise_xor.Tensor": [_calls("ints", "ints")],
    "aten.bitwise_not.default": [_calls("bools"), _calls("ints")],
    "aten.addcmul.default": [_calls("x", "y", "row", value=0.1)],
    "aten.addcdiv.default": [_calls("x", "y", "positive", value=-0.1)],
    "prims.fma.default": [_calls("x", "y", "positive")],
    "prims.convert_element_type.default": [
        _calls("bools", FLOAT),
        _calls("x", INT),
        _calls("ints", BOOL),
        _calls("ints", FLOAT),
    ],
    "aten.copy.default": [_calls("x", "row")],
    "aten.view.default": [_calls("x", [BATCH * LENGTH, WIDTH])],
    "aten.reshape.default": [_calls("x", [-1])],
    "aten._unsafe_view.default": [_calls("x", [BATCH * LENGTH, WIDTH])],
    "aten.unsqueeze.default": [_calls("x", 1)],
    "aten.squeeze.default": [_calls("row")],
    "aten.squeeze.dim": [_calls("row", -1)],
    "aten.squeeze.dims": [_calls("row", [2])],
    "aten.expand.default": [_calls("row", list(FULL)), _calls("col", [BATCH, -1])],
    "aten.permute.default": [_calls("x", [2, 0, 1])],
    "aten.transpose.int": [_calls("x", 0, -1)],
    "aten.t.default": [_calls("one")],
    "aten.slice.Tensor": [
        _calls("x", 2, 4, 9223372036854775807),
        _calls("x", 0, -2, None),
        _calls("x", 2, 1, 20, 3),
    ],
    "aten.select.int": [_calls("x", 1, -2)],
    "aten.cat.default": [
        _calls(["x", "half"], -1),
        _calls(["half", "x", "half"], 2),
        _calls(["x", "y"]),
    ],
    "aten.constant_pad_nd.default": [
        _calls("x", [2, 3, 1, 0], 0.5),
        _calls("ints", [0, 1], -1),
    ],
    "aten.slice_scatter.default": [
        _calls("x", "half", 2, 4, 4 + WIDTH // 2),
        _calls("x", "half", -1, -(WIDTH // 2), 9223372036854775807),
    ],
    "aten.select_scatter.default": [_calls("x", "one", 1, -1)],
    "aten.full.default": [_calls(list(FULL), 2.5, dtype=FLOAT)],
    "aten.scalar_tensor.default": [_calls(2.5, dtype=FLOAT)],
    "prims.iota.default": [
        _calls(40, start=3, step=2, dtype=INT, device="cpu", requires_grad=False)
    ],
    "aten.sum.dim_IntList": [
        _calls("x", [-1]),
        _calls("x", [2], True),
        _calls("x", [1, 2]),
        _calls("x", [0, 1]),
        _calls("x", [0], True),
    ],
    "aten.sum.default": _ONE,
    "aten.mean.dim": [_calls("x", [-1], True)],
    "aten.amax.default": [_calls("x", [-1], True)],
    "aten.amin.default": [_calls("x", [2])],
    "aten.var.correction": [
        _calls("x", [2], correction=0, keepdim=True),
        _calls("x", [2]),
    ],
    "aten.var_mean.correction": [_calls("x", [2], correction=0, keepdim=True)],
    "fxpar.random.default": [
        _calls(list(FULL), "seed", "rand", [6, 5, 48], [3, 0, 24]),
        _calls(list(FULL), "seed", "rand", list(FULL), [0, 0, 0]),
    ],
    "prims.inductor_lookup_seed.default": [_calls("seeds", 2)],
    # A result of an op with several.
    "getitem": [],
}

# Operands in the place of others: infinite and not a number, large, of few bits.
_STRANGE = {"x": "odd", "positive": "odd", "y": "strange", "row": "odd_row"}
# Integers as operands, of which kernels make no sums.
_OF_INTS = {
    f"aten.{word}": [_calls("{0}", "{0}"), _calls("{0}", 3)]
    for word in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
}
_OF_INTS |= {f"aten.{word}.Tensor": [_calls("{0}", "col")] for word in ("eq", "lt")}
_OF_INTS |= {
    f"aten.{word}.default": [_calls("{0}")]
    for word in ("neg", "abs", "relu", "sign", "bitwise_not", "logical_not")
}
_OF_INTS |= {
    f"aten.{word}": [_calls("{0}", "{0}")]
    for word in ("maximum.default", "minimum.default", "bitwise_xor.Tensor")
}
_OF_INTS |= {
    "aten.clamp_min.default": [_calls("{0}", 5)],
    "aten.clamp_max.default": [_calls("{0}", 90)],
    "aten.pow.Tensor_Scalar": [_calls("{0}", 2)],
    "aten.where.self": [_calls("bools", "{0}", "{0}")],
    "prims.convert_element_type.default": [
        _calls("{0}", dtype) for dtype in (FLOAT, BOOL, torch.bfloat16)
    ],
}
_CASTS = [
    *(_calls("large", getattr(torch, name)) for name in NARROW),
    *(_calls("int32", getattr(torch, name)) for name in NARROW[1:]),
    *(_calls(name, dtype) for name in ("x", "odd") for dtype in NARROW_FLOATS),
]


def _with(call: Call, names: dict[str, str]) -> Call:
    """A call with other operands."""

    def put(x: Any) -> Any:
        if isinstance(x, list):
            return [put(part) for part in x]
        return names.get(x, x) if isinstance(x, str) else x

    return tuple(map(put, call[0])), call[1]


def _strange(op: str) -> list[Call]:
    """More calls of an op, of numbers that are seldom met."""
    out = [_with(call, _STRANGE) for call in OPS[op]]
    out = [
        new
        for new, old in zip(out, OPS[op], strict=True)
        if new != old and INT not in new[0][1:]
    ]
    kinds = ("large", *NARROW) if op != "aten.pow.Tensor_Scalar" else NARROW
    for call in _OF_INTS.get(op, []):
        out += [_with(call, {"{0}": kind}) for kind in kinds]
    return out + (_CASTS if op == "prims.convert_element_type.default" else [])


OPS = {op: [*calls, *_strange(op)] for op, calls in OPS.items()}

Piece = tuple[Callable[..., Any], tuple[str, ...]]


def gradient(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Gradients of ``fn`` of all but the last argument, the gradient of its result."""

    def run(*given: torch.Tensor) -> Any:
        *args, grad = given
        return torch.func.vjp(fn, *args)[1](grad)

    return run


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rate = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x.float() * rate).to(x.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, [WIDTH], weight, bias)


def _dropout(x: torch.Tensor, seed: torch.Tensor, first: int = 1) -> Any:
    drawn = torch.ops.fxpar.random(
        list(x.shape), seed, "rand", [2 * BATCH, LENGTH, WIDTH], [first, 0, 0]
    )
    return torch.where(drawn > 0.1, x / 0.9, 0.0), drawn > 0.1


def _drop(x: torch.Tensor, bias: torch.Tensor, rest: Any, seed: torch.Tensor) -> Any:
    """The epilogue of a product, as CoCoNeT has it."""
    kept, mask = _dropout(x + bias, seed)
    return kept + rest, mask


def _drop_norm(x: Any, bias: Any, rest: Any, w: Any, b: Any, seed: Any) -> Any:
    kept, _ = _dropout(x + bias, seed, first=2)
    return _norm(kept + rest, w, b), kept + rest


def _adamw(p: Any, g: Any, m: Any, v: Any, decay: Any, rate: Any) -> Any:
    """With decay and rate as 0-dim float64."""
    p = p * decay
    m = m.lerp(g, 0.1)
    v = (v * 0.999).addcmul(g, g, value=0.001)
    return p + m / (v.sqrt() / rate + 1e-8) * decay, m, v


def _sgd(p: Any, g: Any, m: Any) -> Any:
    m = 0.9 * m + g + 0.01 * p
    return p - 0.1 * m, m


def _lamb(p: Any, g: Any, m: Any, v: Any, ratio: Any) -> Any:
    """After the norms, which come as a number."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - ratio * (m / (v.sqrt() + 1e-6) + 0.01 * p), m, v


def _lamb_sums(p: Any, g: Any) -> Any:
    """The norms themselves, to be added up over blocks."""
    return (p * p).sum(), (g * g).sum()


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = WIDTH // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


PIECES: dict[str, Piece] = {
    "softmax": (lambda x: x.softmax(-1), ("x",)),
    "log_softmax": (lambda x: x.log_softmax(-1), ("x",)),
    "softmax_backward": (gradient(lambda x: x.softmax(-1)), ("x", "y")),
    "log_softmax_backward": (gradient(lambda x: x.log_softmax(-1)), ("x", "y")),
    "layer_norm": (_norm, ("x", "col", "col")),
    "layer_norm_backward": (gradient(_norm), ("x", "col", "col", "y")),
    "rms_norm": (_rms, ("x", "col")),
    "rms_norm_backward": (gradient(_rms), ("x", "col", "y")),
    "residual_rms_norm": (lambda x, r, w: (_rms(x + r, w), x + r), ("x", "y", "col")),
    "gelu": (F.gelu, ("x",)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), ("x",)),
    "silu_gate": (lambda x, y: F.silu(x) * y, ("x", "y")),
    **{
        f"{name}_backward": (gradient(fn), ("x", "y"))
        for name, fn in {
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "silu": F.silu,
            "relu": F.relu,
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
        }.items()
    },
    "bias_dropout_residual": (_drop, ("x", "col", "y", "seed")),
    "bias_dropout_residual_norm": (
        _drop_norm,
        ("x", "col", "y", "col", "col", "seed"),
    ),
    "dropout_backward": (lambda g, seed: _dropout(g, seed)[0], ("y", "seed")),
    "adamw": (_adamw, ("x", "y", "z", "positive", "double", "double")),
    "sgd": (_sgd, ("x", "y", "positive")),
    "lamb": (_lamb, ("x", "y", "z", "positive", "number")),
    "lamb_sums": (_lamb_sums, ("x", "y")),
    "rotary": (_rotary, ("x", "col", "col")),
    "transposed_read": (lambda x, c: x.transpose(0, 1) * c, ("x", "col")),
    "row_results": (lambda x, y: ((x * y).mean(-1), x + y), ("x", "y")),
    "nan": (
        lambda x: (x.masked_fill(x > 1, float("nan")).clamp(-1, 1).relu(),),
        ("x",),
    ),
    "casts": (
        lambda x: (x.bfloat16().float() - x, (x * 1e6).half().float() + 1),
        ("x",),
    ),
    "column_sums": (lambda x: (x.exp().sum((0, 1)), x.exp()), ("x",)),
    "bool_sums": (lambda x: x.gt(0).to(x.dtype).sum(-1), ("x",)),
}

# Of these bf16 is checked as well.
IN_BF16 = (
    "softmax",
    "layer_norm",
    "layer_norm_backward",
    "residual_rms_norm",
    "rms_norm_backward",
    "gelu",
    "silu_gate",
    "bias_dropout_residual",
    "bias_dropout_residual_norm",
    "rotary",
)
