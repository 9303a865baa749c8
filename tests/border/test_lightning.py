"""PyTorch Lightning's ``Trainer``, with a strategy of one file: what it logs and the
parameters it leaves are those of ``DDPStrategy``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.spawn import shared_pool

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("pytorch_lightning") is None,
        reason="there is no pytorch_lightning",
    ),
]


def fit(*args: Any) -> Any:
    """As ``lightning_fit.fit``, on a rank."""
    from tests.helpers import lightning_fit

    return lightning_fit.fit(*args)


def compare(folder: Path, precision: str = "32-true", rel: float = 1e-5) -> None:
    pool = shared_pool(2)
    runs = pool.run(fit, True, str(folder), False, precision)
    # Behind it: fxpar looks on, and a closure completes gradients that DDP accumulates.
    wants = pool.run(fit, False, str(folder), False, precision)
    for (norms, state, loss), want in zip(runs, wants, strict=True):
        assert len(norms) == 6
        assert norms == pytest.approx(want[0], rel=rel)
        assert loss == pytest.approx(want[2], rel=rel)
        assert list(state) == list(want[1])
        for name, x in state.items():
            torch.testing.assert_close(x, want[1][name], rtol=rel, atol=rel)


def test_fit_is_that_of_ddp(tmp_path: Path) -> None:
    """With accumulation, clipping and validation."""
    compare(tmp_path)


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path) -> None:
    compare(tmp_path, "bf16-mixed", 2e-2)


def test_checkpoint_of_ddp_is_loaded(tmp_path: Path) -> None:
    """A run that has ended goes no further, and leaves what was saved."""
    pool = shared_pool(2)
    _, want, _ = pool.run(fit, False, str(tmp_path))[0]
    for norms, state, _ in pool.run(fit, True, str(tmp_path), True):
        assert norms == []
        assert all(torch.equal(state[name], x) for name, x in want.items())
