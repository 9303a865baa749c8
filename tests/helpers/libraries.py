"""What the tests of libraries that own the training loop share: a small model, its data
and ranks that look to a library as those of torchrun do."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import models  # noqa: F401  (no library may look for a model on the net)

WORDS, LENGTH = 32, 8
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}  # of Hugging Face's Trainer

Row = dict[str, torch.Tensor]
Compiled = dict[str, Any]


def fxpar_options(inputs: str, **more: Any) -> Compiled:
    """Arguments of ``compile``."""
    options = {"codegen": "eager", "inputs": inputs, **more}
    return {"backend": "fxpar", "options": options}


def rows(count: int, seed: int = 0) -> list[Row]:
    """Sentences; of each another part has no label, so that ranks count differently."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        words = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[: i % 5] = -100
        out.append({"input_ids": words, "labels": labels})
    return out


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@contextlib.contextmanager
def torchrun() -> Iterator[None]:
    """The environment of a rank under torchrun; what accelerate remembers is forgotten,
    and what libraries warn of on a machine without GPUs is not shown."""
    torch._dynamo.reset()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
