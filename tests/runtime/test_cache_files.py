"""Files in the folder of caches: damaged ones count as none, those that another rank
tells of are checked, kernels run the text that was compared."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar import cache_files
from fxpar.errors import FxparError
from fxpar.fusion.kernels import region_op, run_kernels
from fxpar.runtime.caches import known_programs, plan_store
from fxpar.sharding.spec import Spec

KEY = "0" * 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    return tmp_path / "caches" / "fxpar"


@pytest.fixture(scope="module")
def plan() -> Any:
    args = torch.ones(4, 8), torch.ones(8, 8)
    return fxpar.plan(lambda a, b: torch.relu(a @ b), *args, mesh="dp=2")


def _damages(text: bytes) -> Iterator[bytes]:
    """What may stand in a file in place of a text."""
    chance = random.Random(0)
    yield from (b"", b"\xff\xfe\x00", bytes(range(256)), b"\x00" * len(text))
    deep = 100_000
    yield from (b"[" * deep, b'{"a":' * deep, b"[" * deep + b"]" * deep)
    yield from (b"[]", b"{}", b"null", b"1", b'"text"', b"1" * 5000, b"NaN", b"1e999")
    for _ in range(60):
        yield text[: chance.randrange(len(text))]
        at = chance.randrange(len(text))
        yield text[:at] + chance.randbytes(3) + text[at + 1 :]
        yield chance.randbytes(chance.randrange(200))


def _wrong_types(path: Path) -> Iterator[dict[str, Any]]:
    """A record with values of other types, its digest that of these."""
    data = json.loads(path.read_bytes())
    own = ("format", "key", "digest")
    others = (None, 1, "text", [], {}, [[None]], {"a": [1]}, -1.5)
    for name in data.keys() - {*own}:
        for value in others:
            if type(value) is not type(data[name]):
                yield {k: v for k, v in data.items() if k not in own} | {name: value}
        yield {k: v for k, v in data.items() if k not in (*own, name)}


Loader = Callable[[], Any]


def _program(plan: Any) -> tuple[Path, Loader]:
    results = {0: Spec("dp", None)}
    known = known_programs.KnownProgram(
        KEY, "number", plan.result.plan, results, ("sum",)
    )
    known_programs.keep(known)

    def load() -> Any:
        record = cache_files.read_record(path, known_programs.FORMAT, KEY, dict)
        return record and known_programs._read(KEY, record)

    path = known_programs._path(KEY)
    return path, load


def _plan(plan: Any) -> tuple[Path, Loader]:
    record = {"proved": True, "gap": 0.0, "seconds": 1.0, "chosen": True}
    record["plan"] = plan.result.plan.to_record()
    path = plan_store._path(KEY)
    cache_files.write_record(path, plan_store.FORMAT, KEY, record)
    return path, lambda: plan_store.load(KEY, 1.0)


RECORDS = (_program, _plan)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_damaged_record_counts_as_none(kind: Any, plan: Any) -> None:
    path, load = kind(plan)
    text, want = path.read_bytes(), load()
    assert want is not None
    for damage in _damages(text):
        path.write_bytes(damage)
        assert load() is None or damage == text
    path.unlink()
    path.mkdir()
    assert load() is None


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_values_of_other_types_are_no_error(kind: Any, plan: Any) -> None:
    path, load = kind(plan)
    data = json.loads(path.read_bytes())
    loaded = []
    for record in _wrong_types(path):
        cache_files.write_record(path, data["format"], data["key"], record)
        loaded.append(load())
    assert None in loaded


def test_files_of_regions_may_be_damaged(folder: Path) -> None:
    path = region_op._path("a")
    path.parent.mkdir(parents=True)
    for damage in _damages(b'{"way": {"rung": "one", "programs": 1}}'):
        path.write_bytes(damage)
        with pytest.raises(FxparError, match="is not known"):
            region_op.lookup("a")


def test_a_damaged_mark_is_replaced(folder: Path) -> None:
    mark = cache_files.folder_mark()
    for damage in _damages(mark.encode()):
        (folder / "mark").write_bytes(damage)
        first = cache_files.folder_mark()
        assert len(first) == 32 and cache_files.folder_mark() == first
    (folder / "mark").unlink()
    (folder / "mark").mkdir()
    marks = {cache_files.folder_mark() for _ in range(2)}  # nobody shares it
    assert len(marks) == 2 and [each.name for each in folder.iterdir()] == ["mark"]


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077], ids=oct)
def test_files_are_as_private_as_new_files_are(folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        cache_files.write_record(folder / "a.json", "form", KEY, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "a.json").stat().st_mode) == 0o666 & ~mask


def test_kernels_run_the_text_that_was_compared(folder: Path) -> None:
    text = "def kernel():\n    return 'compared'\n"
    path = Path(run_kernels.module_of("kernel", text).__file__)
    assert path.parent == folder / "kernels" and path.read_text() == text
    run_kernels.module_of.cache_clear()
    # Compiled code of another text, beside it, as old as the file.
    path.write_text(text.replace("compared", "another!"))
    compiled = importlib.util.cache_from_source(str(path))
    import py_compile

    py_compile.compile(str(path), compiled)
    times = path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    module = run_kernels.module_of("kernel", text)
    assert module.kernel() == "compared"
    path.write_text("another text")
    assert inspect.getsource(module.kernel) == text
    shutil.rmtree(folder)
    assert inspect.getsource(module.kernel) == text
    run_kernels.module_of.cache_clear()
