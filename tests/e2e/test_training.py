"""Real models trained on four ranks: losses and gradients are those of one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.machines import machine
from tests.helpers.models import NAMES
from tests.helpers.spawn import ranks_of
from tests.helpers.training import (
    STEPS,
    compare,
    one_device,
    train,
)

pytestmark = pytest.mark.multiprocess

MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "a=2,b=1,c=2")


ON_TWO = [("resnet", "dp=2"), ("llama/3", "tp=2")]

# The rest of the table is behind the marker slow.
QUICK = [("llama/1", "dp=2")]


def cases() -> Iterator[object]:
    for name, mesh in (*QUICK, *ON_TWO, *itertools.product(NAMES, MESHES)):
        marks = () if (name, mesh) in QUICK else pytest.mark.slow
        yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_op_by_op(name: str, mesh: str) -> None:
    options = {"mesh": mesh, "codegen": "eager"}
    options |= {"plan": "propagate", "schedule": "none"}
    steps = 3 if (name, mesh) in QUICK else STEPS
    runs = ranks_of(mesh).run(train, name, options, steps, timeout=300.0)
    compare(runs, one_device(name, steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generated_kernels(name: str) -> None:
    options = {"mesh": "dp=2,tp=2", "plan": "propagate", "codegen": "inductor"}
    runs = ranks_of("dp=2,tp=2").run(train, name, options, timeout=900.0)
    compare(runs, one_device(name))


def test_as_a_user_has_it(tmp_path: Path) -> None:
    """Searched, in a schedule by cost, compiled by Inductor, where splits pay."""
    hardware = str(tmp_path / "machine.json")
    machine().save(hardware)
    options = {"mesh": "tp=2", "hardware": hardware}
    runs = ranks_of("tp=2").run(train, "llama/1", options, 2, timeout=900.0)
    compare(runs, one_device("llama/1", 2))
