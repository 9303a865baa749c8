"""The shape of the package, checked on its source: who may import whom, where private
torch names may stand, and that ``import fxpar`` stays cheap."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent / "fxpar"

# What stands below graphs: meshes, specs, rules as data, programs and their prices.
ALGEBRA = {
    *("sharding/mesh", "sharding/spec"),
    *("sharding/factors", "sharding/strategy", "sharding/program", "sharding/op_table"),
    *("sharding/op_facts", "sharding/shard_sizes", "sharding/rank_ints"),
    *("sharding/row_moves", "sharding/shift_messages", "sharding/reshard/steps"),
    *("sharding/cost/collectives", "sharding/cost/hardware_table", "sharding/cost/op"),
    "sharding/cost/visible_pairs",
}

# A module imports from its own part and from parts on lower levels.
LEVELS = [
    # A cut knows of plain edges alone.
    {"errors", "units", "sharding/solver/min_cut"},
    # The two use one another: patches know torch, and adapters enter patches.
    {"_torch", "_fast"},
    {"config", "print_errors"},
    {"cache_files", "layers"},
    ALGEBRA,
    {"graph"},
    # An op's row holds its local form, which makes nodes.
    {"sharding/ops"},
    {"sharding"},
    {"passes"},
    {"fusion"},
    {"runtime", "explain"},
    # Each registers itself in the list of steps and in tables of the core.
    {"features"},
    # ``fusion.apply`` is an entry too: it has the verbs of all features.
    {"pipeline", "fusion/__init__"},
    {"choose_plan"},
    # Plans a call, to lay out parameters as it uses them.
    {"features/at_rest"},
    {"compilation"},
    # Compiles what it traced.
    {"features/train_step"},
    {"backend", "planning"},
    {"__init__"},
    {"__main__"},
]
# The parts that use private names of torch.
OF_TORCH = {"_torch", "_fast"}
# Parts whose files use one another.
TOGETHER = (OF_TORCH, ALGEBRA)
LEVEL = {part: i for i, parts in enumerate(LEVELS) for part in parts}

# Upward imports inside a function, each with its reason.
LAZY = {
    # Rows of ops hold their facts, and their local forms make nodes.
    "sharding/op_facts.py": "sharding/ops",
    # The names of passes are those of the list of steps.
    "config.py": "pipeline",
    # plan.to_html(path), of a loaded plan too: the page is explain's.
    "sharding/plan.py": "explain",
}

# Folders that belong to features, which the core imports no file of.
ROOMS = {
    *("features/experts", "features/regions", "features/sequences", "features/stages"),
    *("features/uneven", "features/unlike_devices", "features/at_rest"),
    "features/train_step",
}
# The list of features, which names them.
FEATURES = "features/__init__.py"
# Where users enter: a feature may have an entry of its own.
DOORS = {"__init__.py", "__main__.py", "backend.py", "planning.py"}

# Parts that are pure planning and rewriting: no process group, ever.
RANKLESS = ALGEBRA | {
    "errors",
    "units",
    "config",
    "sharding",
    "sharding/ops",
    "graph",
    "passes",
    "fusion",
}

HEAVY = ("torch._inductor", "torch._dynamo", "transformers", "networkx", "scipy")
HEAVY += ("sympy", "triton", "fxpar.backend", "fxpar.passes", "fxpar.fusion")

# Attributes that are documented though they begin with an underscore.
PUBLIC = {"_replace", "_fields", "_asdict", "_exit"}

FILES = sorted(ROOT.rglob("*.py"))


def part(path: Path) -> str:
    """``fxpar/sharding/mesh.py`` -> ``sharding``; ``fxpar/errors.py`` -> ``errors``. A
    file that has a level of its own is a part."""
    return part_of(list(path.relative_to(ROOT).with_suffix("").parts))


def part_of(names: list[str]) -> str:
    """The part that a dotted name below ``fxpar`` belongs to."""
    whole = ("/".join(names[:count]) for count in range(len(names), 1, -1))
    return next((name for name in whole if name in LEVEL), names[0])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def module(path: Path) -> str:
    """The dotted package a file's relative imports start from."""
    return ".".join(path.relative_to(ROOT.parent).parent.parts)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[tuple[ast.AST, bool]]:
    """(node, whether it stands inside a function or a TYPE_CHECKING block)."""
    found: list[tuple[ast.AST, bool]] = []
    ahead: list[tuple[ast.AST, bool]] = [(tree(path), False)]
    while ahead:
        node, deferred = ahead.pop()
        found.append((node, deferred))
        deferred |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        deferred |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        children = list(ast.iter_child_nodes(node))
        ahead += [(child, deferred) for child in reversed(children)]
    return found


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every imported dotted name, with the line and whether it is deferred."""
    for node, deferred in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, deferred
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module(path).split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, deferred


def chain(node: ast.AST) -> list[str] | None:
    """``a.b.c`` as a list, None for anything but names and attributes."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return [node.id, *reversed(names)]


def is_private(dotted: str) -> bool:
    """Whether a torch name has a private part; ops are looked up under any name."""
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    return any(p.startswith("_") and not p.endswith("__") for p in parts)


def private_uses(path: Path) -> set[str]:
    """Private torch names a file imports or reaches by attribute, with lines."""
    found, bound = set(), {}
    for node, _ in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for dotted, line, _ in imports(path):
        if is_private(dotted):
            found.add(f"{name(path)}:{line}: {dotted}")
    inner = {id(n.value) for n, _ in nodes(path) if isinstance(n, ast.Attribute)}
    for node, _ in nodes(path):
        outermost = isinstance(node, ast.Attribute) and id(node) not in inner
        names = chain(node) if outermost else None
        if names and names[0] in bound:
            origin = bound[names[0]]
            if not is_private(origin) and is_private(".".join([origin, *names[1:]])):
                found.add(f"{name(path)}:{node.lineno}: {'.'.join(names)}")
    return found


def upward_imports(path: Path) -> Iterator[str]:
    """Imports of a file from its own level or above, its own part aside."""
    here = part(path)
    assert here in LEVEL, f"{name(path)}: give this part a level in test_imports.LEVELS"
    for dotted, line, deferred in imports(path):
        root, *rest = dotted.split(".")
        if root != "fxpar":
            continue
        there = part_of(rest) if rest and rest[0] in LEVEL else "__init__"
        if there == here or LEVEL[there] < LEVEL[here]:
            continue
        if any({there, here} <= parts for parts in TOGETHER):
            continue
        if not (deferred and LAZY.get(name(path)) == there):
            yield f"{name(path)}:{line} imports {dotted}: {here} may not use {there}"


def test_imports_point_one_way() -> None:
    upward = [line for path in FILES for line in upward_imports(path)]
    assert not upward, "\n".join(upward)


def room(place: str) -> str | None:
    """The room that a path below ``fxpar`` is in; None for the core."""
    return next((x for x in ROOMS if place.startswith(f"{x}/")), None)


def ties(path: Path) -> Iterator[tuple[str, str]]:
    """(file of the core, room that it imports from)."""
    if room(name(path)) or name(path) in {FEATURES, *DOORS}:
        return
    for dotted, *_ in imports(path):
        there = room("/".join(dotted.split(".")[1:]) + "/")
        if there:
            yield name(path), there


def test_the_core_imports_no_feature() -> None:
    assert not {tie for path in FILES for tie in ties(path)}


def test_private_torch_names_only_in_one_place() -> None:
    private = {
        use
        for path in FILES
        if part(path) not in OF_TORCH
        for use in private_uses(path)
    }
    assert not private, "move these to fxpar/_torch:\n" + "\n".join(sorted(private))


def private_attributes(path: Path) -> Iterator[str]:
    """Private attributes a file reads of objects whose class it does not define."""
    own = {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "")
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        )
    } | {
        node.target.id
        for node in ast.walk(tree(path))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.endswith("__") or node.attr in own or node.attr in PUBLIC:
            continue
        names = chain(node) or [""]
        if names[0] in ("self", "cls", "sys") or {"ops", "aten"} & set(names):
            continue
        yield f"{name(path)}:{node.lineno}: {ast.unparse(node)}"


def test_private_attributes_only_in_one_place() -> None:
    private = [
        use
        for path in FILES
        if part(path) not in OF_TORCH
        for use in private_attributes(path)
    ]
    assert not private, "move these to fxpar/_torch:\n" + "\n".join(private)


def test_planning_needs_no_process_group() -> None:
    for path in FILES:
        for dotted, line, _ in imports(path) if part(path) in RANKLESS else ():
            assert not dotted.startswith("torch.distributed"), f"{name(path)}:{line}"


_NAMES_TESTS = re.compile(r"\btests(\.(?!helpers\b)|\s+import)")


def modules_of_tests(path: Path) -> list[str]:
    """Imports in a file of tests of any other one that pytest collects."""
    if not _NAMES_TESTS.search(path.read_text()):  # most do not, and are not parsed
        return []
    names = (dotted for dotted, *_ in imports(path) if dotted.startswith("tests."))
    return [dotted for dotted in names if not dotted.startswith("tests.helpers.")]


def test_tests_import_from_helpers_only() -> None:
    shared = {
        f"{path.relative_to(TESTS)}: {dotted}"
        for path in TESTS.rglob("*.py")
        for dotted in modules_of_tests(path)
    }
    assert not shared, "move to tests/helpers what tests share:\n" + "\n".join(shared)
    beside = [
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if TESTS / "helpers" not in path.parents
        and path.parent.name != "data"
        and not path.name.startswith(("test_", "conftest"))
    ]
    assert not beside, f"move to tests/helpers: {beside}"


def test_the_checks_see_what_they_should(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text(
        "import torch\n"
        "from torch import fx\n"
        "def f():\n"
        "    from torch.utils import _pytree\n"
        "    torch._inductor.ir.View, fx._pytree, torch.ops._c.x, torch.__all__\n"
    )
    assert [(dotted, deferred) for dotted, _, deferred in imports(sample)] == [
        ("torch", False),
        ("torch.fx", False),
        ("torch.utils._pytree", True),
    ]
    assert sorted(private_uses(sample)) == [
        "sample.py:4: torch.utils._pytree",
        "sample.py:5: fx._pytree",
        "sample.py:5: torch._inductor.ir.View",
    ]
    assert module(ROOT / "sharding" / "ops" / "views.py") == "fxpar.sharding.ops"
    other = tmp_path / "other.py"
    other.write_text(
        "from tests.helpers.spawn import Pool\nfrom tests.e2e import test_search\n"
    )
    assert modules_of_tests(other) == ["tests.e2e.test_search"]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# In one process: what ``import fxpar`` adds to torch, what backends there are, what is
# imported once the backend is.
ADDED = """
import sys, torch
before = set(sys.modules)
import fxpar
print(*sorted(set(sys.modules) - before))
import torch._dynamo
print(*torch._dynamo.list_backends())
import fxpar.backend
print(*sys.modules)
"""


@functools.cache
def imported() -> list[list[str]]:
    return [line.split() for line in run_python(ADDED).splitlines()[-3:]]


def test_import_is_light() -> None:
    added, _, _ = imported()
    heavy = [m for m in added if any(m == h or m.startswith(h + ".") for h in HEAVY)]
    assert "fxpar" in added
    assert not heavy, f"import fxpar should not import {heavy}"


def test_steps_of_features_are_imported_when_they_run() -> None:
    _, _, modules = imported()
    rooms = [m for m in modules if m.startswith("fxpar.features.")]
    assert rooms and not [m for m in rooms if m.endswith("_steps")]


def test_kernels_need_nothing_but_torch_and_triton() -> None:
    """So that they run where there is little else (benchmarks/one_gpu.py)."""
    pytest.importorskip("triton")
    files = sorted((ROOT / "fusion" / "kernels").glob("*.py"))
    names = [f"fxpar.fusion.kernels.{path.stem}" for path in files]
    others = ["numpy", "scipy", "numba", "transformers"]
    code = "import importlib, sys, torch, triton\n"
    # torch itself has noted by now whether there is NumPy.
    code += f"sys.modules.update(dict.fromkeys({others}))\n"
    code += f"for name in {names}: importlib.import_module(name)\n"
    run_python(code)


def test_dynamo_lists_the_backend() -> None:
    try:
        importlib.metadata.distribution("fxpar")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fxpar is not installed here: pip install -e .")
    _, listed, _ = imported()
    assert "fxpar" in listed


# Class names that two files share, each with its reason.
SHARED_CLASSES: set[str] = set()


def test_files_and_classes_have_names_of_their_own() -> None:
    """A name means one thing in the package; packages' ``__init__`` aside."""
    stems = Counter(path.stem for path in FILES)
    assert not [s for s, n in stems.items() if n > 1 and not s.startswith("__")]
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert {c for c, n in classes.items() if n > 1} == SHARED_CLASSES


# Participles that say what was done to a value and not what it is: ``reason``, not
# ``found``. Functions may be called so, as ``sorted`` is.
HOLLOW = {
    *("asked", "drawn", "found", "given", "gone", "heard", "held", "joined", "kept"),
    *("known", "lifted", "lost", "made", "met", "needed", "noted", "said", "shown"),
    *("taken", "told", "tried", "wanted"),
}

# Variables and fields that are called so, each with its reason.
HOLLOW_NAMES = {
    "told",  # of an error: whether other ranks know
    "held",  # of a timeline: what is held at the peak; the page's word as well
}


def hollow_names(path: Path) -> Iterator[str]:
    """Variables, arguments and fields of a module that a bare participle names."""
    for node, _ in nodes(path):
        if isinstance(node, ast.Name | ast.Attribute):
            bound = isinstance(node.ctx, ast.Store)
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            bound, name = isinstance(node, ast.arg), getattr(node, "arg", None) or ""
        if bound and name.strip("_") in HOLLOW - HOLLOW_NAMES:
            yield f"{path.name}: {name}"


def test_variables_are_named_by_what_they_hold(tmp_path: Path) -> None:
    assert [text for path in FILES for text in hollow_names(path)] == []
    sample = tmp_path / "sample.py"
    sample.write_text(
        "def joined(given, n):\n    self._made = n\n    for found in n: n\n"
    )
    names = sorted(text.split()[1] for text in hollow_names(sample))
    assert names == ["_made", "found", "given"]


# Names that say what a field holds, whatever its type.
SAID = {"args", "device", "dtype", "fix", "kwargs", "name", "node", "rank", "ranks"}
SAID |= {"seconds", "shape", "why"}


def says_enough(field: ast.AnnAssign) -> bool:
    """Whether name and type of a field say what it holds: one of ``SAID``, whether
    something is so, or an object of one class."""
    name, type_ = ast.unparse(field.target), ast.unparse(field.annotation)
    is_class = re.fullmatch(r"(\w+\.)*[A-Z]\w+", type_) and type_ != "Any"
    return name in SAID or name.startswith(("is_", "has_", "can_")) or bool(is_class)


def fields_without_comment(path: Path) -> Iterator[str]:
    """Fields of dataclasses with no comment above them or on their line, where name and
    type do not say what they hold. Options have their text in ``_option``."""
    lines = ["", *path.read_text().splitlines()]
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ClassDef):
            continue
        if not any("dataclass" in ast.unparse(x) for x in node.decorator_list):
            continue
        for x in node.body:
            if not isinstance(x, ast.AnnAssign) or not isinstance(x.target, ast.Name):
                continue
            above, own = lines[x.lineno - 1].strip(), lines[x.end_lineno or x.lineno]
            value = x.value
            is_option = isinstance(value, ast.Call) and chain(value.func) == ["_option"]
            is_said = is_option or says_enough(x)
            if not (above.startswith("#") or "  # " in own or is_said):
                yield f"{name(path)}:{x.lineno}: {node.name}.{x.target.id}"


def test_fields_say_what_they_hold(tmp_path: Path) -> None:
    missing = [text for path in FILES for text in fields_without_comment(path)]
    assert not missing, "give each a comment of its own:\n" + "\n".join(missing)
    sample = tmp_path / "sample.py"
    sample.write_text(
        "@dataclasses.dataclass(frozen=True)\n"
        "class Sample:\n"
        '    """Text."""\n'
        "    a: int\n"
        "    # Bytes.\n"
        "    b: int\n"
        "    c: int = 0\n"
        "    d: int = 0  # seconds\n"
        "    e: int = _option(int)\n"
        "    is_f: bool\n"
        "    mesh: mesh.Mesh\n"
        "    name: str\n"
        "class Plain:\n"
        "    f: int\n"
    )
    names = [text.split()[1] for text in fields_without_comment(sample)]
    assert names == ["Sample.a", "Sample.c"]


# What docstrings and comments may name beside modules of the package.
OUTSIDE = {"aten", "jax", "prims", "torch"}


def stale_names(path: Path, files: dict[str, Path]) -> Iterator[str]:
    """``module.name`` in text, where there is no such module, or no such name in it."""
    text = path.read_text()
    code = re.sub(r"``[^`]*``", "", text)
    for dotted in sorted(set(re.findall(r"``([a-z_]\w*(?:\.\w+)+)``", text))):
        first, *names = dotted.removesuffix(".py").split(".")
        if first in OUTSIDE or re.search(rf"\b{first}\b", code):
            continue
        file = files.get(first)
        while file is not None and names and names[0] in files:
            file = files[names.pop(0)]
        if file is None or (names and names[0] not in file.read_text()):
            yield f"{path.name}: {dotted}"


def test_text_names_modules_as_they_are_called(tmp_path: Path) -> None:
    files = {path.parent.name: path for path in FILES if path.stem == "__init__"}
    files |= {path.stem: path for path in FILES if path.stem != "__init__"}
    assert [name for path in FILES for name in stale_names(path, files)] == []
    sample = tmp_path / "sample.py"
    text = "``nowhere.parse``, ``mesh.Nothing``, ``mesh.Mesh``, ``passes.lower``"
    sample.write_text(f"# {text}, ``torch.nn``, ``x.shape``\nx = 1\n")
    named = [name.split()[1] for name in stale_names(sample, files)]
    assert named == ["mesh.Nothing", "nowhere.parse"]
