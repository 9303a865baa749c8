"""Local forms of ops that are copies of those of others, and those made alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

import fxpar
from fxpar.passes.local import known_forms
from fxpar.passes.local.known_forms import KnownForms
from fxpar.passes.local.local_ops import local_op
from fxpar.sharding.propagate.propagation import Propagation

MESH = "dp=2,tp=2"


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Heads are views of a product, and so is what is made of them."""
    heads = (x @ w).view(*x.shape[:2], 4, -1).transpose(1, 2)
    weights = torch.softmax(heads @ heads.mT * 0.5, -1)
    return x + (weights @ heads).transpose(1, 2).reshape(x.shape)


def zeros(x: Tensor, w: Tensor) -> Tensor:
    return x * 0.0 + x * -0.0 + x * 0 + x @ w


def twice(x: Tensor, w: Tensor) -> Tensor:
    """Values that are read twice, and others like them that are not."""
    y = x @ w
    return torch.relu(y * y + y * x + x * x)


def shown(x: Tensor, w: Tensor) -> Tensor:
    """What is shown in another shape is read with itself, and with another."""
    flat, other = x.view(-1, x.shape[-1]), (x * 2).view(-1, x.shape[-1])
    own = flat.view(x.shape) * x + other.view(x.shape) * x
    return (own + x[:, :1]).mean(1, keepdim=True) + x @ w


LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    layer.__name__: layer for layer in (attention, zeros, twice, shown)
}


def planned(layer: Callable[[Tensor, Tensor], Tensor], count: int) -> Any:
    def program(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = layer(x, w)
        return x.sum()

    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(count)]
    x = torch.randn(8, 6, 16)
    return fxpar.plan(program, x, *weights, mesh=MESH, mode="propagate", grad=True)


def lines(graph: fx.Graph) -> Iterator[Any]:
    """Nodes as they are, what they note and give; of memory who has it first."""
    first: dict[int, str] = {}
    numbers: dict[Any, int] = {}  # autograd counts on from program to program
    for node in graph.nodes:
        value = node.meta.get("val")
        facts: Any = value
        if isinstance(value, torch.Tensor):
            place = value.untyped_storage()._cdata
            offset = value.storage_offset()
            facts = value.dtype, value.shape, value.stride(), offset, value.device
            facts = *facts, first.setdefault(place, node.name)
        plain = ("val", "tensor_meta", "from_node", "nn_module_stack")
        notes = {key: str(x) for key, x in node.meta.items() if key not in plain}
        numbers.setdefault(node.meta.get("seq_nr"), len(numbers))
        notes["seq_nr"] = str(numbers[node.meta.get("seq_nr")])
        call = node.op, node.name, str(node.target), str(node.args), str(node.kwargs)
        yield *call, facts, notes


def by_itself(self: KnownForms, node: Any, op: Any, strategy: Any, local: Any) -> Any:
    return local_op(self.build, node, op, self.program, strategy, local)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_are_what_ops_are_made_by_themselves(name: str) -> None:
    graphs = []
    for made in (KnownForms.local_op, by_itself):
        with mock.patch.object(KnownForms, "local_op", made):
            local = planned(LAYERS[name], 3).result.local
        graphs.append(list(lines(local)))
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", ["attention", "twice"])
def test_more_layers_are_not_made_local_again(name: str) -> None:
    """Ops whose local form is not by values are few here, and in each layer."""

    def asked(count: int) -> int:
        with mock.patch.object(known_forms, "local_op", side_effect=local_op) as made:
            planned(LAYERS[name], count)
        calls = [call.args for call in made.mock_calls]
        kinds = [(op.target, op.rule, strategy) for _, _, op, _, strategy, _ in calls]
        return sum(known_forms.is_by_values(*kind) for kind in kinds)

    assert asked(6) == asked(4)


@pytest.mark.parametrize("name", LAYERS)
def test_known_visits_leave_the_state_that_visits_leave(name: str) -> None:
    states: list[Any] = []

    def seed(self: Propagation, seeds: Any) -> None:
        original(self, seeds)
        state = self.state
        states.append((state.dims, state.origins, state.indivisible))

    original = Propagation.seed
    with mock.patch.object(Propagation, "seed", seed):
        planned(LAYERS[name], 3)
        known, states = states, []
        with mock.patch.object(Propagation, "_visit", Propagation._apply):
            planned(LAYERS[name], 3)
    assert known == states


def test_more_layers_are_not_visited_again() -> None:
    def applied(count: int) -> int:
        original = Propagation._apply
        with mock.patch.object(Propagation, "_apply", autospec=True) as visits:
            visits.side_effect = original
            planned(twice, count)
        return visits.call_count

    assert applied(8) - applied(6) < 20
