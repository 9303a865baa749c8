"""Parameters that ``fxpar.shard`` split by default: the plan of the first graph uses
them as they are laid out, and layers are of one kind. By plans on one rank of a group
that does not communicate."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxpar
from fxpar import compilation
from fxpar.errors import ShardError
from fxpar.features.at_rest.crossings import layout_of
from fxpar.sharding.plan import Plan
from tests.helpers.wrapper import fake_group


class Planned(Exception):
    """In place of a run: the graph is planned."""


@pytest.fixture(autouse=True)
def _not_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def finished(self: Any, *_: Any) -> Any:
        raise Planned("planned")

    monkeypatch.setattr(compilation.Compilation, "finished", finished)
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def planned(
    layers: int, mesh: str, *, by_sample: bool = False
) -> tuple[Plan, dict[str, set[str]]]:
    """The plan of a first call, and the layouts of each kind of parameters."""
    ranks = fxpar.Mesh.parse(mesh).size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 512, (8, 64))
    batch = {"input_ids": ids, "labels": ids}
    sample = ((), batch) if by_sample else None
    seen: list[Plan] = []
    with fake_group(ranks), pytest.MonkeyPatch.context() as patch:
        model = fxpar.shard(LlamaForCausalLM(config), mesh=mesh, sample=sample)
        report = compilation.Compilation._report
        patch.setattr(
            compilation.Compilation,
            "_report",
            lambda self, plan: (seen.append(plan), report(self, plan)),
        )
        options = {"codegen": "eager", "mesh": mesh}
        run = torch.compile(model, backend="fxpar", options=options)
        with pytest.raises(Exception, match="planned"):
            run(**batch)
        layouts: dict[str, set[str]] = {}
        for name, p in model.named_parameters():
            kind = re.sub(r"\d+", "*", name)
            layouts.setdefault(kind, set()).add(str(layout_of(p)[1]))
    return seen[-1], layouts


@pytest.mark.parametrize(
    ("layers", "mesh"),
    [
        (2, "dp=2,tp=2"),
        *(
            pytest.param(layers, mesh, marks=pytest.mark.slow)
            for mesh in ("dp=2", "tp=2", "dp=2,tp=2", "tp=4")
            for layers in (2, 4)
        ),
    ],
)
def test_the_first_graph_uses_parameters_as_they_are_laid_out(
    layers: int, mesh: str
) -> None:
    plan, layouts = planned(layers, mesh)
    assert not [note for note in plan.notes if "resharded at each call" in note]
    assert all(len(specs) == 1 for specs in layouts.values()), layouts


def test_a_sample_lays_parameters_out_as_the_first_call_does() -> None:
    plan, layouts = planned(2, "dp=2,tp=2", by_sample=True)
    assert not [note for note in plan.notes if "resharded at each call" in note]
    assert layouts == planned(2, "dp=2,tp=2")[1]


def test_a_parameter_of_a_mesh_in_another_order_is_refused() -> None:
    """Other ranks hold its parts."""
    with fake_group(4):
        first = fxpar.shard(nn.Linear(8, 8), mesh="dp=2,tp=2")
        same = fxpar.shard(nn.Linear(8, 8), mesh="dp=2,tp=2")
        other = fxpar.shard(nn.Linear(8, 8), mesh="tp=2,dp=2")
        same.weight = first.weight
        with pytest.raises(ShardError, match="is replaced"):
            other.weight = first.weight
