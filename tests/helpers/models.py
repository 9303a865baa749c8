"""Hugging Face models, small, with random weights from fixed seeds.

``build(name)`` gives ``(model, batch)`` for ``model(**batch).loss``, in training mode.
Every dim that a mesh of four may split divides by four.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Batch = dict[str, torch.Tensor]

WIDTH, LAYERS, WORDS, LENGTH, CLASSES = 32, 2, 64, 8, 4
DROPOUT = 0.1


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=2 * LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=layers,
        n_head=4,
        vocab_size=WORDS,
        n_positions=2 * LENGTH,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _bert(layers: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=2 * LENGTH,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        num_labels=CLASSES,
    )
    return BertForSequenceClassification(config)


def _vit(layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def _resnet(layers: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8 << stage for stage in range(layers)],
        depths=[1] * layers,
        layer_type="basic",
        num_labels=CLASSES,
    )
    return ResNetForImageClassification(config)


def _mixtral(layers: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_MIXTURE,
        num_hidden_layers=layers,
        num_local_experts=4,
        intermediate_size=16,
    )
    return MixtralForCausalLM(config)


def _qwen3_moe(layers: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_MIXTURE,
        num_hidden_layers=layers,
        head_dim=8,
        num_experts=8,
        moe_intermediate_size=16,
        intermediate_size=WIDTH,
    )
    return Qwen3MoeForCausalLM(config)


_MIXTURE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 2 * LENGTH,
    "use_cache": False,
}


def _text(size: int) -> Batch:
    ids = torch.randint(0, WORDS, (size, LENGTH))
    return {"input_ids": ids, "labels": ids}


def _sentences(size: int) -> Batch:
    ids = torch.randint(0, WORDS, (size, LENGTH))
    mask = torch.ones_like(ids)
    mask[::3, LENGTH // 2 :] = 0
    labels = torch.randint(0, CLASSES, (size,))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _images(pixels: int) -> Callable[[int], Batch]:
    def make(size: int) -> Batch:
        labels = torch.randint(0, CLASSES, (size,))
        return {"pixel_values": torch.randn(size, 3, pixels, pixels), "labels": labels}

    return make


_MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Batch]]] = {
    "llama": (_llama, _text),
    "gpt2": (_gpt2, _text),
    "bert": (_bert, _sentences),
    "vit": (_vit, _images(16)),
    "resnet": (_resnet, _images(32)),
}

NAMES = tuple(_MODELS)
# Of experts: four of which two are taken, and eight.
MIXTURES = ("mixtral", "qwen3_moe")
_MODELS |= {"mixtral": (_mixtral, _text), "qwen3_moe": (_qwen3_moe, _text)}
DRAWS_RANDOM = frozenset({"bert"})


def build(name: str, size: int = 8) -> tuple[nn.Module, Batch]:
    """A model and a batch of ``size`` samples, the same in every process. "llama/1" is
    Llama of one layer."""
    name, _, layers = name.partition("/")
    make, batch = _MODELS[name]
    torch.manual_seed(11)
    model = make(int(layers or LAYERS)).train()
    torch.manual_seed(12)
    return model, batch(size)


class AllDouble(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            return args[0].double()
        wider = {k: wide(v) for k, v in (kwargs or {}).items()}
        return func(*map(wide, args), **wider)


class Loss(nn.Module):
    """The loss of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


class DoubleLoss(Loss):
    """The loss of a model, all of it in float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.double())

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        with AllDouble():
            return super().forward(**batch)


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Inside, tensors are made in float64, as ``build_double``'s modules need."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_loss(name: str, size: int = 8) -> tuple[nn.Module, Batch]:
    """As ``build``; the module gives the loss."""
    model, batch = build(name, size)
    return Loss(model), batch


def build_double(name: str, size: int = 8) -> tuple[nn.Module, Batch]:
    """As ``build_loss``, computed in float64 throughout."""
    model, batch = build(name, size)
    wide = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    return DoubleLoss(model), wide
