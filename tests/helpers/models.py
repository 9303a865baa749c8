"""Hugging Face models, small, with random weights from fixed seeds.

``build(name)`` gives ``(model, batch)`` for ``model(**batch).loss``, in training mode.
Every dim that a mesh of four may split divides by four; of "odd llama" none does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.helpers import device

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Batch = dict[str, torch.Tensor]

LAYERS, DROPOUT = 2, 0.1
WIDTH, WORDS = 32, 64


@dataclass(frozen=True)
class Sizes:
    """Dims of a model and its batch."""

    width: int = WIDTH
    # Of attention.
    heads: int = 4
    # Of llama: query heads, and those of keys and values.
    query_heads: int = 8
    key_heads: int = 4
    # Between the two products of a block.
    inner: int = 2 * WIDTH
    words: int = WORDS
    length: int = 8
    classes: int = 4
    # Of the first convolution; each stage doubles them.
    channels: int = 8
    # Along each side of an image, of vit and of resnet.
    pixels: int = 16
    pixels_of_resnet: int = 32
    samples: int = 8


EVEN = Sizes()
ODD = Sizes(
    width=30,
    heads=3,
    query_heads=3,
    key_heads=3,
    inner=45,
    words=101,
    length=37,
    classes=5,
    channels=7,
    pixels=20,
    pixels_of_resnet=32,
    samples=6,
)
LENGTH = EVEN.length


def _llama(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=layers,
        num_attention_heads=sizes.query_heads,
        num_key_value_heads=sizes.key_heads,
        vocab_size=sizes.words,
        max_position_embeddings=2 * sizes.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=sizes.width,
        n_layer=layers,
        n_head=sizes.heads,
        vocab_size=sizes.words,
        n_positions=2 * sizes.length,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _bert(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        vocab_size=sizes.words,
        max_position_embeddings=2 * sizes.length,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        num_labels=sizes.classes,
    )
    return BertForSequenceClassification(config)


def _vit(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        image_size=sizes.pixels,
        patch_size=4,
        num_labels=sizes.classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def _resnet(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=sizes.channels,
        hidden_sizes=[sizes.channels << stage for stage in range(layers)],
        depths=[1] * layers,
        layer_type="basic",
        num_labels=sizes.classes,
    )
    return ResNetForImageClassification(config)


def _t5(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=sizes.width,
        d_kv=sizes.width // sizes.heads,
        d_ff=sizes.inner,
        num_layers=layers,
        num_heads=sizes.heads,
        vocab_size=sizes.words,
        dropout_rate=DROPOUT,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _whisper(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=sizes.width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads,
        encoder_ffn_dim=sizes.inner,
        decoder_ffn_dim=sizes.inner,
        vocab_size=sizes.words,
        num_mel_bins=sizes.channels,
        max_source_positions=sizes.length,
        max_target_positions=sizes.length,
        dropout=DROPOUT,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config)


def _mixtral(layers: int, sizes: Sizes) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_MIXTURE,
        num_hidden_layers=layers,
        num_local_experts=4,
        intermediate_size=16,
    )
    return MixtralForCausalLM(config)


def _qwen3_moe(layers: int, sizes: Sizes) -> nn.Module:
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


def _text(size: int, sizes: Sizes) -> Batch:
    ids = torch.randint(0, sizes.words, (size, sizes.length))
    return {"input_ids": ids, "labels": ids}


def _sentences(size: int, sizes: Sizes) -> Batch:
    ids = torch.randint(0, sizes.words, (size, sizes.length))
    mask = torch.ones_like(ids)
    mask[::3, sizes.length // 2 :] = 0
    labels = torch.randint(0, sizes.classes, (size,))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _speech(size: int, sizes: Sizes) -> Batch:
    labels = torch.randint(3, sizes.words, (size, sizes.length))
    frames = torch.randn(size, sizes.channels, 2 * sizes.length)
    return {"input_features": frames, "labels": labels}


def _images(size: int, sizes: Sizes) -> Batch:
    return _labelled(size, sizes.pixels, sizes.classes)


def _large_images(size: int, sizes: Sizes) -> Batch:
    return _labelled(size, sizes.pixels_of_resnet, sizes.classes)


def _labelled(size: int, pixels: int, classes: int) -> Batch:
    labels = torch.randint(0, classes, (size,))
    return {"pixel_values": torch.randn(size, 3, pixels, pixels), "labels": labels}


_Build = Callable[[int, Sizes], nn.Module]
_MODELS: dict[str, tuple[_Build, Callable[[int, Sizes], Batch]]] = {
    "llama": (_llama, _text),
    "gpt2": (_gpt2, _text),
    "bert": (_bert, _sentences),
    "vit": (_vit, _images),
    "resnet": (_resnet, _large_images),
}

NAMES = tuple(_MODELS)
ODD_NAMES = tuple(f"odd {name}" for name in NAMES)
# Of experts: four of which two are taken, and eight.
MIXTURES = ("mixtral", "qwen3_moe")
_MODELS |= {"mixtral": (_mixtral, _text), "qwen3_moe": (_qwen3_moe, _text)}
# Encoder and decoder; the first stage and the last read one embedding.
_MODELS |= {"t5": (_t5, _text), "whisper": (_whisper, _speech)}
DRAWS_RANDOM = frozenset({"bert", "odd bert", "t5", "whisper"})


def build(name: str, size: int | None = None) -> tuple[nn.Module, Batch]:
    """A model and a batch of ``size`` samples, the same in every process. "llama/1" is
    Llama of one layer, "odd llama" one of odd sizes."""
    sizes = ODD if name.startswith("odd ") else EVEN
    name, _, layers = name.removeprefix("odd ").partition("/")
    make, batch = _MODELS[name]
    torch.manual_seed(11)
    model = make(int(layers or LAYERS), sizes).train()
    torch.manual_seed(12)
    return device.put(model), device.put(batch(size or sizes.samples, sizes))


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


def build_loss(name: str, size: int | None = None) -> tuple[nn.Module, Batch]:
    """As ``build``; the module gives the loss."""
    model, batch = build(name, size)
    return Loss(model), batch


def build_double(name: str, size: int | None = None) -> tuple[nn.Module, Batch]:
    """As ``build_loss``, computed in float64 throughout."""
    model, batch = build(name, size)
    wide = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
    return DoubleLoss(model), wide
