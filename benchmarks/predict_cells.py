"""What ``bench_predict`` measures: models, meshes, plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from _common import llama

HELD_MODELS, HELD_MESHES = {"gpt2"}, {"dp=2,tp=2"}

_COLUMN, _ROW = ("tp", None), (None, "tp")
# Megatron's layout, by parameter names; on a mesh with dp the batch lies along it.
MEGATRON: dict[str, dict[str, Any]] = {
    "mlp": {"*.0.weight": _COLUMN, "*.2.weight": _ROW, "*.4.weight": _COLUMN},
    "llama": {
        **{f"*{n}_proj.weight": _COLUMN for n in ("q", "k", "v", "gate", "up")},
        **{f"*{n}_proj.weight": _ROW for n in ("o", "down")},
        "*lm_head.weight": _COLUMN,
    },
    "bert": {
        **{f"*{n}.weight": _COLUMN for n in ("query", "key", "value")},
        "*attention.output.dense.weight": _ROW,
        "*intermediate.dense.weight": _COLUMN,
        "*layer.*.output.dense.weight": _ROW,
    },
    "vit": {
        **{f"*{n}.weight": _COLUMN for n in ("query", "key", "value")},
        "*attention.output.dense.weight": _ROW,
        "*intermediate.dense.weight": _COLUMN,
        "*layer.*.output.dense.weight": _ROW,
    },
    "gpt2": {  # its matrices lie the other way round
        "*c_attn.weight": _ROW,
        "*c_fc.weight": _ROW,
        "*c_proj.weight": _COLUMN,
    },
    "resnet": {},
}


@dataclass(frozen=True)
class Cell:
    """``plan``: propagate (data parallel, by convention), megatron (the hints above),
    replicate or search."""

    model: str
    mesh: str
    plan: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.mesh} {self.plan}"

    @property
    def ranks(self) -> int:
        size = 1
        for axis in self.mesh.split(","):
            size *= int(axis.partition("=")[2])
        return size

    @property
    def held(self) -> bool:
        return self.model in HELD_MODELS or self.mesh in HELD_MESHES

    @property
    def mode(self) -> str:
        return "propagate" if self.plan == "megatron" else self.plan

    def hints(self, model: Any) -> dict[str, Any] | None:
        """Where each parameter lies; what has no hint is whole."""
        if self.plan != "megatron":
            return None
        found = {}
        for name, parameter in model.named_parameters():
            rows = MEGATRON[self.model].items()
            fits = (entry for pattern, entry in rows if fnmatch(name, pattern))
            found[name] = next(fits, (None,) * parameter.dim())
        return found


CELLS = tuple(
    Cell(*line.split())
    for line in """\
mlp dp=2 propagate
mlp tp=2 megatron
mlp dp=4 propagate
mlp tp=4 megatron
mlp pp=2 propagate
mlp dp=2 search
mlp dp=2,tp=2 megatron
mlp pp=2,dp=2 propagate
llama dp=2 propagate
llama tp=2 megatron
llama dp=4 propagate
llama tp=4 megatron
llama pp=2 propagate
llama dp=2 replicate
llama tp=2 search
llama dp=2,tp=2 megatron
llama pp=2,dp=2 propagate
bert dp=2 propagate
bert tp=2 megatron
bert tp=4 megatron
vit dp=2 propagate
vit tp=2 megatron
vit pp=2 propagate
vit dp=4 propagate
resnet dp=2 propagate
resnet dp=4 propagate
resnet dp=2 replicate
resnet dp=2,tp=2 propagate
gpt2 dp=2 propagate
gpt2 tp=2 megatron
gpt2 dp=4 propagate
gpt2 tp=4 megatron
gpt2 dp=2,tp=2 megatron
gpt2 dp=2 replicate
gpt2 pp=2 propagate
""".splitlines()
)


# Else the first call writes it into the config, and the model is compiled again.
_CLASSES = "single_label_classification"


def _mlp() -> tuple[Any, dict[str, Any]]:
    import torch
    from torch import nn

    width = 1024
    layers = [nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(width, 512))
    return net, {"x": torch.randn(512, 512), "y": torch.randn(512, 512)}


def _words(size: int, length: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(0, 2048, (size, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _llama() -> tuple[Any, dict[str, Any]]:
    return llama(2), _words(8, 128)


def _gpt2() -> tuple[Any, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_embd": 320, "n_layer": 3, "n_head": 8, "n_positions": 128}
    shape |= {"vocab_size": 2048, "tie_word_embeddings": False, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**shape, **drops))
    model.loss_type = "ForCausalLM"  # else a warning breaks the graph
    return model, _words(8, 128)


def _bert() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=2048,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
        problem_type=_CLASSES,
    )
    batch = _words(8, 64)
    batch["labels"] = torch.randint(0, 4, (8,))
    return BertForSequenceClassification(config), batch


def _pictures(size: int, pixels: int) -> dict[str, Any]:
    import torch

    pictures = torch.randn(size, 3, pixels, pixels)
    return {"pixel_values": pictures, "labels": torch.randint(0, 8, (size,))}


def _vit() -> tuple[Any, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=8,
        problem_type=_CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config), _pictures(16, 64)


def _resnet() -> tuple[Any, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        layer_type="basic",
        num_labels=8,
        problem_type=_CLASSES,
    )
    return ResNetForImageClassification(config), _pictures(16, 64)


_MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "mlp": _mlp,
    "llama": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "resnet": _resnet,
}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A module that gives the loss of a batch, and the batch; the same everywhere."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model, batch = _MODELS[name]()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            if "y" in batch:
                return nn.functional.mse_loss(self.model(batch["x"]), batch["y"])
            return self.model(**batch).loss

    return Loss().train(), batch
