"""The docs say what is: options, commands, links and code in them are checked."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar import errors
from tests.helpers.scripts import run_script

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_comments(text: str) -> str:
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_the_options_are_all_listed() -> None:
    from fxpar import config

    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert config.table() in page, (
        "docs/reference/options.md differs from fxpar/config.py; put this there:\n\n"
        + config.table()
    )


def on_pages(pattern: str) -> list[tuple[str, str]]:
    """(page, text) of what is found on all pages."""
    return [
        (name(page), text)
        for page in PAGES
        for text in re.findall(pattern, page.read_text(), re.M)
    ]


def test_env_variables_exist() -> None:
    from fxpar import config

    known = config.table()
    unknown = [x for x in on_pages(r"\bFXPAR_[A-Z_]+\b") if x[1] not in known]
    assert unknown == []


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    found = on_pages(r"(?:^|`)make ([a-z][\w-]*)")
    assert [x for x in found if x[1] not in targets] == []


def test_commands_exist() -> None:
    from fxpar.__main__ import parser

    usage = re.findall(r"\w+", parser().format_help())
    found = on_pages(r"python -m fxpar ([a-z]+)")
    assert [x for x in found if x[1] not in usage] == []


def test_links_resolve() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", without_comments(page.read_text()), flags=re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            path, _, anchor = link.partition("#")
            if "://" not in link:
                target = page.parent / path if path else page
                assert target.exists(), f"{name(page)} links to {link}"
                assert not anchor or anchor in anchors(target), f"{name(page)}: {link}"


def anchors(page: Path) -> set[str]:
    """What links may name of a page, as GitHub makes it of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# Modules that pages name and that are not ours: the user's own, and vLLM's.
NOT_OURS = {"train.py", "file.py", "allreduce_rms_fusion.py"}


def test_modules_that_are_named_exist() -> None:
    folders = ("fxpar", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    ours = [f"/{name(file)}" for file in files]
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for text in re.findall(r"`([\w/]+\.py)[^`\n]*`", prose):
            is_ours = any(file.endswith(f"/{text}") for file in ours)
            assert is_ours or text in NOT_OURS, f"{name(page)} names {text}"


def test_python_code_parses() -> None:
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            ast.parse(code, filename=name(page))


MARKED = re.compile(
    r"^<!-- (run|printed|torchrun \d+(?: with \w+)?) -->\n```\w+\n(.*?)^```$",
    re.DOTALL | re.M,
)
RUNNABLE = [page for page in PAGES if MARKED.search(page.read_text())]


def runnable() -> Iterator[Any]:
    for page in RUNNABLE:
        starts_ranks = "<!-- torchrun" in page.read_text()
        marks = (pytest.mark.slow,) if starts_ranks else ()
        yield pytest.param(page, id=name(page), marks=marks)


# Before a script's first line: what rank 0 prints goes to a file, apart from warnings.
PRELUDE = """import os, sys; os.chdir({folder!r}); \
sys.stdout = open("rank" + os.environ["RANK"], "w", buffering=1)
"""


def comparable(text: str) -> str:
    """Without what depends on place and version: hashes, files, line numbers."""
    text = re.sub(r"\bplan [0-9a-f]{16}\b", "plan", text)
    return re.sub(r"[\w./-]+\.(?:py|md):\d+: ", "", text).strip()


def torchrun(
    code: str, ranks: int, folder: Path, env: Mapping[str, str] | None = None
) -> str:
    """What rank 0 of a script prints."""
    script = folder / "script.py"
    script.write_text(PRELUDE.format(folder=str(folder)) + code)
    env = {"FXPAR_CODEGEN": "eager", **(env or {})}
    for rank, ended in enumerate(
        run_script(script, ranks=ranks, env=env, timeout=300.0, fork=True)
    ):
        assert ended.code == 0, f"rank {rank}\n{ended.output}"
    return (folder / "rank0").read_text()


# Examples of ranks, but for a compiled model and a whole step.
SLOW_EXAMPLES = (
    "checkpoint_resume.py",
    "custom_op.py",
    "experts.py",
    "hf_trainer.py",
    "lightning_trainer.py",
    "packed_documents.py",
    "pipeline_found.py",
)
COMMAND = re.compile(
    r"^    ((?:FXPAR_\w+=\S+[\s\\]+)*)"
    r"(?:torchrun --nproc-per-node (\d)|python) (examples/\w+\.py)$",
    re.M,
)


def examples() -> Iterator[Any]:
    for path in sorted(ROOT.glob("examples/*.py")):
        if "\nprints\n" in path.read_text():
            marks = (pytest.mark.slow,) if path.name in SLOW_EXAMPLES else ()
            yield pytest.param(path, id=path.name, marks=marks)


@pytest.mark.multiprocess
@pytest.mark.parametrize("path", list(examples()))
def test_an_example_prints_what_its_head_says(path: Path, tmp_path: Path) -> None:
    for library in ("transformers", "pytorch_lightning"):
        if library in path.read_text():
            pytest.importorskip(library)
    head = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    commands, _, rest = head.partition("\nprints\n\n")
    expected = rest.split("\n\n")[0]
    printed = ""
    for text, ranks, script in COMMAND.findall(commands):
        assert script == name(path)
        env = dict(re.findall(r'(FXPAR_\w+)="?([^\s"]+)', text))
        printed += torchrun(path.read_text(), int(ranks or 1), tmp_path, env)
    assert printed == textwrap.dedent(expected).strip() + "\n"


@pytest.mark.slow
def test_a_layer_of_the_large_example_is_planned() -> None:
    pytest.importorskip("transformers")
    names = runpy.run_path(str(ROOT / "examples" / "plan_llama_70b.py"))
    ids = torch.empty(names["BATCH"], names["LENGTH"], dtype=torch.int64, device="meta")
    feed = {"input_ids": ids, "labels": ids}
    how: dict[str, Any] = {"mesh": "dp=8,tp=8", "mode": "propagate", "grad": True}
    plan = fxpar.plan(names["build"](layers=1), **how, **feed)
    assert plan.spec("model.layers.0.mlp.down_proj.weight") == fxpar.Spec(None, "tp")


def test_examples_are_short_and_listed() -> None:
    for path in ROOT.glob("examples/*.py"):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) <= 60, path.name
        assert f"({path.name})" in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.slow
def test_pictures_are_what_the_example_draws(tmp_path: Path) -> None:
    """EXPECTTEST_ACCEPT=1 updates them."""
    accept = bool(os.environ.get("EXPECTTEST_ACCEPT"))
    folder = ROOT / "docs" if accept else tmp_path
    script = [str(ROOT / "examples" / "draw_plan.py"), str(folder)]
    subprocess.run([sys.executable, *script], check=True, cwd=ROOT)
    for picture in ("plan.svg", "timeline.svg"):
        drawn = (folder / picture).read_text()
        assert drawn == (ROOT / "docs" / picture).read_text()


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


def test_what_can_be_left_out_stands_in_the_docs() -> None:
    from fxpar.pipeline import STEPS

    names = {step.name for step in STEPS if step.optional}
    page = (ROOT / "docs" / "howto" / "wrong_number.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_pages_name_the_stages_of_the_pipeline_in_order() -> None:
    from fxpar.pipeline import STAGES

    def named(page: str, row: str) -> list[str]:
        return re.findall(row, (ROOT / "docs" / page).read_text(), re.MULTILINE)

    table = named("explanation/architecture.md", r"^\| (\w+) \| (?:global|local) \|")
    dumps = named("howto/wrong_number.md", r"\d_([a-z]+)\.")
    assert table == list(STAGES)
    assert list(dict.fromkeys(dumps)) == list(STAGES)


def test_every_page_is_short_and_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*/*.md"):
        path = str(page.relative_to(ROOT / "docs"))
        assert f"({path})" in index, path
        assert f" {path}\n" in site, path
    for page in ROOT.glob("docs/**/*.md"):
        assert len(re.findall(r"[^\s|]+", page.read_text())) <= 1500, name(page)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "index.html").exists()


def test_the_public_names_are_all_listed() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    named = set(re.findall(r"`fxpar\.(\w+)`", page.split("`help(")[0]))
    assert named == set(fxpar.__all__)


def texts_of_the_package() -> str:
    """All texts in the package that are no docstrings, what is filled in left out."""
    texts = []
    for path in ROOT.glob("fxpar/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    x.value if isinstance(x, ast.Constant) else "\0"
                    for x in node.values
                )
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_that_are_explained_exist() -> None:
    page = (ROOT / "docs" / "reference" / "messages.md").read_text()
    classes = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    own = {key for key, x in vars(errors).items() if isinstance(x, type)}
    named = {key for key in own if key.endswith("Error")}
    assert classes == named - {"FxparError"}
    texts = texts_of_the_package()
    rows = re.findall(r"^\| ([^`|][^|]*) \|[^|]*\|[^|]*\|$", page, re.M)
    pieces = [piece.strip() for row in rows for piece in row.split("...")]
    assert len(pieces) > 40
    assert [piece for piece in pieces if piece not in texts] == []


def test_pages_that_messages_name_exist() -> None:
    for path in ROOT.glob("fxpar/**/*.py"):
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / page).exists(), f"{name(path)} names {page}"


def test_the_picture_of_the_package_is_that_of_its_floors() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from house import PICTURE, picture
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert PICTURE.read_text() == picture(), "run python benchmarks/house.py --write"
