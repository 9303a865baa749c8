"""How results grow with the batch is seen on two layers of a row as on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxpar.backend
from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.passes.layers_left_out import LayersLeftOut
from fxpar.runtime.calls import local_results
from tests.helpers.wrapper import fake_group

LAYERS, ROWS = 6, 4
Inside = Callable[..., Any]


class Net(nn.Module):
    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(LAYERS)])
        self.register_buffer("seen", torch.zeros(()))
        self.inside = inside

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.inside(self, x, positions)


def plain(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    for layer in net.layers:
        x = x + torch.relu(layer(x)) * 0.5
    return x.sum(), x.mean()


def losses_of_layers(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    """A sum that layers hand on, by linear ops, to a result that grows in part."""
    loss = x.new_zeros(())
    for layer in net.layers:
        x = x + torch.relu(layer(x))
        loss = loss + x.square().sum() + 1.0
    return loss + x.mean()


def more_in_each(net: Net, x: torch.Tensor, positions: torch.Tensor) -> Any:
    """Layers that grow with a higher power each."""
    for _ in net.layers:
        x = torch.relu(x) * x.sum() * 0.5
    return x.sum()


def more_in_one(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    """What is handed on changes once, from the first layer to the second."""
    scale = x.new_ones(())
    for layer in net.layers:
        x = layer(x) * scale
        scale = torch.relu(x.detach()).sum().clamp(min=1e-3)
    return x.sum()


def written(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    """Each layer adds to what all have, and hands that on."""
    for layer in net.layers:
        x = torch.relu(layer(x))
        net.seen.add_(x.detach().sum())
    return x.mean(), net.seen + 0.0


def written_in_part(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    """Each layer writes to what all have, which no reader of it names."""
    table = x.new_ones(2)
    for layer in net.layers:
        x = torch.relu(layer(x)) * 0.5
        table[0] = table[0] * x.detach().sum()
    return x.mean(), table.sum()


def collected(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    every = []
    for layer in net.layers:
        x = torch.relu(layer(x))
        every.append(x)
    return sum(every).sum()


def first_is_read(net: Net, x: torch.Tensor, _: torch.Tensor) -> Any:
    """Layers that read what the first of them was given, too."""
    start = x.sum()
    for layer in net.layers:
        x = torch.relu(layer(x)) + start / ROWS
    return x.mean()


def looked_up(net: Net, x: torch.Tensor, positions: torch.Tensor) -> Any:
    """Positions are handed on, and looked up behind the layers."""
    for layer in net.layers:
        x = torch.relu(layer(x)) + positions.unsqueeze(-1)
        positions = positions + 1
    return x[positions % ROWS].sum()


def looked_up_late(net: Net, x: torch.Tensor, positions: torch.Tensor) -> Any:
    """What layers hand on turns into positions from one to the next."""
    places = [torch.zeros_like(positions), torch.zeros_like(positions), positions]
    for layer in net.layers:
        x = torch.relu(layer(x)) + x.detach()[places[0] * 0]
        places = [places[1], places[2], places[2] + 0]
    return x.sum()


def compared(net: Net, x: torch.Tensor, ids: torch.Tensor) -> Any:
    same = ids[:, None] == ids[None]
    for layer in net.layers:
        x = torch.relu(layer(x)) * 0.5 + 1.0
    return (same * (x @ x.T)).mean()


# Whether layers are left out.
PROGRAMS: dict[Inside, bool] = {
    plain: True,
    losses_of_layers: True,
    more_in_each: False,
    more_in_one: False,
    written: True,
    written_in_part: False,
    collected: False,
    first_is_read: True,
    looked_up: True,
    looked_up_late: False,
    compared: True,
}


class _Stopped(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with fake_group(2):
        yield


def asked(inside: Inside) -> tuple[Any, ...]:
    """What results of a program in local mode are to be scaled by."""
    arguments: list[Any] = []

    def scale(*args: Any) -> Any:
        arguments.extend(args)
        raise _Stopped

    torch.compiler.reset()
    options = {"mesh": "dp=2", "inputs": "local", "progress": False}
    program = torch.compile(Net(inside), backend="fxpar", options=options)
    with (
        mock.patch.object(fxpar.backend, "scale_results", scale),
        pytest.raises(Exception, match="_Stopped|^$"),
    ):
        program(torch.randn(ROWS, 8), torch.arange(ROWS))
    gm, inputs, sized, parts = arguments
    local_results.name_written(gm.graph)
    return gm, inputs, sized, parts


def found(arguments: tuple[Any, ...]) -> tuple[Any, int]:
    """What is known of the program, and how many nodes were traced for it."""
    counts: list[int] = []
    export = _torch.aot.export_forward

    def counted(*args: Any) -> Any:
        traced = export(*args)
        counts.append(len(traced.graph.nodes))
        return traced

    with (
        mock.patch.object(_torch.aot, "export_forward", counted),
        mock.patch.object(local_results, "_key", lambda *_: None),
    ):
        try:
            growths = local_results._Growths(*arguments)
        except PlanError as error:
            return str(error), counts[-1]
        known = growths.last, list(growths.of.values()), growths.compared
        return known, counts[-1]


@pytest.mark.parametrize("inside", PROGRAMS, ids=lambda inside: inside.__name__)
def test_two_layers_say_what_all_do(inside: Inside) -> None:
    arguments = asked(inside)
    short, few = found(arguments)
    with mock.patch.object(
        local_results, "layers_left_out", lambda *_: LayersLeftOut()
    ):
        whole, many = found(arguments)
    assert short == whole
    assert (few < many) == PROGRAMS[inside]
