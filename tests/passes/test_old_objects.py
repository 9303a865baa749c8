"""Garbage while a program is compiled: what was there before is not looked through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslator

import fxpar
from fxpar._fast.old_objects import OF_PYTHON, OLDER, RARER, old_objects_kept
from fxpar._torch import dynamo
from tests.helpers.patched import needs_patches

pytestmark = needs_patches


class Ring:
    """Garbage that only a collection finds, once nobody has it."""

    def __init__(self) -> None:
        self.itself = self


def dropped() -> weakref.ref[Any]:
    return weakref.ref(Ring())


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.collect()
    before = gc.get_threshold()
    assert gc.get_freeze_count() <= OF_PYTHON
    yield
    assert gc.get_freeze_count() <= OF_PYTHON
    assert gc.get_threshold() == before


def test_only_new_objects_are_collected() -> None:
    old = dropped()
    with old_objects_kept():
        new = dropped()
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_new_objects_are_looked_through_more_rarely() -> None:
    young, *_ = gc.get_threshold()
    with old_objects_kept(), old_objects_kept():
        assert gc.get_threshold() == (RARER * young, OLDER, OLDER)


def test_it_ends_with_an_error() -> None:
    with pytest.raises(KeyError), old_objects_kept(), old_objects_kept():
        raise KeyError
    assert gc.get_freeze_count() <= OF_PYTHON


def test_what_python_froze_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 keeps objects that never die apart, as if they were frozen."""
    young, *_ = gc.get_threshold()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "get_freeze_count", lambda: 375)
        with old_objects_kept():
            assert gc.get_threshold()[0] == RARER * young


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with old_objects_kept(), old_objects_kept():
            new = dropped()
            assert gc.get_freeze_count() <= frozen
            gc.collect()
            assert new() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


OPTIONS = {"mesh": "dp=1", "codegen": "eager"}


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether old objects were kept, of each frame that Dynamo traces."""
    torch.compiler.reset()
    run, frozen = InstructionTranslator.run, list[bool]()

    def noted(self: Any) -> None:
        frozen.append(gc.get_freeze_count() > OF_PYTHON)
        run(self)

    monkeypatch.setattr(InstructionTranslator, "run", noted)
    return frozen


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_dynamo_traces_inside_for_several_ranks(
    frozen: list[bool], whole: bool, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo, "is_only_rank", lambda: is_alone)
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(
        model, backend="fxpar", options=OPTIONS, dynamic=False, fullgraph=whole
    )
    torch.testing.assert_close(compiled(torch.ones(2, 2)), model(torch.ones(2, 2)))
    assert frozen == [not is_alone]


@pytest.mark.parametrize("is_alone", [False, True])
def test_dynamo_traces_a_step_inside(
    frozen: list[bool], is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo, "is_only_rank", lambda: is_alone)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    fxpar.train_step(model, loss, optimizer, options=OPTIONS)(torch.ones(2, 2))
    assert frozen == [not is_alone]


def test_other_backends_trace_outside(
    frozen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo, "is_only_rank", lambda: False)
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2, 2))
    assert frozen == [False]
