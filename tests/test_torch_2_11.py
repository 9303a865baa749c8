"""Every torch op that the package names exists in torch 2.11, the oldest it runs on:
its source held against a list of that release's ops, whichever torch runs here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxpar import _torch

HERE = Path(__file__).parent
ROOT = HERE.parent
LIST = HERE / "data" / "torch_2_11_ops.txt"
FILES = sorted(
    path
    for path in (*(ROOT / "fxpar").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"))
    if re.search(r"torch\.ops|torch import .*\bops", path.read_text())
)

OURS = {"fxpar", "higher_order"}  # namespaces whose ops the list does not have
# What is read of an op that is no overload of it.
ATTRIBUTES = {"__name__", "name", "namespace", "overloads", "op"}


def listed() -> dict[str, set[str]]:
    """Op -> overloads, of torch 2.11."""
    out = {}
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            name, *overloads = line.split()
            out[name] = set(overloads or ["default"])
    return out


KNOWN = listed()
NAMESPACES = {name.partition("::")[0] for name in KNOWN}


def dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    """``aten.add.Tensor`` as ``torch.ops.aten.add.Tensor``; None of what is none."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([bound.get(node.id, node.id), *reversed(names)])


def pairs(target: ast.AST, value: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What is assigned to what; tuples item by item."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for to, what in zip(target.elts, value.elts, strict=True):
            yield from pairs(to, what)
    else:
        yield target, value


def aliases(tree: ast.Module) -> dict[str, str]:
    """Names that stand for ``torch.ops``, a namespace of it or an op."""
    bound: dict[str, str] = {}
    given: list[tuple[ast.AST, ast.AST]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                given += pairs(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
            given.append((node.target, node.value))
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                if full.startswith("torch.ops"):
                    bound[name.asname or name.name] = full
    while True:
        found = dict(bound)
        for target, value in given:
            what = dotted(value, bound) or ""
            if isinstance(target, ast.Name) and what.startswith("torch.ops"):
                found[target.id] = what
        if found == bound:
            return bound
        bound = found


def references(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """(op, overload or "", line) of every op that is named."""
    bound = aliases(tree)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        parts = (dotted(node, bound) or "").split(".")
        if parts[:2] == ["torch", "ops"] and len(parts) > 3:
            overload = "".join(parts[4:5])
            overload = "" if overload in ATTRIBUTES else overload
            yield f"{parts[2]}::{parts[3]}", overload, node.lineno


def missing(tree: ast.Module) -> list[str]:
    """Ops that torch 2.11 lacks, with their lines."""
    out = []
    for op, overload, line in references(tree):
        if op.partition("::")[0] in OURS or op in _torch.distributed.NEWER:
            continue
        overloads = KNOWN.get(op)
        if overloads is None or (overload and overload not in overloads):
            out.append(f"{line}: {op}{'.' * bool(overload)}{overload}")
    return out


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_2_11_has_every_op(path: Path) -> None:
    found = missing(ast.parse(path.read_text()))
    why = f"{path.name}: guard these in fxpar/_torch, and name them in NEWER there"
    assert not found, "\n".join([why, *found])


def test_what_is_said_to_be_newer_is() -> None:
    """And is there all the same, whichever torch this is."""
    assert not [name for name in _torch.distributed.NEWER if name in KNOWN]
    for name in _torch.distributed.NEWER:
        namespace, _, op = name.partition("::")
        assert getattr(getattr(torch.ops, namespace), op).default


def test_references_are_found() -> None:
    """The check sees what it should: through every kind of alias."""
    source = """
import torch
from torch.ops import prims as p
aten = torch.ops.aten
def f(x):
    first, c10d = 1, torch.ops._c10d_functional
    again: Any = c10d
    new = aten.brand_new.default
    if (y := torch.ops.aten).mm: pass
    again.batched_send(x), aten.add.Tensor(x, x), aten.add.Newest, p.newest(x)
    aten.mm.default.name(), aten.mm.overloads(), torch.ops.fxpar.dot, x.aten.nothing
    return new, y.newer, c10d.isend.default
"""
    found = [line.partition(": ")[2] for line in missing(ast.parse(source))]
    assert sorted(found) == [
        "_c10d_functional::batched_send",
        "aten::add.Newest",
        "aten::brand_new.default",
        "aten::newer",
        "prims::newest",
    ]
    named = {op for path in FILES for op, *_ in references(ast.parse(path.read_text()))}
    assert {name.partition("::")[0] for name in named} == NAMESPACES | {"fxpar"}
    assert len(named) > 150
