"""Gives rules to linear algebra on batches of matrices: batch dims are free, the dims
of one matrix are whole.

A row is a form such as ``"... _ _, ... _ k -> ... _ k"``: ``...`` are the batch dims,
aligned from the right and broadcast among the operands; ``_`` is whole. Columns of a
right-hand side (``k``) are free too: every rank solves for its own.
In: calls of these ops. Out: their rules.
Never: splits the dims of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import aligned, make, rows, tensors_of


def _rule(
    form: str,
    tensors: Sequence[torch.Tensor],
    *,
    empty: Sequence[int] = (),
    like: dict[int, int] | None = None,
) -> Rule:
    """Return the rule of one call. ``empty``: results the call leaves out, one dim of
    size 0. ``like``: result -> operand whose batch dims it has instead of the common
    ones."""
    # The words that follow the batch dims.
    operand_cores, result_cores = (
        [t.split() for t in side.split(",")]
        for side in form.replace("...", "").split("->")
    )
    batch, batch_words = aligned(
        [
            t.shape[: t.ndim - len(c)]
            for t, c in zip(tensors, operand_cores, strict=True)
        ]
    )
    operands = [b + core for b, core in zip(batch_words, operand_cores, strict=True)]
    factors = dict.fromkeys(w for words in operands for w in words if w != "_")
    results = []
    for i, core in enumerate(result_cores):
        lead = batch_words[like[i]] if like and i in like else batch
        words = ["_"] if i in empty else lead + core
        results.append(words + [f"~{f}" for f in factors if f not in words])
    return make(operands, results)


def batched(
    form: str, empty: Callable[..., Sequence[int]] = lambda *_, **__: ()
) -> Callable[..., Rule]:
    """Return a rule function for a form of all tensor arguments; the others do not
    matter, except to ``empty``, which returns the results that a call leaves out."""

    def rule_of_call(*args: Any, **kwargs: Any) -> Rule:
        tensors = tensors_of((args, kwargs))
        return _rule(form, tensors, empty=empty(*args, **kwargs))

    return rule_of_call


def pinv(a: torch.Tensor, *tolerances: Any, **options: Any) -> Rule:
    tensors = tensors_of((tolerances, options))
    form = "... _ _" + ", ..." * len(tensors) + " -> ... _ _"
    return _rule(form, [a, *tensors])


def _columns(left: bool) -> str:
    """Return the form of a right-hand side, of ``A X = B`` or of ``X A = B``."""
    return "... _ k" if left else "... k _"


def solve_ex(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> Rule:
    """Return the rule; ``b`` holds vectors where it has the shape of ``a`` without a
    dim."""
    vectors = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    side = "... _" if vectors else _columns(left)
    form = f"... _ _, {side} -> {side}, ... _ _, ... _, ..."
    return _rule(form, [a, b], like={1: 0, 2: 0, 3: 0})


def by_side(form: str, *args: Any, left: bool = True, **_: Any) -> Rule:
    """Return the rule of a form in which ``B`` is a right-hand side, of calls
    ``(tensors..., left, ...)``, also by name."""
    tensors = tensors_of(args)
    left = args[len(tensors)] if len(args) > len(tensors) else left
    return _rule(form.replace("B", _columns(left)), tensors)


MATRIX = batched("... _ _ -> ... _ _")
MATRIX_INFO = batched("... _ _ -> ... _ _, ...")
FACTORS = batched("... _ _ -> ... _ _, ... _, ...")
BY_MATRIX = batched("... _ k, ... _ _ -> ... _ k")

ROWS = {
    **rows("cholesky cholesky_inverse linalg_matrix_exp", MATRIX),
    **rows("linalg_cholesky_ex linalg_inv_ex", MATRIX_INFO),
    **rows("linalg_lu_factor_ex linalg_ldl_factor_ex", FACTORS),
    **rows(
        "_linalg_svd",
        batched(
            "... _ _ -> ... _ _, ... _, ... _ _",
            lambda a, full=False, vectors=True, **_: () if vectors else (0, 2),
        ),
    ),
    **rows(
        "_linalg_eigh",
        batched(
            "... _ _ -> ... _, ... _ _",
            lambda a, half="L", vectors=True: () if vectors else (1,),
        ),
    ),
    **rows("linalg_eig", batched("... _ _ -> ... _, ... _ _")),
    **rows("_linalg_eigvals", batched("... _ _ -> ... _")),
    **rows(
        "linalg_qr",
        batched(
            "... _ _ -> ... _ _, ... _ _",
            lambda a, mode="reduced": (0,) * (mode == "r"),
        ),
    ),
    **rows("geqrf", batched("... _ _ -> ... _ _, ... _")),
    **rows("linalg_householder_product", batched("... _ _, ... _ -> ... _ _")),
    **rows("ormqr", partial(by_side, "... _ _, ... _, B -> B"), linear="2"),
    **rows(
        "linalg_lu",
        batched(
            "... _ _ -> ... _ _, ... _ _, ... _ _",
            lambda a, *, pivot=True: () if pivot else (0,),
        ),
    ),
    **rows(
        "lu_unpack",
        batched(
            "... _ _, ... _ -> ... _ _, ... _ _, ... _ _",
            lambda a, pivots, data=True, permutation=True: (
                (0,) * (not permutation) + (1, 2) * (not data)
            ),
        ),
    ),
    **rows("_linalg_det", batched("... _ _ -> ..., ... _ _, ... _")),
    **rows("_linalg_slogdet", batched("... _ _ -> ..., ..., ... _ _, ... _")),
    **rows("_linalg_solve_ex", solve_ex),
    **rows("linalg_solve_triangular", partial(by_side, "... _ _, B -> B"), linear="1"),
    **rows("triangular_solve", batched("... _ k, ... _ _ -> ... _ k, ... _ _")),
    **rows("linalg_lu_solve", partial(by_side, "... _ _, ... _, B -> B"), linear="2"),
    **rows(
        "linalg_ldl_solve", batched("... _ _, ... _, ... _ k -> ... _ k"), linear="2"
    ),
    **rows("cholesky_solve _cholesky_solve_helper", BY_MATRIX, linear="0"),
    **rows("linalg_pinv.atol_rtol_tensor", pinv),
}
