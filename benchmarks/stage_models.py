"""Models of ``bench_stages``, by name: those whose stages others published."""

from __future__ import annotations

from collections.abc import Callable

import expert_models
import nets
import torch
from _common import llama
from torch import nn

# A module that gives the loss of a batch, and the batch.
Built = tuple[nn.Module, dict[str, torch.Tensor]]

# Of Wide-ResNets (Zagoruyko and Komodakis, 2016), by layers: blocks of each width.
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def build(name: str, layers: int, batch: int, length: int) -> Built:
    """``name``: a kind, and its sizes as its builder takes them; ``length``: tokens of
    a sequence, or pixels along a side."""
    kind, *sizes = name.split("-")
    return BUILDERS[kind](layers, batch, length, *map(int, sizes))


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def _words(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _llama(scale: str) -> Callable[..., Built]:
    return lambda layers, batch, length: (
        _Loss(llama(layers, scale=scale)),
        _words(batch, length),
    )


def _gpt(layers: int, batch: int, length: int, width: int, heads: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=51200,
        n_positions=length,
        n_embd=width,
        n_head=heads,
        n_layer=layers,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _Loss(GPT2LMHeadModel(config)), _words(batch, length)


def _dense(layers: int, batch: int, length: int, width: int, inner: int) -> Built:
    """GSPMD's Transformer (arXiv 2105.04663, section 5.1): 128 heads of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=128,
        num_key_value_heads=128,
        head_dim=128,
        num_hidden_layers=layers,
        use_cache=False,
    )
    return _Loss(LlamaForCausalLM(config)), _words(batch, length)


def _mixture(layers: int, batch: int, length: int, width: int, experts: int) -> Built:
    """Alpa's mixture of experts (arXiv 2201.12023, table 6), two sequences a group. Of
    its two experts for a token one here, with room for two: the same products."""
    model = expert_models.MixtureLM(
        layers, width, 8 * width, experts, 32000, heads=16, spare=2.0, group=2
    )
    return model, _words(batch, length)


def _wide_resnet(layers: int, batch: int, pixels: int, base: int, wide: int) -> Built:
    """Alpa's Wide-ResNet (arXiv 2201.12023, table 7) without its normalisation."""
    images = torch.zeros(batch, 3, pixels, pixels)
    labels = torch.zeros(batch, dtype=torch.long)
    return nets.resnet(BLOCKS[layers], base, wide), {"x": images, "y": labels}


BUILDERS: dict[str, Callable[..., Built]] = {
    "70b": _llama("70b"),
    "405b": _llama("405b"),
    "gpt": _gpt,
    "dense": _dense,
    "moe": _mixture,
    "wresnet": _wide_resnet,
}
