"""Train a small Llama: an ordinary script for one device.

    python examples/train_llama.py
    FXPAR_MESH="dp=2,tp=2" torchrun --nproc-per-node 4 examples/train_llama.py

The weights are random, the data is made up, nothing is downloaded. The one line of
fxpar is ``torch.compile(model, backend="fxpar")``; it prints the same losses on one
device and on any mesh.
"""

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, BATCH, LENGTH = 256, 8, 128


def build() -> LlamaForCausalLM:
    """A Llama of two layers; the seed makes it the same wherever it is built."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def batch(step: int) -> torch.Tensor:
    """Sequences that count up by a step of their own: easy to learn, no two alike."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCAB


def example() -> tuple:
    """What to plan: ``python -m fxpar plan examples/train_llama.py:example``."""
    ids = batch(0)
    return build(), (), {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = torch.compile(model, backend="fxpar")
    for step in range(steps):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
