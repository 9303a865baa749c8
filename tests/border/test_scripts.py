"""Training scripts of other kinds, written as their authors would, changed by one line.

Each in ``scripts`` runs on one device, on two ranks as it stands (global inputs), on
two ranks that feed their part of every batch (local inputs), and under
DistributedDataParallel. Losses, norms and parameters at the end are those of one
device with global inputs, and those of DDP with local inputs.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script

SCRIPTS = Path(__file__).parent / "scripts"

# What DDP computes otherwise than one device: norms of each rank's own batch, and
# contrasts with the samples of its own rank alone.
OTHERS = ("dcgan", "simclr")
NAMES = ("word_language_model", "vae", "nanogpt", *OTHERS)


@cache
def result(name: str, parallel: str) -> dict[str, Any]:
    """What a script says at its end, run so."""
    ranks = 1 if parallel == "none" else 2
    env = {"FXPAR_MESH": "dp=2", "FXPAR_PLAN": "propagate"}
    args = (SCRIPTS / f"{name}.py", "--parallel", parallel)
    ended = run_script(*args, ranks=ranks, env=env, timeout=400.0)
    failed = [each.output[-3000:] for each in ended if each.code]
    assert not failed, "\n".join(failed)
    (line,) = [x for x in ended[0].output.splitlines() if x.startswith("RESULT ")]
    return dict(json.loads(line.removeprefix("RESULT ")))


def check(got: dict[str, Any], want: dict[str, Any], rel: float) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=rel), key


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_global_inputs_are_as_on_one_device(name: str) -> None:
    check(result(name, "global"), result(name, "none"), 2e-4)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_local_inputs_are_as_under_ddp(name: str) -> None:
    check(result(name, "local"), result(name, "ddp"), 2e-4)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OTHERS)
def test_ddp_computes_something_else(name: str) -> None:
    with pytest.raises(AssertionError):
        check(result(name, "ddp"), result(name, "none"), 2e-4)
