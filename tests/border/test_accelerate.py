"""``Accelerator.prepare`` around a loop of one's own: losses and parameters are those
under DistributedDataParallel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.libraries import fxpar_options, torchrun
from tests.helpers.spawn import shared_pool

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="there is no accelerate"
    ),
]

Trained = tuple[list[float], list[float], list[torch.Tensor], str]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def loaders() -> tuple[DataLoader, DataLoader]:
    """18 samples in batches of 2 a rank: the last one takes from the first ones too."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(18, 8, generator=generator)
    y = torch.randint(0, 4, (18,), generator=generator)
    data = list(zip(x, y, strict=True))
    return DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=2)


def loop(how: str | None, folder: str = "", precision: str = "no") -> Trained:
    """Losses and gradient norms of each step, averaged over the ranks, and what is left
    after: parameters, and what the model was wrapped in. With ``folder`` the state is
    saved after two steps, spoiled, and loaded again. ``how``: see test_trainer.py."""
    import accelerate

    with torchrun():
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
        )
        accelerate.utils.set_seed(0)
        plain = Net()
        if how:
            plain.compile(**fxpar_options("local"))
        optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.01)
        train, test = loaders()
        bare = bool(how) and how.endswith("bare")
        model = accelerator.prepare_model(plain, evaluation_mode=bare)
        optimizer, train, test = accelerator.prepare(optimizer, train, test)
        losses, norms = [], []
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if folder and len(losses) == 4:
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()  # rank 0 writes what all read
                with torch.no_grad():
                    plain.up.weight.zero_()
                accelerator.load_state(folder)
        model.eval()
        with torch.no_grad():
            outs = [accelerator.gather_for_metrics(model(x)) for x, _ in test]
        assert sum(map(len, outs)) == 18
        kept = [p.detach().clone() for p in plain.parameters()]
        return losses, norms, [*kept, torch.cat(outs)], type(model).__name__


def compare(how: str, *args: Any, rel: float = 1e-5) -> str:
    pool = shared_pool(2)
    wants, runs = pool.run(loop, None, *args), pool.run(loop, how, *args)
    for (losses, norms, tensors, _), want in zip(runs, wants, strict=True):
        assert losses == pytest.approx(want[0], rel=rel)
        assert norms == pytest.approx(want[1], rel=rel)
        for x, y in zip(tensors, want[2], strict=True):
            torch.testing.assert_close(x, y, rtol=rel, atol=rel)
    return runs[0][3]


@pytest.mark.parametrize(
    ("how", "wrapper"),
    [
        ("local", "DistributedDataParallel"),
        pytest.param("local bare", "Net", marks=pytest.mark.slow),
    ],
)
def test_loop_is_that_of_ddp(how: str, wrapper: str) -> None:
    """With accumulation, clipping, and metrics of all samples."""
    assert compare(how) == wrapper


def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    compare("local bare", str(tmp_path))


@pytest.mark.slow
def test_mixed_precision() -> None:
    compare("local bare", "", "bf16", rel=2e-2)


def test_one_rank() -> None:
    (losses, *_), (want, *_) = (
        shared_pool(2).run(loop, how, ranks=1)[0] for how in ("local", None)
    )
    assert losses == pytest.approx(want, rel=1e-5)
