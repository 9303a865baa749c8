"""Hugging Face's ``Trainer``: the model is compiled in place before it is given to it,
and losses and gradient norms are those under DistributedDataParallel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.libraries import EVALUATED, llama
from tests.helpers.spawn import shared_pool

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="there is no accelerate"
    ),
]

ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
TIMEOUT = 300.0


def log_of(*args: Any) -> Any:
    """As ``trainer_runs.log_of``, on a rank."""
    from tests.helpers import trainer_runs

    return trainer_runs.log_of(*args)


def close(
    got: list[tuple[str, float]], want: list[tuple[str, float]], rel: float
) -> None:
    assert [name for name, _ in got] == [name for name, _ in want]
    for (name, a), (_, b) in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=rel), name


def compare(
    how: str, settings: dict[str, Any], folder: Path, ranks: int = 2, rel: float = 2e-5
) -> str:
    pool, where = shared_pool(2), str(folder)
    wants = pool.run(log_of, None, settings, where, ranks=ranks, timeout=TIMEOUT)
    runs = pool.run(log_of, how, settings, where, ranks=ranks, timeout=TIMEOUT)
    for (got, _), (want, _) in zip(runs, wants, strict=True):
        assert len(want) >= 4
        close(got, want, rel)
    return runs[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_is_that_of_ddp(ranks: int, tmp_path: Path) -> None:
    """With accumulation, clipping and evaluation."""
    wrapper = compare("local", ACCUMULATED | EVALUATED, tmp_path, ranks)
    assert wrapper == "DistributedDataParallel"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "rel"),
    [
        ({"label_smoothing_factor": 0.1}, 2e-5),
        ({"gradient_checkpointing": True}, 2e-5),
        ({"bf16": True} | ACCUMULATED, 2e-2),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings(settings: dict[str, Any], rel: float, tmp_path: Path) -> None:
    compare("local", settings, tmp_path, rel=rel)


@pytest.mark.slow
def test_a_smaller_last_batch_on_one_rank(tmp_path: Path) -> None:
    """4 and 3 samples are the 7 of one device, counted alike, in training and between
    its evaluations. Told to, accelerate leaves out what it fills a batch up with."""
    uneven = {"count": 15, "accelerator_config": {"even_batches": False}} | EVALUATED
    pool, where = shared_pool(2), str(tmp_path)
    whole, part = ({"batch": n, "eval_batch": n // 2} | uneven for n in (8, 4))
    want, _ = pool.run(log_of, None, whole, where, ranks=1, timeout=TIMEOUT)[0]
    for got, _ in pool.run(log_of, "local", part, where, timeout=TIMEOUT):
        close(got, want, 2e-5)
        assert [name for name, _ in got].count("loss") == 2


@pytest.mark.slow
def test_without_the_wrapper(tmp_path: Path) -> None:
    """One line keeps accelerate from wrapping the model: no second all-reduce."""
    wrapper = compare("local bare", ACCUMULATED | EVALUATED, tmp_path)
    assert wrapper == "LlamaForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_global_mode_is_one_device(mesh: str, tmp_path: Path) -> None:
    """Two ranks that read every batch of four against one rank that does."""
    settings, where = {"batch": 4} | EVALUATED, str(tmp_path)
    pool, how = shared_pool(2), "global bare"
    want, _ = pool.run(log_of, how, settings, where, ranks=1, timeout=TIMEOUT)[0]
    env = {"FXPAR_MESH": mesh}
    for got, _ in pool.run(log_of, how, settings, where, env=env, timeout=TIMEOUT):
        close(got, want, 2e-5)


@pytest.mark.slow
def test_counts_that_differ_between_ranks(tmp_path: Path) -> None:
    """Each rank divides by its own count of tokens, as under DDP. By SGD: AdamW makes
    steps of their own of gradients that are rounding errors."""
    settings = {"average_tokens_across_devices": False, "optim": "sgd"}
    compare("local", settings, tmp_path)


def resumed(folder: str) -> Any:
    """As ``trainer_runs.resumed``, on a rank."""
    from tests.helpers import trainer_runs

    return trainer_runs.resumed(folder)


@pytest.mark.slow
def test_checkpoints_resume_and_the_best_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    results = shared_pool(2).run(resumed, str(tmp_path), timeout=TIMEOUT)
    for whole, again, (first, second), best in results:
        close(again[-4:], whole[-4:], 1e-6)
        saved = load_file(f"{best}/model.safetensors")
        names = [name for name, _ in llama().named_parameters()]
        for name, p, q in zip(names, first, second, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
            assert torch.equal(q, saved[name])


def test_the_backend_is_not_one_of_accelerates(tmp_path: Path) -> None:
    """Why the model is compiled first: accelerate takes backends of its own list."""
    from tests.helpers import trainer_runs

    with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
        trainer_runs.trainer(str(tmp_path), torch_compile_backend="fxpar")
