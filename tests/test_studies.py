"""Tables of figures are those that ``benchmarks/studies.py`` makes of the JSON."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def studies() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "studies.py"))


def test_no_page_differs(studies: dict[str, Any]) -> None:
    assert studies["stale"]() == [], "python benchmarks/studies.py --write"


def test_readmes_have_the_headlines_of_the_json(studies: dict[str, Any]) -> None:
    headline = studies["MADE"]["headline"]()
    assert all(headline in path.read_text() for path in studies["READMES"])


def test_every_result_is_read_by_a_study_or_a_test(studies: dict[str, Any]) -> None:
    tables = (table for study in studies["STUDIES"] for table in study.tables)
    read = {file for table in tables for file in table.files}
    others = {"hardware_h100.json"}  # tests/sharding/test_hardware.py
    assert {path.name for path in studies["RESULTS"].glob("*.json")} == read | others


def test_benchmarks_readme_is_short() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert len(re.findall(r"[^\s|]+", text)) <= 1500
