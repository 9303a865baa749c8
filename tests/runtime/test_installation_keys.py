"""Keys of torch's caches: read of files once, by other processes taken as remembered,
unless a file is another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache

from fxpar import _torch, cache_files
from fxpar.runtime.caches import installation_keys


def forget() -> None:
    key: Any = codecache.torch_key
    key.clear()
    codecache.CacheBase.get_system.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of caches, empty, in a process that knows no keys."""
    monkeypatch.setattr(cache_files, "folder", lambda: tmp_path)
    forget()
    yield tmp_path
    forget()


def is_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an item when the content of torch's files is read."""
    reads: list[str] = []
    build = codecache.build_code_hash

    def build_code_hash(roots: Any, prefix: str, hasher: Any) -> None:
        reads.append(prefix)
        build(roots, prefix, hasher)

    monkeypatch.setattr(codecache, "build_code_hash", build_code_hash)
    return reads


def known() -> tuple[bytes, Any]:
    return codecache.torch_key(), codecache.CacheBase.get_system()


def test_another_process_takes_what_was_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = known()
    forget()
    reads = is_read(monkeypatch)
    installation_keys.load()
    assert reads
    assert len([*folder.iterdir()]) == 1
    reads.clear()
    forget()
    installation_keys.load()
    assert known() == own
    assert not reads


@pytest.mark.parametrize("content", ["", "{}", '{"torch": "00"}'])
def test_a_damaged_file_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    installation_keys.load()
    own = known()
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(content)
    forget()
    reads = is_read(monkeypatch)
    installation_keys.load()
    assert reads
    assert known() == own
    assert path.read_text() == whole


def test_other_files_are_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    source = tmp_path / "inner" / "ops.py"
    source.write_text("a = 1")
    monkeypatch.setattr(torch, "__path__", [str(tmp_path)])
    before = _torch.installation.files()
    (tmp_path / "inner" / "notes.txt").write_text("no module")
    assert _torch.installation.files() == before
    stat = source.stat()
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    changed = _torch.installation.files()
    assert changed != before
    source.rename(source.with_name("operators.py"))
    assert _torch.installation.files() not in (before, changed)
