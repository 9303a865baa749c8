"""Users' scripts with the default settings: a plan by search, a schedule by cost.

Each script of ``helpers/trial_scripts.py`` and ``trial_layers.py`` runs without options
on every kind of mesh and gives what one device does. Where a search leaves small
programs whole, it is told of a machine on which it pays to split them. One rank that
waits for ever is an error after the pool's timeout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.trials import SCRIPTS, Setting, check

pytestmark = pytest.mark.multiprocess

QUICK = (
    ("turns", "pp=2", "shard"),
    ("two_models", "pp=2", "compile"),
    ("ring", "dp=2", "step"),
)
MESHES = (
    "dp=2",
    "tp=2",
    "cp=2",
    "ep=2",
    "pp=2",
    "dp=2{1.0,0.5}",
    "dp=4",
    "pp=4",
    "dp=2,tp=2",
    "pp=2,dp=2",
    "pp=2,tp=2",
    "dp=2,ep=2",
)
# Meshes whose ranks feed parts of a batch.
FED = ("dp=2", "ep=2", "dp=4", "dp=2,tp=2", "pp=2,dp=2", "dp=2,ep=2")
ALL = [
    (script, mesh, mode)
    for mesh in MESHES
    for script, modes in SCRIPTS.items()
    for mode in modes
    if "local" not in mode or mesh in FED
    if (script, mesh, mode) not in QUICK
]


def run(script: str, mesh: str, mode: str, folder: Path, codegen: str) -> None:
    local, *rest = mode.split() if mode.startswith("local") else ("", mode)
    inputs = "local" if local else "global"
    setting = Setting(mesh, *rest, inputs=inputs, codegen=codegen)
    splits = "" if "pp" in mesh else str(folder / "machine.json")
    check(script, setting, splits=splits)


@pytest.mark.parametrize(("script", "mesh", "mode"), QUICK)
def test_quick(script: str, mesh: str, mode: str, tmp_path: Path) -> None:
    run(script, mesh, mode, tmp_path, "eager")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "mesh", "mode"), ALL)
def test_all(script: str, mesh: str, mode: str, tmp_path: Path) -> None:
    run(script, mesh, mode, tmp_path, "eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mesh", "mode"),
    [
        ("language_model", "dp=2", "compile"),
        ("groups", "tp=2", "shard"),
        ("epochs", "pp=2", "compile"),
        ("groups", "dp=2", "step"),
    ],
)
def test_inductor(script: str, mesh: str, mode: str, tmp_path: Path) -> None:
    run(script, mesh, mode, tmp_path, "inductor")
