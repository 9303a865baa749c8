"""Kernels compile for sm_90a where there is no GPU: no spills, few registers, and
memory read in 128 bits at a time."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.kernels import samples
from tests.helpers.kernels.ahead import Compiled, compile_ahead, large

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is an interpreter here"
)

# Rows of 4096: (registers, bytes shared) at most, and loads of less than 128 bits (of
# single numbers). Triton 3.7.1; a bound for others would say nothing.
GOLDEN = {
    ("bias_dropout_residual", torch.bfloat16): (47, 0, 1),
    ("bias_dropout_residual_norm", torch.bfloat16): (71, 32, 1),
    ("residual_rms_norm", torch.bfloat16): (40, 32, 0),
    ("rms_norm_backward", torch.bfloat16): (64, 8192, 0),
    ("layer_norm_backward", torch.bfloat16): (64, 8192, 0),
    ("silu_gate", torch.bfloat16): (28, 0, 0),
    ("softmax", torch.bfloat16): (37, 32, 0),
    ("adamw", torch.float32): (54, 0, 2),
}


def check(made: Compiled) -> None:
    assert made.target == "sm_90a"
    assert made.spilled == 0


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case[0])
def test_epilogues(case: tuple[str, torch.dtype]) -> None:
    made = compile_ahead(large(*case))
    check(made)
    registers, shared, narrow = GOLDEN[case]
    assert made.loads > made.loads - made.wide_loads == narrow
    if triton.__version__.startswith("3.7."):
        assert made.registers <= registers
        assert made.shared <= shared


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("piece", samples.PIECES)
def test_every_piece(piece: str, dtype: torch.dtype) -> None:
    check(compile_ahead(large(piece, dtype)))
