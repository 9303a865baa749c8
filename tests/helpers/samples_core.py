"""Sample calls for every row of the pointwise, matmul, reduction, views, slicing and
sources tables: ``SAMPLES[op] = [(args, kwargs), ...]``, small float64 tensors whose
dims divide by 2 and mostly by 4.

``UNRUNNABLE`` holds, on the meta device, the ops that no CPU kernel computes.
``SHAPES_ONLY`` names the ops whose values are random or undefined, so that shards of
them cannot be compared. Keys are overloads, or names of ops that torch registers late.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar.sharding.op_table import keys
from fxpar.sharding.ops import pointwise

_generator = torch.Generator().manual_seed(3)

Sample = tuple[tuple, dict[str, Any]]

SAMPLES: dict[Any, list[Sample]] = {}
UNRUNNABLE: dict[Any, list[Sample]] = {}
SHAPES_ONLY: set[Any] = set()

CPU = torch.device("cpu")
F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=F64)


def _u(*shape: int) -> torch.Tensor:
    """Between 0.1 and 0.9, where every function is defined, but arcosh."""
    return 0.1 + 0.8 * torch.rand(shape, generator=_generator, dtype=F64)


def _i(*shape: int, low: int = 1, high: int = 6) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator)


def _b(*shape: int) -> torch.Tensor:
    return _i(*shape, low=0, high=2).bool()


def _c(*shape: int) -> torch.Tensor:
    return torch.complex(_f(*shape), _f(*shape))


def _m(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def _keys(names: str, namespace: str) -> list[Any]:
    outside = [f"{namespace}::{name}" for name in names.split()]
    return keys(names) if namespace == "aten" else outside


def _add(names: str, *calls: Sample, namespace: str = "aten") -> None:
    for key in _keys(names, namespace):
        SAMPLES.setdefault(key, []).extend(calls)


def _only_shapes(names: str, *calls: Sample, namespace: str = "aten") -> None:
    _add(names, *calls, namespace=namespace)
    SHAPES_ONLY.update(_keys(names, namespace))


# Pointwise: rows without attributes take their operands from the schema

_X, _Y, _ROW, _COLUMN, _SCALAR = _u(4, 8), _u(4, 8), _u(8), _u(4, 1), _u()
_LAYOUTS = [
    [_X, _Y, _u(4, 8), _u(4, 8)],
    [_X, _ROW, _COLUMN, _SCALAR],
    [_COLUMN, _u(2, 4, 8), _SCALAR, _ROW],
    [_u(3, 1, 8), _u(4, 1), _u(3, 1, 1), _u(1, 8)],
]

_WHOLE_NUMBERS = """
    gcd lcm bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor
    bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar
    bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar
    bitwise_xor.Scalar_Tensor bitwise_xor.Tensor __lshift__.Scalar __lshift__.Tensor
    __rshift__.Scalar __rshift__.Tensor
"""


def _by_schema(op: Any, layout: list[torch.Tensor]) -> Sample:
    """Tensors in turn, 0.5 or 2 for numbers; arguments with a default are left out."""
    tensors, args = iter(layout), []
    whole = op in _INTEGER
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            break
        if kind == "Tensor":
            value = next(tensors)
            args.append((value * 8).long() if whole else value)
        else:
            args.append(2 if whole or kind == "int" else 0.5)
    return _s(*args)


_INTEGER = set(keys(_WHOLE_NUMBERS))
_INCREASING = pointwise.INCREASING + " erf exp sigmoid tanh"
_SIGNED = set(keys(_INCREASING + " gelu silu mish hardswish"))
# Ops whose tag says that they are pointwise.
TAGGED = """
    abs acos acosh asin atan2 atanh copysign.Scalar copysign.Tensor cosh digamma
    erfc erfinv fmod.Scalar fmod.Tensor gcd hypot i0 igamma igammac ldexp.Tensor
    lgamma log10 log2 logaddexp nextafter polygamma pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor remainder.Scalar remainder.Scalar_Tensor remainder.Tensor
    round.decimals rsub.Scalar sign silu sinc square sub.Scalar add.Scalar tan
    special_erfcx special_ndtri special_i0e
    special_i1 special_i1e special_zeta special_zeta.other_scalar
    special_zeta.self_scalar special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor
    le.Scalar le.Tensor lt.Scalar lt.Tensor isinf isnan signbit logical_and
    logical_not logical_or logical_xor bitwise_and.Scalar bitwise_and.Scalar_Tensor
    bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar
    bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar
    bitwise_xor.Scalar_Tensor bitwise_xor.Tensor __lshift__.Scalar __lshift__.Tensor
    __rshift__.Scalar __rshift__.Tensor
"""
POLYNOMIALS = " ".join(
    f"special_{name}{overload}"
    for name in (
        *(f"chebyshev_polynomial_{kind}" for kind in "tuvw"),
        *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
        *("hermite_polynomial_h", "hermite_polynomial_he"),
        *("laguerre_polynomial_l", "legendre_polynomial_p"),
    )
    for overload in ("", ".n_scalar", ".x_scalar")
)
_PLAIN = " ".join(
    (
        *(pointwise.NONLINEAR, TAGGED, POLYNOMIALS),
        *(_INCREASING, pointwise.PLAIN, pointwise.COPIES),
        "cos sin gelu log log1p reciprocal rsqrt sqrt mul.Scalar div.Scalar",
        "alias clone detach lift_fresh_copy _lazy_clone",
        "maximum minimum add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor",
        "addcmul addcdiv lerp.Scalar lerp.Tensor complex polar frexp.Tensor",
    )
)
_OWN = keys(
    """
    acosh clamp clamp.Tensor imag real round.decimals _conj _conj_copy _conj_physical
    """
)

for _op in keys(_PLAIN):
    if _op not in _OWN:
        _layouts = _LAYOUTS
        if _op in _SIGNED:
            _layouts = [[4 * x - 2 for x in layout] for layout in _LAYOUTS]
        SAMPLES[_op] = [_by_schema(_op, layout) for layout in _layouts]

_add("acosh", _s(1 + _u(4, 8)))
_add("_conj_physical _conj _conj_copy", _s(_c(4, 8)))
_add("clamp", _s(_f(4, 8), -0.5, 0.5), _s(_f(8), None, 0.5))
_add("clamp.Tensor", _s(_f(4, 8), _f(8) - 1, _f(8) + 1), _s(_f(4, 8), None, _f(8)))
_add("round.decimals", _s(_f(4, 8), decimals=1))
_add("gelu", _s(_f(4, 8), approximate="tanh"))
_add("add.Tensor sub.Tensor rsub.Tensor", _s(_f(4, 8), _f(8), alpha=3))
_add("add.Tensor sub.Tensor mul.Tensor div.Tensor", _s(_f(4, 8), 3.0))
_add("add.Tensor mul.Tensor maximum minimum", _s(_i(4, 8), _i(4, 8)))
_add("add.Tensor mul.Tensor", _s(_b(4, 8), _f(8)), _s(_b(4, 8), _b(4, 8)))
_add("addcmul addcdiv", _s(_f(4, 8), _f(4, 8), _u(4, 8), value=2.0))
_add("div.Tensor_mode", _s(_f(4, 8), _u(8), rounding_mode="floor"))
_add("div.Tensor_mode", _s(_f(4, 8), _u(8), rounding_mode=None))
_add("div.Scalar_mode", _s(_f(4, 8), 3.0, rounding_mode="trunc"))
_add("div.Scalar_mode", _s(_f(4, 8), 3.0, rounding_mode=None))
_add("where.self", _s(_b(4, 8), _f(4, 8), _f(4, 8)), _s(_b(8), _f(4, 1), _f()))
_add("copy", _s(_f(4, 8), _f(8)), _s(_i(4, 8), _f(4, 8)))
_add("clone", _s(_f(4, 8), memory_format=torch.contiguous_format))

_G, _V = _f(4, 8), _f(4, 8)
_add("gelu_backward silu_backward", _s(_G, _V))
_add("sigmoid_backward tanh_backward", _s(_G, _u(4, 8)), _s(_f(8), _u(8)))
_add("hardshrink_backward softshrink_backward threshold_backward", _s(_G, _V, 0.5))
for _mode in (0, 1, 2):
    _grad = _f(4, 8) if _mode == 0 else _f()

_CASTS = [
    *[(_f(4, 8), to) for to in (F64, F32, torch.float16, I64, torch.bool)],
    *[(_i(4, 8), to) for to in (F64, F32, I32, I64)],
    *[(_i(4, 8).int(), I64), (_b(4, 8), F64), (_b(4, 8), I64), (_c(4, 8), F64)],
    *[(_f(4, 8), torch.complex128), (_f(), F32), (_f(4, 1), F32)],
]
_add("_to_copy", *[_s(x, dtype=to) for x, to in _CASTS if not x.is_complex()])
_add("_to_copy", _s(_f(4, 8)), _s(_f(4, 8), device=CPU))

# Prims take no broadcast operands

_UNARY = """
    abs acos asin atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1
    cos cosh digamma erf_inv erfc erfcx isfinite lgamma log log10 log1p log2 ndtri
    reciprocal rsqrt sign signbit sin spherical_bessel_j0 sqrt tan asinh atan cbrt ceil
    erf exp exp2 expm1 floor round sinh tanh trunc frexp neg clone view_of
"""
_BINARY = """
    atan2 eq fmax fmin fmod ge gt hypot igamma igammac le lt ne nextafter pow remainder
    zeta maximum minimum add sub mul div
"""
_add(_UNARY, _s(_X), _s(4 * _u(3, 8) - 2), namespace="prims")
_add(_BINARY, _s(_X, _Y), _s(_u(3, 8), _u(3, 8)), namespace="prims")
_add("acosh", _s(1 + _u(4, 8)), namespace="prims")
_add("bitwise_not", _s(_i(4, 8)), namespace="prims")
_add(
    "bitwise_and bitwise_or bitwise_xor gcd shift_left shift_right_arithmetic",
    _s(_i(4, 8), _i(4, 8)),
    namespace="prims",
)
_add("real imag conj conj_physical", _s(_c(4, 8)), namespace="prims")
_add("fma", _s(_f(4, 8), _f(4, 8), _f(4, 8)), namespace="prims")
_add("where", _s(_b(4, 8), _f(4, 8), _f(4, 8)), namespace="prims")
_add(
    "copy_strided", _s(_f(4, 8), [1, 4]), _s(_f(2, 4, 8), [8, 16, 1]), namespace="prims"
)
_add("device_put", _s(_f(4, 8), CPU), namespace="prims")
_add("convert_element_type", *[_s(x, to) for x, to in _CASTS], namespace="prims")

# Contractions

_A, _B3 = _f(4, 8), _f(2, 4, 8)
_add("mm", _s(_A, _f(8, 4)), _s(_f(1, 8), _f(8, 6)), _s(_i(4, 8), _i(8, 4)))
_add("bmm", _s(_B3, _f(2, 8, 4)), _s(_f(4, 1, 8), _f(4, 8, 1)))
_add("_int_mm", _s(_i(32, 16).to(torch.int8), _i(16, 8).to(torch.int8)))
for _bias in (_f(4, 12), _f(12), _f(4, 1), _f()):
    _add("addmm", _s(_bias, _A, _f(8, 12), alpha=2.0, beta=0.5))
    _add("baddbmm", _s(_bias, _B3, _f(2, 8, 12)), _s(_f(2, 4, 12), _B3, _f(2, 8, 12)))
    _add("addbmm", _s(_bias, _B3, _f(2, 8, 12)))
_add("_addmm_activation", _s(_f(12), _A, _f(8, 12)))
for _names, _call in (
    ("mm.dtype", _s(_m(4, 8), _m(8, 4), F32)),
    ("bmm.dtype", _s(_m(2, 4, 8), _m(2, 8, 4), F32)),
    ("addmm.dtype", _s(_m(4), _m(4, 8), _m(8, 4), F32)),
):
    UNRUNNABLE |= {key: [_call] for key in keys(_names)}


def _scaled(*scales: torch.Tensor, **how: Any) -> Sample:
    x, y = _f(32, 64).to(torch.float8_e4m3fn), _f(48, 64).to(torch.float8_e4m3fn).t()
    return _s(x, y, *scales, **how)


_ones = torch.ones
_add(
    "_scaled_mm",
    _scaled(_ones(()), _ones(()), out_dtype=F32),
    _scaled(_ones(()), _ones(()), _f(48).bfloat16(), out_dtype=torch.bfloat16),
    _scaled(_u(32, 1).float(), _u(1, 48).float(), out_dtype=torch.bfloat16),
)


def _scaled_v2(scale: tuple, recipe: int, bias: Any = None, swizzle: int = 0) -> Sample:
    f8 = torch.float8_e4m3fn
    x, y = _m(32, 64, dtype=f8), _m(48, 64, dtype=f8).t()
    scales = [_m(*shape, dtype=F32) for shape in scale]
    left, right = (([t], [recipe], [swizzle]) for t in scales)
    return _s(x, y, *left, *right, bias, torch.bfloat16)


for _key in keys("_scaled_mm_v2"):
    UNRUNNABLE[_key] = [
        _scaled_v2(((1,), (1,)), 0),
        _scaled_v2(((1,), (1,)), 0, _m(48)),
        _scaled_v2(((32, 1), (1, 48)), 1),
        _scaled_v2(((32, 64 // 32), (48, 64 // 32)), 3),
    ]

# Grouped products: rows, columns or the contracted dim in groups, one of them empty,
# and what lies past the last group in none

_COUNTS = torch.tensor([6, 6, 16, 32], dtype=I32)


def _h(*shape: int) -> torch.Tensor:
    return (_f(*shape) / 4).bfloat16()


_add(
    "_grouped_mm",
    _s(_h(32, 64), _h(4, 64, 32), _COUNTS),
    _s(_h(32, 64), _h(4, 32, 64).mT, _COUNTS),
    _s(_h(4, 32, 64), _h(64, 32), _COUNTS),
    _s(_h(64, 32).t(), _h(64, 16), _COUNTS * 2),
    _s(_h(32, 64).t(), _h(32, 16), _COUNTS // 2),
    _s(_h(4, 32, 64), _h(4, 64, 32)),
)
for _counts in (_COUNTS.long(), _COUNTS // 2):
    _tokens, _experts = (_f(32, 8), _f(4, 8, 12))
    _add(
        "grouped_mm_fallback",
        _s(_tokens, _experts, _counts),
        namespace="transformers",
    )
    _add(
        "grouped_mm_fallback_backward",
        _s(_tokens, _experts, _counts, _f(32, 12)),
        namespace="transformers",
    )

# By expert, rows as they come: one of the experts has none, one most; a row has none at
# all. In groups each row comes once for each.

_IDS = torch.tensor([3, 0, 3, 3, 4, 3, 0, 3, 2, 3, 3, 2, 0, 3, 3, 3])
for _groups in (1, 2, 4):
    _tokens = _f(16 * _groups, 8)
    _add("expert_mm", _s(_tokens, _f(4, 8, 12), _IDS, _groups, 0.0), namespace="fxpar")
    _add(
        "expert_outer",
        _s(_tokens, _f(16 * _groups, 12), _IDS, 4, _groups, 0.0),
        namespace="fxpar",
    )
# Columns of two dims: of results, of what is summed over, of gradients.
_tokens, _wide = _f(32, 8), _f(32, 2, 4)
for _kind in ("cumsum", "cumprod", "logcumsumexp"):
    _add("scan_back", _s(_f(8, 4), 0, _kind), namespace="fxpar")
_PLACES = _f(8, 4).cummax(0)[1]
_add("choice_back", _s(_f(8, 4), _PLACES, 0), namespace="fxpar")
_add("sum_turns", _s(_f(8, 4), 0, 2), _s(_f(3, 12), 1, 3), namespace="fxpar")
_add(
    "interleave",
    _s([_f(8, 4), _f(8, 4)], 0),
    _s([_f(4, 8, 2), _f(4, 8, 2), _f(4, 7, 2)], 1),
    namespace="fxpar",
)
# Alignments: a row of targets for each sequence, and all targets joined.
_probs, _lengths = _f(4, 8, 5).log_softmax(-1), torch.full((8,), 4)
_counts = torch.tensor([1, 2, 1, 2, 2, 1, 2, 1])
for _targets in (_i(8, 2) % 4 + 1, _i(12) % 4 + 1):
    _read = _probs, _targets, _lengths, _counts, 0, False
    _add("ctc", _s(*_read), namespace="fxpar")
    _add("ctc_backward", _s(_f(8), *_read), namespace="fxpar")
_add("expert_mm", _s(_tokens, _f(4, 8, 2, 6), _IDS, 2, 0.0), namespace="fxpar")
_add("expert_mm", _s(_wide, _f(4, 2, 4, 6), _IDS, 2, 0.0), namespace="fxpar")
_add("expert_outer", _s(_tokens, _wide, _IDS, 4, 2, 0.0), namespace="fxpar")
# Of a rank that has the first three experts.
_add(
    "own_expert_mm",
    _s(_tokens, _f(3, 8, 12), _IDS.repeat(2), 1.0, 0.0, ""),
    namespace="fxpar",
)
_add(
    "own_expert_mm",
    _s(_wide, _f(3, 2, 4, 6), _IDS.repeat(2), 2.0, 0.0, ""),
    namespace="fxpar",
)
_add(
    "own_expert_outer",
    _s(_tokens, _wide, _IDS.repeat(2), 3, 2.0, 0.0, ""),
    namespace="fxpar",
)

# Rows of two or four parts in slots of two groups: not all of them hold a row.
for _parts in (2, 4):
    _room = 24 // _parts
    _chosen = torch.stack([_IDS % 2, 3 - _IDS % 2]).T.flatten()
    _add(
        "dispatch_slots",
        _s(_chosen, 4, 2, _parts, _room, False),
        _s(_chosen, 4, 2, _parts, _room, True),
        _s(_chosen, 4, 2, _parts, 2, False),
        namespace="fxpar",
    )
    _taken = (torch.arange(2 * _parts * _room) % (32 // _parts + 1) - 1).reshape(
        2, _parts, _room
    )
    _place = torch.arange(32) % (2 * _room + 1) - 1
    _add(
        "dispatch_rows",
        _s(_f(32, 8), _taken, 1, 0),
        _s(_f(16, 8), _taken, 2, 0),
        _s(_i(32), _taken, 1, -1),
        namespace="fxpar",
    )
    _add(
        "combine_rows",
        _s(_f(2, _parts, _room, 8), _place),
        _s(_f(2, _parts, _room), _place),
        namespace="fxpar",
    )
    _slots = _s(_f(2, _parts, _room, 8), "experts"), _s(_i(2, _parts, _room), "experts")
    _add("exchange_slots", *_slots, namespace="fxpar")
    _rows = _f(2 * _parts * _room, 8), _i(2 * _parts * _room)
    _slots = tuple(_s(x, 2, _parts, "experts") for x in _rows)
    _add("return_slots", *_slots, namespace="fxpar")
    _add("within", _s(_taken, torch.tensor(3), 4, ""), namespace="fxpar")
    _add("within", _s(_taken, torch.full((_parts,), 3), 4, ""), namespace="fxpar")

# Reductions

_T = _f(2, 4, 8)
_ALL = [_s(_T), _s(_f(8)), _s(_f())]
_DIMS = [_s(_T, [1]), _s(_T, [0, -1], True), _s(_f(4, 1, 8), [1, 2])]
_DIM = [_s(_T, 1), _s(_T, -1, True), _s(_f(4, 1), 1)]

_add("sum mean max min prod median nanmedian", *_ALL)
_add("sum.dim_IntList mean.dim amax amin logsumexp", *_DIMS)
_add("amax amin", _s(_T))
_add("sum", _s(_b(4, 8)), _s(_i(4, 8)))
_add("mean.dim", _s(_b(4, 8), [0], dtype=F64))
_LARGE = (20000 + _f(4, 8)).half()  # no four of which float16 can add
_add("mean", _s(_LARGE))
_add("mean.dim", _s(_LARGE, [0]))
_add("sum.dim_IntList", _s(_i(4, 8), [0]), _s(_T, None), _s(_T, []))
_add("any", _s(_b(4, 8)), _s(_b()), _s(_i(4, 8, low=-1, high=2)))
_add("any.dim", _s(_b(4, 8), 1), _s(_b(4, 8), 0, True), _s(_i(4, 8), 0))
_add("any.dims", _s(_b(4, 8), [1]), _s(_b(4, 8), None), _s(_b(4, 8), []))
_add("prod.dim_int max.dim min.dim median.dim nanmedian.dim", *_DIM)
_add("argmax argmin", *_ALL, *_DIM)
_add("mode", *_DIM, _s(_T))
_add("kthvalue", _s(_T, 2), _s(_T, 2, 1, True))
_add("topk", _s(_T, 2), _s(_T, 2, 1), _s(_f(4, 1), 1))
for _how in ({}, {"correction": 0}, {"keepdim": True}):
    _add("var.correction", _s(_T, [1], **_how), _s(_T, **_how))
    _add("var_mean.correction", _s(_T, [0, 2], **_how))
_add("linalg__powsum", _s(_T, 2, [1]), _s(_T, 3, [0, 2], True))
_add("cumsum cumprod logcumsumexp cummax cummin", _s(_T, 1), _s(_f(4, 1), 1))
_add("_softmax _log_softmax", _s(_T, 1, False), _s(_T, -1, False))
for _affine in ((_f(8), _f(8)), (_f(8), None), (None, None)):
    _add("native_layer_norm", _s(_f(4, 2, 8), [8], *_affine, 1e-5))
_add("sort", _s(_T), _s(_T, 1, True))
_add("sort.stable", _s(_T, stable=True, dim=1), _s(_T, stable=True))
_add("histc", _s(_T, 8), _s(_T, 8, -1, 1))
_add("_fft_c2c", _s(_c(2, 4, 8), [2], 0, True), _s(_c(2, 4, 8), [1, 2], 1, False))
_add("_fft_r2c", _s(_T, [2], 0, True), _s(_T, [1, 2], 0, True))
_add("_fft_c2r", _s(_c(2, 4, 5), [2], 0, 8))
_add("glu", _s(_T, 1), _s(_T))
for _names, _dims in (("sum amax amin prod", [1]), ("sum amax amin prod", [0, 2])):
    _add(_names, _s(_T, _dims), namespace="prims")
_add("var", _s(_T, [1], 1), _s(_T, [0, 2], 0), namespace="prims")
UNRUNNABLE["prims::xor_sum"] = [_s(_m(4, 8, dtype=I64), [1])]
_add("prepare_softmax_online", _s(_T, 1), _s(_T, -1), namespace="prims")

# Views and data movement

_Z = torch.empty(2, 0, 4, dtype=F64)
_VIEWS = [
    *[_s(_T, [8, 8]), _s(_T, [-1]), _s(_T, [2, 4, 2, 4]), _s(_T, [2, 1, 4, 8])],
    *[_s(_f(4, 6), [6, 4]), _s(_f(2, 4, 1), [8]), _s(_f(1), []), _s(_f(), [1, 1])],
    *[_s(_Z, [0, 8]), _s(_f(16, 12), [2, 8, 3, 4]), _s(_f(3, 4), [2, 6])],
    *[_s(_f(8, 4).t(), [4, 2, 4]), _s(_f(4, 2, 8).transpose(0, 1), [2, 2, 2, 8])],
]
_add("view _unsafe_view reshape _reshape_copy", *_VIEWS)
_add("_reshape_alias_copy", _s(_T, [8, 8], [8, 1]))
_add("view.dtype", _s(_T, I64), _s(_T, I32), _s(_T, torch.complex128))
_add("permute", _s(_T, [2, 0, 1]), _s(_T, [-1, 1, 0]), _s(_f(), []))
_add("transpose.int", _s(_T, 1, -1), _s(_f(), 0, 0))
_add("t", _s(_A), _s(_f(8)), _s(_f()))
_add(
    "expand",
    *[_s(_f(4, 1), [4, 8]), _s(_f(4, 1), [2, -1, 8]), _s(_f(8), [4, 8])],
    *[_s(_f(), [4, 8]), _s(_A, [4, 8])],
)
_FLAT = _f(2, 1, 4, 1)
_add("squeeze", _s(_FLAT), _s(_T), _s(_f(1)), _s(_f()))
_add("squeeze.dim", _s(_FLAT, 1), _s(_FLAT, 0), _s(_FLAT, -1))
_add("squeeze.dims", _s(_FLAT, [1, 3]), _s(_FLAT, [0, 1]))
_add("unsqueeze", _s(_T, 0), _s(_T, -1), _s(_T, 2), _s(_f(), 0))
_add(
    "as_strided as_strided_copy",
    *[_s(_A, [8, 4], [1, 8]), _s(_A, [32], [1]), _s(_A, [4, 2, 4], [8, 4, 1], 0)],
    *[_s(_A, [4, 2, 8], [8, 0, 1]), _s(_A, [4, 4], [8, 1])],
    *[_s(_A, [4], [8], 3), _s(_A, [4, 2], [1, 16], 2), _s(_A, [4, 3], [8, 1])],
    *[_s(_f(2, 4, 8), [8, 1, 2], [1, 5, 32], 16), _s(_A, [7, 2], [4, 1])],
    *[_s(_f(2, 4, 8).mT, [2, 8, 2], [32, 1, 16], 8), _s(_A, [4, 4], [9, 1])],
)
_add(
    "as_strided_scatter",
    *[_s(_A, _f(8, 4), [8, 4], [1, 8]), _s(_A, _f(32), [32], [1])],
    *[_s(_A, _f(4), [4], [8], 3), _s(_A, _f(4, 2), [4, 2], [1, 16], 2)],
    *[_s(_f(2, 4, 8), _f(8, 1), [8, 1], [1, 5], 16), _s(_A, _f(3, 8), [3, 8], [8, 1])],
    *[_s(_A, _f(4, 4), [4, 4], [9, 1]), _s(_A, _f(8, 2), [8, 2], [4, 1])],
)
_add("view_as_real view_as_real_copy", _s(_c(4, 8)))
_add("view_as_complex view_as_complex_copy", _s(_f(4, 8, 2)))
_SLICES = [
    *[_s(_T, 2, 2, 6), _s(_T, 1, 0, 2), _s(_T, 2, 0, 9223372036854775807)],
    *[_s(_T, 2, 1, 8, 2), _s(_T, 1, -2, 4), _s(_T, 1, -4), _s(_T)],
    *[_s(_T, 2, 3, 5), _s(_T, -1, -2, None), _s(_T, 2, 1, 7, 3), _s(_T, 1, 2, 2)],
]
_add("slice.Tensor slice_copy.Tensor", *_SLICES)
_add("slice_scatter", _s(_T, _f(2, 4, 4), 2, 2, 6), _s(_T, _f(2, 4, 8), 1))
_add("select.int select_copy.int", _s(_T, 1, 2), _s(_T, -1, -1), _s(_f(8), 0, 1))
_add("select_scatter", _s(_T, _f(2, 8), 1, 2))
_add("split.Tensor split_copy.Tensor", _s(_T, 3, 2), _s(_T, 2))
_add("split_with_sizes", _s(_T, [2, 6], 2), _s(_T, [1, 1]), _s(_T, [0, 4], 1))
_add("unbind.int", _s(_T), _s(_T, -1))
_add("cat", _s([_T, _f(2, 4, 8)], 1), _s([_T, _f(2, 4, 2)], -1), _s([_A]))
_add("cat", _s([torch.empty(0, dtype=F64), _A], 1))
_add("stack _stack", _s([_A, _f(4, 8)]), _s([_A, _f(4, 8)], -1), _s([_f(), _f()]))
_add("diagonal", _s(_T), _s(_T, 1, 1, 2), _s(_A, 0, -1, 0))
_add("diagonal", _s(_f(8, 8), -3), _s(_f(8, 8), 8), _s(_A > 0))
_add("diagonal_scatter", _s(_T, _f(2, 4), 0, 1, 2), _s(_T, _f(8, 2)))
_add("diagonal_scatter", _s(_f(8, 8), _f(5), -3))
_add("unfold", _s(_T, 2, 4, 2), _s(_T, 1, 2, 1))
_add("unfold_backward", _s(_f(2, 4, 3, 4), [2, 4, 8], 2, 4, 2))
_add(
    "unfold_backward",
    _s(_f(1, 3, 4), [4, 8], 1, 4, 2),
    _s(_f(1, 1, 4), [4, 4], 1, 4, 2),
)
_add("flip", _s(_T, [1]), _s(_T, [0, -1]))
_add("repeat", _s(_A, [1, 2]), _s(_A, [3, 1, 1]), _s(_f(4, 1), [1, 8]))
_add("repeat", _s(_f(3, 2), [20, 5]), _s(_A, [2, 1, 3]), _s(_f(8, 4), [0, 1]))
_add("constant_pad_nd", _s(_T, [1, 2]), _s(_T, [0, 0, 1, 0], 3.0), _s(_T, [-1, 1]))
for _n, _space in ((1, [8]), (2, [4, 8]), (3, [4, 4, 8])):
    _x, _pad = _f(2, 4, *_space), [1, 2] + [0, 0] * (_n > 1) + [1, 0] * (_n > 2)
    _op = getattr(torch.ops.aten, f"replication_pad{_n}d")
    _grad = torch.randn_like(_op(_x, _pad))
    _add(f"replication_pad{_n}d_backward", _s(_grad, _x, _pad))

_add("broadcast_in_dim", _s(_f(4, 1), [2, 4, 8], [1, 2]), namespace="prims")
_add("broadcast_in_dim", _s(_f(), [4, 8], []), namespace="prims")
_add("reshape", _s(_T, [8, 8]), _s(_A, [2, 2, 8]), namespace="prims")
_add("collapse collapse_view", _s(_T, 0, 1), _s(_T, 1, 2), namespace="prims")
_add("split_dim", _s(_T, 2, 2), namespace="prims")
_add("squeeze", _s(_FLAT, [1, 3]), namespace="prims")
_add("transpose", _s(_T, [2, 0, 1]), namespace="prims")
_add("rev", _s(_T, [1]), namespace="prims")
_add("cat", _s([_A, _f(4, 2)], 1), namespace="prims")
_add("as_strided", _s(_A, [8, 4], [4, 1], 0), namespace="prims")
_add("as_strided_scatter", _s(_A, _f(8, 4), [8, 4], [4, 1], 0), namespace="prims")
_add("view_of_dtype", _s(_T, I64), namespace="prims")

# Sources

_LIKE = {"dtype": F64, "device": CPU, "requires_grad": False}
_add("full", _s([4, 8], 2.5), _s([], 1), _s([2, 1, 4], True))
_add("zeros", _s([4, 8]), _s([]), _s([1, 8]))
_add("full_like", _s(_A, 2.5))
_add("scalar_tensor", _s(2.5, dtype=F64))
_add("arange", _s(8))
_only_shapes("randperm", _s(8))
_add("arange.start", _s(2, 10))
_add("arange.start_step", _s(2, 10, 2))
_add("fft_fftfreq fft_rfftfreq", _s(8))
_only_shapes("empty.memory_format", _s([4, 8]), _s([]))
_only_shapes("empty_strided", _s([4, 8], [8, 1]))
_only_shapes("rand_like randn_like", _s(_A), _s(_f()))
_only_shapes("new_empty_strided", _s(_A, [4, 8], [8, 1]))
_only_shapes("rand randn", _s([4, 8]), _s([]))
_only_shapes("rand.generator randn.generator", _s([4, 8], generator=None))
_only_shapes("randint", _s(9, [4, 8]))
_only_shapes("randint.generator", _s(9, [4, 8], generator=None))
_only_shapes("randint.low", _s(2, 9, [4, 8]))
_only_shapes("randint.low_generator", _s(2, 9, [4, 8], generator=None))
_only_shapes("normal.float_float", _s(0.0, 1.0, [4, 8]))
_only_shapes("normal.Tensor_Tensor", _s(_A, _u(8)))
_only_shapes("normal.float_Tensor", _s(0.0, _u(4, 8)))
_only_shapes("normal.Tensor_float normal_functional", _s(_A))
_only_shapes("randint_like", _s(_A, 9))
_only_shapes("randint_like.low_dtype", _s(_A, 2, 9))
_only_shapes("seeds", _s(5, CPU), namespace="fxpar")
_only_shapes("bernoulli poisson", _s(_u(4, 8)))
_only_shapes("bernoulli.p", _s(_A, 0.5))
_only_shapes("exponential uniform cauchy log_normal random", _s(_A))
_only_shapes("geometric", _s(_A, 0.5))
_only_shapes("random.from", _s(_A, 1, 9))
_only_shapes("random.to", _s(_A, 9))
_only_shapes("native_dropout", _s(_A, 0.5, True), _s(_A, 0.5, False), _s(_A, 0.0, None))

_add("full", _s([4, 8], 2.5, **_LIKE), namespace="prims")
_add("full_like", _s(_A, 2.5, **_LIKE), namespace="prims")
_add("fill", _s(_A, 2.5), namespace="prims")
_add("scalar_tensor", _s(2.5, dtype=F64, device=CPU), namespace="prims")
_add("iota", _s(8, start=0, step=1, **{**_LIKE, "dtype": I64}), namespace="prims")
_only_shapes("empty", _s([4, 8], **_LIKE), namespace="prims")
_only_shapes("empty_permuted", _s([4, 8], [1, 0], **_LIKE), namespace="prims")
_only_shapes("empty_strided", _s([4, 8], [8, 1], **_LIKE), namespace="prims")
_only_shapes("normal", _s([4, 8], mean=0.0, std=1.0, **_LIKE), namespace="prims")
_only_shapes(
    "uniform",
    _s([4, 8], low=0.0, high=1.0, dtype=F64, device=CPU, stride=[8, 1]),
    namespace="prims",
)
_SEED = torch.tensor(5)
_only_shapes("inductor_seed", _s(CPU), namespace="prims")
_only_shapes("inductor_seeds", _s(4, CPU), namespace="prims")
_add("inductor_lookup_seed", _s(_i(4), 2), namespace="prims")
_only_shapes("inductor_random", _s([4, 8], _SEED, "rand"), namespace="prims")
_only_shapes("inductor_randint", _s(0, 9, [4, 8], _SEED), namespace="prims")
_only_shapes("inductor_rand_eager_offset", _s(4, CPU), namespace="prims")
_only_shapes("inductor_rand_eager_offsets", _s([4, 4], CPU), namespace="prims")

# fxpar's own, and the one op that writes to an input

_add("copy_", _s(_f(4, 8), _f(8)))
_add(
    "dot",
    _s(_f(4, 8), _f(8, 4), "m k, k n -> m n"),
    _s(_f(2, 4, 8), _f(2, 8, 4), "b s h, b h o -> b o s"),
    _s(_f(2, 4, 8), _f(4, 8, 4), "b s h, s h o -> b o"),
    _s(_f(4, 2, 8), _f(2, 4, 8), "a b c, b a d -> b c d a"),
    _s(_f(4), _f(8), "m, n -> m n"),
    _s(_f(8), _f(8), "k, k ->"),
    namespace="fxpar",
)
_add("orthogonal", _s(_f(4, 8), [3.0, -4.0, 2.0], 2, 1e-7), namespace="fxpar")
_add("constrain", _s(_f(4, 8), "dp,_"), namespace="fxpar")
_add(
    "shift",
    _s(_f(8, 4), 0, 1),
    _s(_f(8, 1, 4), 0, -3, 0.0),
    _s(_f(4, 8), 1, 5, 7.0),
    namespace="fxpar",
)
_add(
    "random",
    _s([4, 8], _SEED, "rand", [4, 8], [0, 0]),
    _s([4, 1, 8], _SEED, "randn", [4, 1, 8], [0, 0, 0]),
    _s([], _SEED, "rand", [], []),
    namespace="fxpar",
)
_add("randint", _s(-3, 9, [4, 8], _SEED, [4, 8], [0, 0]), namespace="fxpar")
