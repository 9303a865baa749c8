"""Sample calls for every row of the linear algebra table: ``SAMPLES[op] = [(args,
kwargs), ...]``, batches of small float64 matrices whose batch dims and columns divide
by 2 and mostly by 4.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar.sharding.op_table import keys

_generator = torch.Generator().manual_seed(5)

Sample = tuple[tuple, dict[str, Any]]

SAMPLES: dict[Any, list[Sample]] = {}
UNRUNNABLE: dict[Any, list[Sample]] = {}


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def _c(*shape: int) -> torch.Tensor:
    return torch.complex(_f(*shape), _f(*shape))


def _definite(*batch: int) -> torch.Tensor:
    """Symmetric 4 by 4 matrices with eigenvalues above 1."""
    x = _f(*batch, 4, 4)
    return x @ x.mT + torch.eye(4, dtype=torch.float64)


def _s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def _add(names: str, *calls: Sample) -> None:
    for key in keys(names):
        SAMPLES.setdefault(key, []).extend(calls)


_SQUARE = [_s(_definite(4)), _s(_definite(2, 4)), _s(_definite()), _s(_definite(1, 2))]
_TALL = [_s(_f(4, 6, 4)), _s(_f(2, 4, 4, 6)), _s(_f(4, 6)), _s(_c(2, 1, 4, 4))]

_add("linalg_cholesky_ex linalg_inv_ex linalg_matrix_exp", *_SQUARE)
_add("linalg_ldl_factor_ex linalg_eig _linalg_eigvals", *_SQUARE)
_add("_linalg_det _linalg_slogdet", *_SQUARE, _s(_f(4, 3, 3)))
_add("cholesky cholesky_inverse", *_SQUARE, _s(_definite(2), True))
_add("_linalg_svd", *_TALL, _s(_f(4, 6, 4), True), _s(_f(2, 4, 4, 4), False, False))
_add("_linalg_eigh", *_SQUARE, _s(_definite(4), "U"), _s(_definite(4), "L", False))
_add("linalg_qr", *_TALL, _s(_f(4, 6, 4), "complete"), _s(_f(4, 4, 4), "r"))
_add("geqrf linalg_lu_factor_ex linalg_lu", *_TALL)
_add(
    "linalg_pinv.atol_rtol_tensor",
    _s(_f(4, 6, 4), rtol=1e-9 * _f(4).abs()),
    _s(_f(2, 4, 6, 4), atol=1e-9 * _f(4).abs(), rtol=1e-9 * _f(2, 1).abs()),
    _s(_f(4, 6, 4)),
)

_LU, _PIVOTS = torch.linalg.lu_factor(_definite(2, 4))
_add(
    "lu_unpack",
    _s(_LU, _PIVOTS),
    _s(_LU[0, 0], _PIVOTS[0, 0]),
    _s(_LU, _PIVOTS, False, True),
    _s(_LU, _PIVOTS, True, False),
)

# Reflectors, and what they are applied to from either side

_Q, _TAU = torch.geqrf(_f(2, 4, 6, 4))
_add("linalg_householder_product", _s(_Q, _TAU), _s(_Q[0, 0], _TAU[0, 0]))
_add(
    "ormqr",
    _s(_Q, _TAU, _f(2, 4, 6, 8)),
    _s(_Q, _TAU, _f(2, 4, 8, 6), False),
    _s(_Q[0, 0], _TAU[0, 0], _f(6, 8), True, True),
)

# Systems: batches of both sides, stretched ones, right-hand sides from either side

_SIDES = [
    (_definite(2, 4), _f(2, 4, 4, 8)),
    (_definite(4), _f(2, 4, 4, 8)),
    (_definite(2, 1), _f(1, 4, 4, 6)),
    (_definite(2, 4), _f(4, 2)),
    (_definite(), _f(4, 8)),
]
for _a, _b in _SIDES:
    _lower = torch.linalg.cholesky(_a)
    _lu, _pivots = torch.linalg.lu_factor(_a)
    _ld, _swaps = torch.linalg.ldl_factor(_a)
    _right = _b.mT.contiguous()
    _add("_linalg_solve_ex", _s(_a, _b), _s(_a, _right, left=False))
    _add(
        "linalg_solve_triangular",
        _s(_lower, _b, upper=False),
        _s(_lower, _right, upper=False, left=False, unitriangular=True),
    )
    _add("triangular_solve", _s(_b, _lower, False), _s(_b, _lower, False, True))
    _add("cholesky_solve", _s(_b, _lower))
    _add(
        "linalg_lu_solve",
        _s(_lu, _pivots, _b),
        _s(_lu, _pivots, _right, left=False),
        _s(_lu, _pivots, _b, adjoint=True),
    )
    if _a.ndim == _b.ndim and _a.shape[:-2] == _b.shape[:-2]:
        # To stretch a batch here ends the process, in torch 2.13.
        _add("linalg_ldl_solve", _s(_ld, _swaps, _b))
_add("_cholesky_solve_helper", _s(_f(2, 4, 4, 8), _definite(2, 4), False))
_add("_linalg_solve_ex", _s(_definite(2, 4), _f(2, 4, 4)), _s(_definite(), _f(4)))

# What keeps effects in order: a check whose result is nothing, and an op with a result

_EFFECTS = "higher_order::with_effects"
_CHECK = torch.ops.aten._linalg_check_errors.default
SAMPLES[_EFFECTS] = [
    _s(torch.empty(0), _CHECK, torch.zeros(4).int(), "linalg.inv", is_matrix=False),
    _s(torch.empty(0), _CHECK, torch.zeros(()).int(), "linalg.inv", is_matrix=True),
    _s(torch.empty(0), torch.ops.aten.relu.default, _f(4)),
]
