"""The docs say what is: options, commands, links and code in them are checked."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_debugging_lists_every_option() -> None:
    from fxpar import config

    page = (ROOT / "docs" / "debugging.md").read_text()
    assert config.table() in page, (
        "docs/debugging.md differs from fxpar/config.py; put this there:\n\n"
        + config.table()
    )


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXPAR_PLAN", raising=False)
    monkeypatch.delenv("FXPAR_SCHEDULE", raising=False)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_env_variables_exist(page: Path) -> None:
    from fxpar import config

    for variable in set(re.findall(r"\bFXPAR_[A-Z]+\b", page.read_text())):
        assert variable in config.table(), f"{name(page)} names {variable}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"{name(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    from fxpar.__main__ import parser

    usage = parser().format_help()
    for command in re.findall(r"python -m fxpar ([a-z]+)", page.read_text()):
        assert re.search(rf"\b{command}\b", usage), f"{name(page)}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", without_comments(page.read_text()), flags=re.S)
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{name(page)} links to {link}"


# Modules that pages name and that are not ours: the user's own, and vLLM's.
NOT_OURS = {"train.py", "file.py", "allreduce_rms_fusion.py"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_that_are_named_exist(page: Path) -> None:
    folders = ("fxpar", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for text in re.findall(r"`([\w/]+\.py)[^`\n]*`", prose):
        ours = any(f"/{name(file)}".endswith(f"/{text}") for file in files)
        assert ours or text in NOT_OURS, f"{name(page)} names {text}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_code_parses(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(code)


MARKED = re.compile(
    r"^<!-- (run|printed|torchrun \d+(?: with \w+)?) -->\n```\w+\n(.*?)^```$",
    re.DOTALL | re.M,
)
RUNNABLE = [page for page in PAGES if MARKED.search(page.read_text())]
# With several scripts of several ranks.
SLOW = (
    "migrating.md",
    "parameters_at_rest.md",
    "checkpointing.md",
    "debugging.md",
    "training-step.md",
)


def runnable() -> Iterator[Any]:
    for page in RUNNABLE:
        marks = (pytest.mark.slow,) if page.name in SLOW else ()
        yield pytest.param(page, id=name(page), marks=marks)


# Before a script's first line: what rank 0 prints goes to a file, apart from warnings.
PRELUDE = """import os, sys; os.chdir({folder!r}); \
sys.stdout = open("rank" + os.environ["RANK"], "w", buffering=1)
"""


def comparable(text: str) -> str:
    """Without what depends on place and version: hashes, files, line numbers."""
    text = re.sub(r"\bplan [0-9a-f]{16}\b", "plan", text)
    return re.sub(r"[\w./-]+\.(?:py|md):\d+: ", "", text).strip()


def torchrun(code: str, ranks: int, folder: Path) -> str:
    """What rank 0 of a script prints."""
    script = folder / "script.py"
    script.write_text(PRELUDE.format(folder=str(folder)) + code)
    env = {"FXPAR_CODEGEN": "eager"}
    for rank, ended in enumerate(
        run_script(script, ranks=ranks, env=env, timeout=300.0, fork=True)
    ):
        assert ended.code == 0, f"rank {rank}\n{ended.output}"
    return (folder / "rank0").read_text()


@pytest.mark.multiprocess
@pytest.mark.parametrize("page", list(runnable()))
def test_marked_code_prints_what_the_page_says(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Blocks after ``<!-- run -->`` run in order in one namespace, those after
    ``<!-- torchrun 2 -->`` are scripts of so many ranks, left out where the package
    that they are ``with`` is missing; what they print stands in the block after
    ``<!-- printed -->``. EXPECTTEST_ACCEPT=1 updates it."""
    from fxpar.sharding import ops as rules

    monkeypatch.setattr(rules, "_USER", {})
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(), {"__name__": "page"}
    accepted, done, left_out = [], 0, False
    for block in MARKED.finditer(text):
        kind, code = block.groups()
        if kind == "printed" and left_out:
            continue
        left_out = " with " in kind and find_spec(kind.split()[-1]) is None
        if left_out:
            continue
        if kind == "run":
            above = "\n" * text[: block.start(2)].count("\n")
            exec(compile(above + code, str(page), "exec"), namespace)
            continue
        if kind != "printed":
            print(torchrun(code, int(kind.split()[1]), tmp_path), end="")
            continue
        printed = capsys.readouterr().out
        if os.environ.get("EXPECTTEST_ACCEPT"):
            printed = printed.replace(f"{ROOT}/", "")
            accepted += [text[done : block.start(2)], printed]
            done = block.end(2)
        else:
            assert comparable(code) == comparable(printed), name(page)
    if accepted:
        page.write_text("".join([*accepted, text[done:]]))
    assert not capsys.readouterr().out, f"{name(page)} prints more than it shows"


def test_what_can_be_left_out_stands_in_the_options_and_the_docs() -> None:
    from fxpar.config import PASSES
    from fxpar.pipeline import STEPS

    optional = dict.fromkeys(step.name for step in STEPS if step.optional)
    assert list(optional) == list(PASSES)
    page = (ROOT / "docs" / "debugging.md").read_text()
    assert [name for name in PASSES if f"`{name}`" not in page] == []


def test_pages_name_the_stages_of_the_pipeline_in_order() -> None:
    from fxpar.pipeline import STAGES

    def named(page: str, row: str) -> list[str]:
        return re.findall(row, (ROOT / page).read_text(), re.MULTILINE)

    table = named("docs/concepts.md", r"^\| (\w+) \| (?:global|local) \|")
    figure = named("README.md", r"^   ([a-z]+)  +[a-z]+ .*$")
    dumps = named("docs/debugging.md", r"\d_([a-z]+)\.")
    assert table == figure == list(STAGES)
    assert list(dict.fromkeys(dumps)) == list(STAGES)


def test_the_picture_of_the_package_is_that_of_its_floors() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from house import PICTURE, picture
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert PICTURE.read_text() == picture(), "run python benchmarks/house.py --write"
