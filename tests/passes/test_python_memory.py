"""Garbage while a program is compiled: what was there before is not looked through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxpar._fast.python_memory import OF_PYTHON, collect_young, old_objects_kept
from fxpar._torch import dtensor, objects
from tests.helpers.patched import needs_patches

pytestmark = needs_patches


class Ring:
    """Garbage that only a collection finds, once nobody has it."""

    def __init__(self) -> None:
        self.itself = self


def dropped() -> weakref.ref[Any]:
    return weakref.ref(Ring())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    assert gc.get_freeze_count() <= OF_PYTHON
    yield
    assert gc.get_freeze_count() <= OF_PYTHON
    assert gc.get_threshold() == before


def test_only_new_objects_are_collected() -> None:
    old = dropped()
    with old_objects_kept():
        new = dropped()
        gc.collect(0)  # both are young; all objects are a million
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_where_a_thread_waits_new_objects_are_collected() -> None:
    old = dropped()
    collect_young()  # where all objects are looked through, it is not for us to say
    assert old() is not None
    with old_objects_kept():
        new = dropped()
        collect_young()
        assert old() is not None
        assert new() is None


def test_it_ends_with_an_error() -> None:
    with pytest.raises(KeyError), old_objects_kept(), old_objects_kept():
        raise KeyError
    assert gc.get_freeze_count() <= OF_PYTHON


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with old_objects_kept(), old_objects_kept():
            new = dropped()
            assert gc.get_freeze_count() <= frozen
            gc.collect(0)
            assert new() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


class OfAUser(torch.optim.SGD): ...


def test_old_optimizers_and_tensors_are_found() -> None:
    """In forks of ``tests.helpers.prepared`` none is old, so that no rank tests it."""
    x = torch.zeros(3, requires_grad=True)
    mine = [torch.optim.SGD([x], 0.1), OfAUser([x], 0.1)]
    with old_objects_kept():
        assert {*map(id, mine)} <= {*map(id, objects.live_optimizers())}
        users = dtensor.live_users_of({objects.memory_of(x)})
        assert any(user is x for user in users)
        assert gc.get_freeze_count() > OF_PYTHON  # they are kept again
