"""What a user reads where ranks fail: each error once, with the user's frames and the
message last; what torchrun says last is that message."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from fxpar import errors, print_errors
from tests.helpers.processes import ROOT, environment
from tests.helpers.scripts import run_script

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
import fxpar

rank, case, *folder = os.environ["RANK"], *sys.argv[1:]
if folder:  # as torchrun does
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder[0]}/rank{rank}.json"
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
options = {"codegen": "eager"}
if case == "hint":
    options["hints"] = {"no.such.weight": ["dp"]}
if case == "option":
    options["plam"] = "search"
step = torch.compile(model, backend="fxpar", options=options)

def train():
    x = torch.randn(8, 16)
    step(x)  # the user's line

train()
"""


def ranks_of(case: str, tmp_path: Path) -> tuple[str, str]:
    """What ranks print, and what they leave for torchrun to end with."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"FXPAR_MESH": "dp=2"}
    ended = run_script(script, case, str(tmp_path), ranks=2, fork=True, env=env)
    assert 1 in [each.code for each in ended]
    files = sorted(tmp_path.glob("rank*.json"))
    return "".join(each.output for each in ended), files[0].read_text()


def launch(
    case: str, tmp_path: Path, text: str = SCRIPT, **variables: str
) -> tuple[str, str]:
    """What ranks print under torchrun, and what it ends with."""
    script = tmp_path / "script.py"
    script.write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *launcher, str(script), case],
        env=environment({"FXPAR_MESH": "dp=2"}, variables),
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    assert ended.returncode == 1
    # torchrun's own lines begin with a letter of their level and the date.
    ranks, _, footer = ended.stderr.partition("FAILED\n")
    return ranks, footer.partition("Root Cause")[2]


BY = [ranks_of, pytest.param(launch, marks=pytest.mark.slow)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", BY)
@pytest.mark.parametrize(
    ("case", "fact", "fix"),
    [
        ("hint", "HintError: hint 'no.such.weight' matches no parameter", "names are"),
        ("option", "OptionError: unknown option 'plam'", "did you mean 'plan'?"),
    ],
)
def test_an_error_of_all_ranks_is_printed_once(
    case: str, fact: str, fix: str, run: Any, tmp_path: Path
) -> None:
    ranks, footer = run(case, tmp_path)
    lines = [line.removeprefix("[rank0]: ") for line in ranks.splitlines()]
    assert ranks.count(fact) == 1
    begin = lines.index("Traceback (most recent call last):")
    end = next(i for i, line in enumerate(lines) if fact in line)
    files = [line for line in lines[begin:end] if line.startswith("  File ")]
    assert all("script.py" in line for line in files) and len(files) == 2
    assert "step(x)  # the user's line" in "".join(lines[begin:end])
    assert fix in lines[end + 1]
    assert ranks.count("rank 1 ends with the error that rank 0 prints") == 1
    # What torchrun says last is the message.
    assert fact in footer and fix in footer


# One start by torchrun itself, which ends rank 0; neither rank compiles anything.
OF_ONE_RANK = """
import os, time
import torch.distributed
import fxpar

if os.environ["RANK"] == "1":
    fxpar.print_errors.SECONDS = 0.5  # it asks for the error of rank 0
    raise fxpar.FxparError("a fact of rank 1", fix="look there")
time.sleep(60)
"""


@pytest.mark.multiprocess
def test_a_rank_prints_an_error_of_its_own_in_full(tmp_path: Path) -> None:
    ranks, footer = launch("", tmp_path, OF_ONE_RANK)
    assert "FxparError: a fact of rank 1\n" in ranks and "fix: look there" in ranks
    assert "rank 1 ends with" not in ranks
    assert "a fact of rank 1" in footer


@pytest.mark.slow
@pytest.mark.multiprocess
def test_debugging_shows_all_frames(tmp_path: Path) -> None:
    ranks, _ = launch("hint", tmp_path, FXPAR_DEBUG="1")
    assert "eval_frame.py" in ranks
    assert ranks.count("rank 1 ends with the error that rank 0 prints") == 1


def raised_while_handling(outer: str, inner: str) -> errors.FxparError:
    """An error that names ``inner``, raised where the user handled ``outer``."""
    try:
        try:
            raise ValueError(outer)
        except ValueError:
            raise errors.FxparError(inner)  # noqa: B904
    except errors.FxparError as error:
        return error


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_of_a_thread_is_printed(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(
        sys, "excepthook", lambda _, error, trace: printed.append(error)
    )
    monkeypatch.setattr(print_errors, "_store", lambda: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    print_errors.install()
    error = errors.FxparError("a fact of a thread")
    call = (type(error), error, None)
    thread = threading.Thread(target=sys.excepthook, args=call)
    thread.start()
    thread.join()
    assert printed == [error]


def test_what_the_user_handled_is_printed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", traceback.print_exception)
    monkeypatch.delenv("RANK", raising=False)
    print_errors.install()
    error = raised_while_handling("the first fact", "the second")
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.excepthook(type(error), error, error.__traceback__)
    assert "the first fact" in text.getvalue() and "the second" in text.getvalue()


def test_a_warning_without_a_line_of_the_user_shows_none_of_ours() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A thread that runs nothing but functions of libraries.
        thread = threading.Thread(target=errors.warn, args=("a fact",))
        thread.start()
        thread.join()
    (warning,) = caught
    text = warnings.formatwarning(
        warning.message, warning.category, warning.filename, warning.lineno
    )
    assert text == "fxpar:0: FxparWarning: a fact\n"
