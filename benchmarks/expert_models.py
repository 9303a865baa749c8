"""Seven models at realistic sizes with what experts would hint; to plan, not to run.

``MODELS[name]``: a ``Model``, whose ``build(layers)`` gives ``(module, batch)`` for
``module(**batch)``, the loss. Call it on fake tensors. Depths that only repeat can be
cut. Hints are entries per dim by name pattern, as ``fxpar.plan`` takes them; ``tp`` is
the axis that Megatron splits weights over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from _common import llama
from torch import nn

Hints = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Model:
    """``tp``: hints of the Megatron plan, none where there is no such plan.
    ``columns``: weights whose products Megatron splits along the last dim, sequences
    whole. ``experts``: parameters whose first dim counts experts. ``depth``: layers of
    the whole model. ``one``: whether there is one sample only."""

    build: Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]
    depth: int
    what: str
    tp: Hints = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    experts: str | None = None
    one: bool = False


class Loss(nn.Module):
    """The loss of a Hugging Face model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


def _ids(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _llama(batch: int, length: int) -> Callable[[int], Any]:
    return lambda layers: (Loss(llama(layers, scale="8b")), _ids(batch, length))


def _gpt2(layers: int) -> Any:
    """GPT-2 medium; the vocabulary padded as Megatron pads it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=1024, n_layer=layers, n_head=16, vocab_size=50304, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return Loss(GPT2LMHeadModel(config)), _ids(64, 1024)


def _bert(layers: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=30592,
    )
    return Loss(BertForMaskedLM(config).train()), _ids(128, 512)


def _images(batch: int) -> dict[str, torch.Tensor]:
    labels = torch.zeros(batch, dtype=torch.long)
    return {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": labels}


def _vit(layers: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.initialization import no_init_weights

    config = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_labels=1000,
        hidden_dropout_prob=0.0,
    )
    with no_init_weights():  # its draws look at values, which fake tensors lack
        model = ViTForImageClassification(config)
    return Loss(model.train()), _images(512)


def _resnet(layers: int) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    del layers  # all different
    config = ResNetConfig(num_labels=1000)
    return Loss(ResNetForImageClassification(config).train()), _images(512)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        parts = (
            f(x).view(b, s, self.heads, -1).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Switch(nn.Module):
    """A mixture of experts: each token goes to the best one, if it has room there.

    Source: Fedus et al., Switch Transformers (2021), in the einsum form of GShard
    (Lepikhin et al., 2020, algorithm 1): so many sequences are a group.
    """

    def __init__(
        self, width: int, inner: int, experts: int, spare: float, group: int = 1
    ) -> None:
        super().__init__()
        self.spare, self.group = spare, group
        self.gate = nn.Parameter(torch.randn(width, experts) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x``: [sequences, tokens, width] -> the same, and the loss of unequal
        load."""
        if self.group > 1:
            joined = x.shape[0] // self.group, self.group * x.shape[1], x.shape[2]
            y, load = self._of_groups(x.reshape(joined))
            return y.reshape(x.shape), load
        return self._of_groups(x)

    def _of_groups(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts = self.gate.shape[1]
        room = int(x.shape[1] * self.spare / experts)
        gates = torch.einsum("gsm,me->gse", x, self.gate).float().softmax(-1)
        best, index = gates.max(-1)
        chosen = F.one_hot(index, experts).float()
        load = (chosen.mean(1) * gates.mean(1)).sum(-1).mean() * experts
        place = (chosen.cumsum(1) - 1) * chosen
        inside = chosen * (place < room)
        slots = F.one_hot(place.sum(-1).long().clamp(max=room - 1), room).float()
        combine = torch.einsum("gs,gse,gsc->gsec", best, inside, slots).to(x.dtype)
        dispatch = (combine > 0).to(x.dtype)
        sent = torch.einsum("gsec,gsm->egcm", dispatch, x)
        inner = F.gelu(torch.einsum("egcm,emf->egcf", sent, self.up))
        made = torch.einsum("egcf,efm->egcm", inner, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, made), load


class MixtureLM(nn.Module):
    """A causal language model whose every second layer is a Switch."""

    def __init__(
        self,
        layers: int,
        width: int,
        inner: int,
        experts: int,
        words: int,
        *,
        heads: int = 0,
        spare: float = 1.25,
        group: int = 1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.attention = nn.ModuleList(
            Attention(width, heads or width // 128) for _ in range(layers)
        )
        self.up = nn.ModuleList(
            nn.Linear(width, inner, bias=False) for _ in range(layers // 2)
        )
        self.down = nn.ModuleList(
            nn.Linear(inner, width, bias=False) for _ in range(layers // 2)
        )
        self.switch = nn.ModuleList(
            Switch(width, inner, experts, spare, group) for _ in range(layers // 2)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        total = torch.zeros((), device=x.device)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x))
            y = self.norms[2 * i + 1](x)
            if i % 2:
                y, load = self.switch[i // 2](y)
                total = total + 0.01 * load
            else:
                y = self.down[i // 2](F.gelu(self.up[i // 2](y)))
            x = x + y
        logits = self.head(self.norms[-1](x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + total


def _moe(layers: int) -> Any:
    return MixtureLM(layers, 1024, 4096, 64, 32000), _ids(64, 1024)


def _weights(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in names)


def _split(columns: tuple[str, ...], rows: tuple[str, ...]) -> Hints:
    """Hints for weights of nn.Linear, and for the biases of columns."""
    out: dict[str, tuple[Any, ...]] = dict.fromkeys(columns, ("tp", None))
    return out | dict.fromkeys(rows, (None, "tp"))


def _biases(names: tuple[str, ...]) -> Hints:
    return {name.removesuffix("weight") + "bias": ("tp",) for name in names}


_LLAMA = _weights(*(f"*.{n}_proj" for n in ("q", "k", "v", "gate", "up")), "*lm_head")
_LLAMA_TP = {
    **_split(_LLAMA, _weights("*.o_proj", "*.down_proj")),
    "*.embed_tokens.weight": ("tp", None),
}
_GPT2 = _weights("*.c_attn", "*.c_fc", "*.wte")
_GPT2_TP: Hints = {
    # Weights lie transposed; the fused projection follows the one behind it.
    "*.c_fc.weight": (None, "tp"),
    "*.c_fc.bias": ("tp",),
    "*.c_proj.weight": ("tp", None),
    "*.wte.weight": ("tp", None),
}
_BERT = _weights(
    *(f"*.self.{n}" for n in ("query", "key", "value")), "*.intermediate.dense"
)
_BERT_TP = {
    **_split(_BERT, _weights("*.layer.*.output.dense")),
    **_biases(_BERT),
    "*.word_embeddings.weight": ("tp", None),
}
_VIT = _weights(*(f"*.attention.{n}_proj" for n in "qkv"), "*.mlp.fc1")
_VIT_TP = {
    **_split(_VIT, _weights("*.attention.o_proj", "*.mlp.fc2")),
    **_biases(_VIT),
}
_MOE = _weights("*.query", "*.key", "*.value", "up.*", "head")
_MOE_TP = {
    **_split(_MOE, _weights("*.out", "down.*")),
    "embed.weight": ("tp", None),
    "switch.*.up": (None, None, "tp"),
    "switch.*.down": (None, "tp", None),
}

MODELS: dict[str, Model] = {
    "llama-8b": Model(
        _llama(64, 4096), 32, "Llama 8B, 64 x 4096 tokens", _LLAMA_TP, _LLAMA
    ),
    "gpt2-medium": Model(_gpt2, 24, "GPT-2 medium, 64 x 1024 tokens", _GPT2_TP, _GPT2),
    "bert-large": Model(
        _bert,
        24,
        "BERT large, 128 x 512 tokens",
        _BERT_TP,
        (*_BERT, "*.word_embeddings.weight"),
    ),
    "vit-l": Model(_vit, 24, "ViT-L/16, 512 images", _VIT_TP, _VIT),
    "resnet-50": Model(_resnet, 1, "ResNet-50, 512 images"),
    "moe": Model(
        _moe,
        24,
        "Switch of 64 experts, 64 x 1024 tokens",
        _MOE_TP,
        _MOE,
        experts="switch.*.[ud]*",
    ),
    "llama-long": Model(
        _llama(1, 131072),
        32,
        "Llama 8B, 1 x 131072 tokens",
        _LLAMA_TP,
        _LLAMA,
        one=True,
    ),
}


def _mixtral(layers: int, batch: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.initialization import no_init_weights

    config = MixtralConfig(num_hidden_layers=layers, use_cache=False)
    with no_init_weights():
        return Loss(MixtralForCausalLM(config)), _ids(batch, 4096)


def _qwen3_moe(layers: int, batch: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.initialization import no_init_weights

    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        use_cache=False,
    )
    with no_init_weights():
        return Loss(Qwen3MoeForCausalLM(config)), _ids(batch, 4096)


# Dropless mixtures: (layers, batch) -> (module, batch).
MIXTURES: dict[str, Callable[[int, int], Any]] = {
    "mixtral-8x7b": _mixtral,
    "qwen3-30b-a3b": _qwen3_moe,
}
