from __future__ import annotations

from pathlib import Path

import pytest

from fxpar.sharding.cost.hardware_table import Hardware
from tests.helpers.machines import machine


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """FXPAR_HARDWARE is ``machine()``."""
    path = tmp_path / "slow.json"
    machine().save(path)
    monkeypatch.setenv("FXPAR_HARDWARE", str(path))
    return machine()
