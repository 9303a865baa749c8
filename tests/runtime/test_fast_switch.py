"""Patches that only save time: one switch, none on one rank alone, equal numbers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxpar
from fxpar._fast import switch
from fxpar._fast.python_memory import in_one_block
from fxpar._torch import aot, dynamo
from tests.helpers.patched import needs_patches
from tests.helpers.spawn import shared_pool
from tests.helpers.training import whole


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    switch.is_on.cache_clear()
    yield
    switch.is_on.cache_clear()


@pytest.mark.parametrize("version", ["2.13.1+cpu", "2.12.0", "2.14.1", "2.15.0a0"])
def test_other_torch_is_left_as_it_is(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_proved = version.startswith(("2.13", "2.15"))
    monkeypatch.setattr(switch, "torch", SimpleNamespace(__version__=version))
    with caplog.at_level(logging.INFO, "fxpar"):
        assert [switch.is_on() for _ in range(2)] == [is_proved] * 2
    assert len(caplog.records) == (not is_proved)


def test_the_user_turns_all_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_FAST", "0")
    assert not switch.is_taken("quick_graphs")


@needs_patches
def test_the_first_patches_and_the_last_undoes() -> None:
    log: list[str] = []

    @switch.shortcut
    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        log.append("patched")
        yield
        log.append("undone")

    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with patched():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with patched(), patched():
        thread.start()
        assert entered.wait(60)
    assert log == ["patched"]
    left.set()
    thread.join()
    assert log == ["patched", "undone"]


@needs_patches
def test_what_fails_to_patch_is_not_undone() -> None:
    @switch.shortcut
    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        raise KeyError
        yield

    for _ in range(2):
        with pytest.raises(KeyError), failing():
            pass


def test_a_function_in_one_block_is_the_function() -> None:
    def fn(a: int, *more: int, b: int = 2) -> tuple[object, ...]:
        """Of a function."""
        if a < 0:
            raise ValueError(a)
        return a, more, b

    roomy = in_one_block(fn)
    assert roomy(1, 3, b=4) == (1, (3,), 4) and roomy(a=1) == (1, (), 2)
    assert (roomy.__name__, roomy.__doc__) == ("fn", "Of a function.")
    with pytest.raises(ValueError, match="-1"):
        roomy(-1)


class Layers(nn.Module):
    """Layers that repeat, with a branch of their own."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def stepped(mesh: str) -> dict[str, torch.Tensor]:
    """Gradients of a model; on one device without a mesh."""
    switch.is_on.cache_clear()
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(8, 16, dtype=torch.float64)
    call = model
    if mesh:
        model = fxpar.shard(model, mesh=mesh)
        options = {"mesh": mesh, "codegen": "eager"}
        call = torch.compile(model, backend="fxpar", options=options)
    call(x).backward()
    switch.is_on.cache_clear()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.multiprocess
def test_numbers_are_the_same_without() -> None:
    want = stepped("")
    for got in shared_pool(2).run(stepped, "dp=2", env={"FXPAR_FAST": "0"}):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_one_rank_alone_goes_through_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> bool:
        raise AssertionError(f"{name} is asked for")

    for module in (switch, dynamo, aot):
        monkeypatch.setattr(module, "is_taken", refuse)
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Layers(1), torch.randn(8, 16)
    torch.compile(model, backend="fxpar")(x).backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])
