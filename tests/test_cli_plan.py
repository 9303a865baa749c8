"""``python -m fxpar plan``: what it takes, prints and writes, and how it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fxpar.__main__ import TOO_LARGE, main, parser
from fxpar.sharding.plan import Plan

pytestmark = pytest.mark.usefixtures("propagated")

ROOT = Path(__file__).parent.parent

FACTORIES = """
    import torch
    from torch import nn

    def model():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def inputs():
        return (torch.empty(4, 8, device="meta"),)

    def full(): return model(), inputs(), {}
    def named(): return model(), (), {"input": inputs()[0]}
    def short(): return model(), inputs()
    def asks(x): return model()
    def wrong(): return model(), 3
    def nothing(): return 5
    value = 7
"""

SCRIPT = """
    import sys
    import torch
    import fxpar
    from torch import nn

    kind = sys.argv[1] if len(sys.argv) > 1 else "module"
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    print("ran as", __name__, kind)

    @torch.compile(backend="fxpar")
    def decorated(x):
        return model(x).sum()

    if kind == "module":
        call = torch.compile(model, backend="fxpar")
        call.train()
        torch.optim.SGD(call.parameters(), lr=0.1)
    elif kind == "in place":
        model.compile(backend="fxpar")
        call = model
    elif kind == "function":
        call = torch.compile(lambda x: model(x).sum(), backend="fxpar")
    elif kind == "decorated":
        call = decorated
    elif kind == "inference":
        call = torch.no_grad()(torch.compile(model, backend="fxpar"))
    elif kind == "fails":
        sys.exit("no such data")
    elif kind == "ends":
        sys.exit(0)
    else:
        call = torch.compile(model, backend="eager")
    try:
        call(x)
    except Exception:
        print("swallowed")
    print("went on")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "factories.py").write_text(textwrap.dedent(FACTORIES))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FXPAR_MESH", raising=False)
    yield tmp_path
    sys.modules.pop("factories", None)


def plan_of(*arguments: str) -> Plan:
    assert main(["plan", *arguments, "--json", "plan.json"]) == 0
    return Plan.load("plan.json")


@pytest.mark.parametrize("name", ["full", "named", "short"])
@pytest.mark.parametrize("place", ["factories.py", "factories", "./factories.py"])
def test_a_factory_is_planned(place: str, name: str, folder: Path, capsys) -> None:
    plan = plan_of(f"{place}:{name}", "--mesh", "dp=2,tp=4")
    assert str(plan.spec("0.weight")) == "[tp, _]"
    assert plan.mesh.size == 8 and not plan.gradients
    printed = capsys.readouterr().out
    assert "all_reduce" in printed and "wrote plan.json" in printed
    assert "aten.relu" not in printed, "a summary, where a file holds the plan"


def test_options_are_taken(folder: Path, capsys) -> None:
    (folder / "hints.toml").write_text('"0.weight" = ["_", "_"]\n')
    target = ["factories.py:full", "--mesh", "dp=2,tp=4"]
    plan = plan_of(*target, "--grad", "--hints", "hints.toml", "--text")
    assert str(plan.spec("0.weight")) == "[_, _]"
    assert {name for name, _ in plan.gradients} >= {"0.weight", "2.bias"}
    assert "aten.relu" in capsys.readouterr().out
    assert not plan_of(*target, "--mode", "replicate").collectives
    again = plan_of(*target, "--mode", "plan.json")
    assert again.hash == Plan.load("plan.json").hash
    assert main(["plan", *target, "--save", "old.json"]) == 0
    assert (folder / "old.json").is_file()


@pytest.mark.parametrize("text", [True, False])
def test_a_plan_that_is_too_large_says_so_first(
    text: bool, folder: Path, capsys
) -> None:
    target = ["plan", "factories.py:full", "--mesh", "dp=2", "--hardware", "h100"]
    options = [*target, "--grad", *["--text"] * text, "--json", "plan.json"]
    assert main([*options, "--memory", "1kB"]) == TOO_LARGE == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(
        r"DOES NOT FIT: a rank needs [\d.]+ kB at its peak, and has 1 kB", first
    )
    assert main(["plan", "plan.json"]) == TOO_LARGE, "a saved plan says so too"
    assert capsys.readouterr().out.startswith("DOES NOT FIT")
    assert main([*options, "--memory", "1MiB"]) == 0
    said = capsys.readouterr().out
    assert "DOES NOT FIT" not in said and "kB of 1.049 MB" in said
    assert "a step on h100: " in said


def test_layers_add_up_to_the_plan(folder: Path, capsys) -> None:
    target = ["factories.py:full", "--mesh", "dp=2,tp=4", "--hardware", "h100"]
    assert main(["plan", *target, "--grad", "--layers"]) == 0
    said = capsys.readouterr().out
    held, computed = re.search(
        r": ([\d.]+ \w+) compute, .* peak memory ([\d.]+ \w+)", said
    ).group(2, 1)
    layers, total = said.splitlines()[-3:-1], said.splitlines()[-1]
    assert any(line.startswith("* (3 layers)") for line in layers), said
    numbers = re.findall(r"([\d.]+) (\w+)", total)
    sizes = [float(x) * {"kB": 1e3, "bytes": 1}[unit] for x, unit in numbers[:2]]
    size, unit = held.split()
    assert sum(sizes) == pytest.approx(float(size) * {"kB": 1e3}[unit], rel=1e-2)
    seconds = [float(x) for x, unit in numbers[2:4] if unit == "us"]
    assert sum(seconds) == pytest.approx(float(computed.split()[0]), rel=1e-2)
    assert main(["plan", *target, "--json", "plan.json"]) == 0


@pytest.mark.parametrize(
    ("mesh", "why"),
    [("pp=2", "stages"), ("dp=2{1.0,0.5}", "unequal shares"), ("", "has no program")],
)
def test_why_there_is_no_table_by_layer(
    mesh: str, why: str, folder: Path, capsys
) -> None:
    target = ["factories.py:full", "--mesh", mesh or "dp=2", "--mode", "propagate"]
    if not mesh:
        plan_of(*target)
        target = ["plan.json"]
    assert main(["plan", *target, "--layers"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no table by layer: ") and why in last


def test_a_saved_plan_is_not_planned_for_something_else(folder: Path, capsys) -> None:
    plan_of("factories.py:full", "--mesh", "dp=2")
    assert main(["plan", "plan.json", "--memory", "1kB", "--mesh", "dp=4"]) == 1
    said = capsys.readouterr().err
    assert "without --mesh, --memory" in said and "--mode plan.json" in said


def test_where_parameters_rest_is_a_flag(folder: Path) -> None:
    target = ["factories.py:full", "--mesh", "tp=4", "--grad"]
    whole, split = (plan_of(*target, flag) for flag in ("--no-shard", "--shard"))
    assert split.hash == plan_of(*target).hash
    assert str(split.spec("0.weight")) == "[tp, _]"
    memory, less = dict(whole.memory), dict(split.memory)
    for kind in ("parameters", "optimizer state"):
        assert memory[kind] > less[kind]


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("80GB", 80e9), ("2GiB", 2 << 30), ("1e9", 1e9), ("5", 5), ("3k", 3000)]
    + [("80 GB", 80e9), ("80gib", 80 << 30), (".5GB", 5e8)],
)
def test_sizes_are_read_as_people_write_them(size: str, nbytes: float) -> None:
    asked = ["plan", "x.py:f", "--mesh", "dp=2", "--memory", size]
    assert parser().parse_args(asked).memory == nbytes


@pytest.mark.parametrize("size", ["abc", "", "GB", "-5", "inf", "1e400", "8GBB", "8iB"])
def test_what_is_no_size_is_refused(size: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["plan", "x.py:f", f"--memory={size}"])
    said = capsys.readouterr().err
    assert f"{size!r} is no size of memory: give one such as 80GB" in said


def test_a_page_is_written(folder: Path, capsys) -> None:
    target = ["factories.py:full", "--mesh", "dp=2,tp=4"]
    assert main(["plan", *target, "--html", "plan.html", "--json", "plan.json"]) == 0
    assert "<!doctype html>" in (folder / "plan.html").read_text()
    assert main(["plan", "plan.json", "--html", "saved.html"]) == 0
    assert Plan.load("plan.json").hash in (folder / "saved.html").read_text()
    assert "wrote saved.html" in capsys.readouterr().out
    assert main(["plan", "plan.json", "--why", "relu"]) == 0
    assert "relu: [dp, tp]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind", ["module", "in place", "function", "decorated", "inference"]
)
def test_a_script_is_planned_and_no_step_run(kind: str, folder: Path, capfd) -> None:
    plan = plan_of("train.py", "--mesh", "dp=2,tp=2", "--args", f"'{kind}'")
    printed = capfd.readouterr().out
    assert f"ran as __main__ {kind}" in printed
    assert "went on" not in printed and "swallowed" not in printed
    names = [name for name, _ in plan.parameters]
    argument = "x" if kind in ("function", "decorated") else "input"
    assert str(plan.spec(argument)) == "[dp, _]", "named as the user does"
    assert sum(name.endswith("0.weight") for name in names) == 1
    assert bool(plan.gradients) == (kind != "inference")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["factories.py:full"], "no mesh"),
        (["factories.py:full", "--mesh", "dp"], "cannot read mesh"),
        (["factories.py:none", "--mesh", "dp=2"], "has no function 'none'"),
        (["factories.py:value", "--mesh", "dp=2"], "has no function 'value'"),
        (["factories.py:asks", "--mesh", "dp=2"], "must take nothing.*'x'"),
        (["factories.py:wrong", "--mesh", "dp=2"], r"returned \(Sequential, int\)"),
        (["factories.py:nothing", "--mesh", "dp=2"], r"returned \(int\)"),
        (["nowhere.py:full", "--mesh", "dp=2"], "no script 'nowhere.py'"),
        (["nowhere.py", "--mesh", "dp=2"], "no script 'nowhere.py'"),
        (["no.where:full", "--mesh", "dp=2"], "no module 'no.where'"),
        (["factories", "--mesh", "dp=2"], "'factories' names no function"),
        (["train.py", "--mesh", "dp=2", "--args", "other"], "calls nothing"),
        (["train.py", "--mesh", "dp=2", "--args", "ends"], "calls nothing"),
        (["nowhere.json"], "cannot read the plan file"),
        (["factories.py:full", "--mesh", "dp=2", "--mode", "x"], "plan file x"),
        (["factories.py:full", "--mesh", "dp=2", "--hints", "x"], "hints file x"),
        (["factories.py:full", "--mesh", "dp=2", "--hardware", "x"], "hardware.*x"),
    ],
)
def test_errors_say_what_is_wrong(
    arguments: list[str], message: str, folder: Path, capsys
) -> None:
    assert main(["plan", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fxpar: ") and "\n  fix: " in said
    assert re.search(message, said), said


def test_what_the_users_code_raises_goes_through(folder: Path) -> None:
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    for target in ("broken.py:f", "broken:f"):
        with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
            main(["plan", target, "--mesh", "dp=2"])
    with pytest.raises(SystemExit, match="no such data"):
        main(["plan", "train.py", "--mesh", "dp=2", "--args", "fails"])


def test_torch_compile_is_put_back(folder: Path) -> None:
    before = torch.compile
    plan_of("train.py", "--mesh", "dp=2")
    assert torch.compile is before


def test_as_a_command(folder: Path) -> None:
    command = [sys.executable, "-m", "fxpar", "plan", "factories:full"]
    done = subprocess.run(
        [*command, "--mesh", "tp=4"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "mesh: tp=4" in done.stdout and "aten.relu" in done.stdout


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "missing.py"]) == 1
    assert "there is no script 'missing.py'" in capsys.readouterr().err
