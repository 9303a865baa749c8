"""The plan as a page: its data, its tree, and, where there is a browser, the page."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpar
from fxpar import FxparWarning, Mesh, Spec
from fxpar.explain.html import ModuleGroup, page_data, render, tree
from fxpar.passes.simulate.simulate_step import Event, Timeline
from fxpar.sharding.plan import Collective, NodePlan, Plan
from fxpar.units import short_bytes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
EVIL = "</script><b>__PLAN__\u2028 & \"'"


@torch.library.custom_op("test_html::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@odd.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def several(x, w):
    """Partial specs, a tuple result, and an op without a rule."""
    y = x @ w
    values, places = torch.max(y, 1)
    return odd(y).sum() + values.sum(), places


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.warns(FxparWarning, match="odd"):
        ops = fxpar.plan(several, x, w, mesh="dp=2,tp=2", hints={"w": ("tp", None)})
    x.requires_grad_()  # so that the first layer does what the others do
    model = fxpar.plan(Model(4), x, mesh="dp=2,tp=2", grad=True)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model.save(path)
    return {"ops": ops, "model": model, "loaded": Plan.load(path)}


def texts(data: dict, numbers: list[int]) -> list[str]:
    return [data["texts"][i] for i in numbers]


def leaves(items: list) -> list[int]:
    found = []
    for item in items:
        found += [item] if isinstance(item, int) else leaves(item[2])
    return found


def test_the_overview_adds_up(plans: dict[str, Plan]) -> None:
    plan = plans["model"]
    data = page_data(plan, getattr(plan, "timeline", None))
    axes = {axis: (ops, parameters) for axis, _, ops, parameters, _ in data["axes"]}
    for axis in plan.mesh.names:
        ops = sum(any(axis in a for _, a in node.factors) for node in plan.nodes)
        split = sum(axis in spec.sharded_axes for _, spec in plan.parameters)
        assert axes[axis] == (ops, split)
    total, compute, exposed = data["step"]
    assert 0 < compute <= total and compute + exposed <= total * (1 + 1e-9)


@pytest.mark.parametrize("name", ["ops", "model", "loaded"])
def test_every_op_stands_on_the_page_once(name: str, plans: dict[str, Plan]) -> None:
    data = page_data(plans[name])
    shown = Counter(texts(data, [row[0] for row in data["rows"]]))
    for node in plans[name].nodes:
        assert shown[node.name] == 1, node.name
    values = texts(data, [value[0] for value in data["values"]])
    assert values == [value for value, _ in plans[name].values]
    assert sorted(leaves(data["tree"])) == list(range(len(data["rows"])))


@pytest.mark.parametrize("name", ["ops", "model", "loaded"])
def test_edges_hold_every_collective_once(name: str, plans: dict[str, Plan]) -> None:
    plan = plans[name]
    data = page_data(plan)
    shown: Counter = Counter()
    for _, _, steps, *_ in data["edges"]:
        for kind, axes, size in steps:
            if size:
                shown[(*texts(data, [kind, axes]), size)] += 1
    assert shown == Counter(
        (c.kind, "+".join(c.axes), c.bytes) for c in plan.collectives
    )
    assert sum(entry[3] for entry in data["totals"]) == sum(
        c.bytes for c in plan.collectives
    )
    assert sum(entry[2] for entry in data["dearest"]) == len(plan.collectives)


def test_what_the_backward_gathers_again_is_shown(plans: dict[str, Plan]) -> None:
    plan = plans["model"]
    node = plan.nodes[-1].name
    again = Collective("all_gather", ("dp",), 77, f"{node} (model.py:1: x)")
    data = page_data(replace(plan, collectives=(*plan.collectives, again)))
    (row,) = (e[0] for e in data["edges"] for _, _, size in e[2] if size == 77)
    assert data["texts"][data["rows"][row][0]] == node


def test_a_loaded_plan_shows_the_same_specs(plans: dict[str, Plan]) -> None:
    traced, loaded = page_data(plans["model"]), page_data(plans["loaded"])
    made = 0
    for a, b in zip(traced["values"], loaded["values"], strict=True):
        assert texts(traced, [a[0], a[3]]) == texts(loaded, [b[0], b[3]])
        if b[2] is not None:  # made by an op
            made += texts(traced, a[3:4]) != texts(traced, a[4:5])
            assert texts(traced, a[3:5]) == texts(loaded, b[3:5])
    assert made, "some value is resharded where it is made"


def test_an_op_reads_the_values_it_reads(plans: dict[str, Plan]) -> None:
    plan = plans["ops"]
    data = page_data(plan)
    names = texts(data, [value[0] for value in data["values"]])
    rows = {data["texts"][row[0]]: row for row in data["rows"]}
    first = rows[plan.nodes[0].name]
    assert [names[v] for v in first[3][::2]] == ["x", "w"]
    assert texts(data, first[3][1::2]) == ["[dp, tp]", "[tp, _]"]
    assert data["texts"][data["values"][first[4][0]][4]].endswith("partial(sum: tp)")
    assert len(rows["max_1"][4]) == 2, "values and places"


def test_a_loaded_plan_says_which_values_an_op_reads(plans: dict[str, Plan]) -> None:
    """And a file written before it did so is shown without."""
    traced, loaded = page_data(plans["model"]), page_data(plans["loaded"])

    def reads(data: dict) -> dict[str, list[str]]:
        names = texts(data, [value[0] for value in data["values"]])
        return {
            data["texts"][row[0]]: [names[v] if v >= 0 else "?" for v in row[3][::2]]
            for row in data["rows"]
        }

    found, known = reads(loaded), reads(traced)
    ops = [node.name for node in plans["model"].nodes]
    assert "?" not in itertools.chain(*(known[name] for name in ops))
    assert [found[name] for name in ops] == [known[name] for name in ops]
    data = plans["model"].to_record()
    for node in data["nodes"]:
        del node["reads"]
    old = Plan.from_dict(data)
    assert old.hash == plans["model"].hash
    shown = reads(page_data(old))
    assert {value for name in ops for value in shown[name]} == {"?"}


def test_unknown_ops_and_notes_are_told(plans: dict[str, Plan]) -> None:
    data = page_data(replace(plans["ops"], notes=("a note",)))
    assert data["notes"] == ("a note",)
    assert [name for name in data["unknown"] if "odd" in name]


def test_memory_is_what_a_rank_holds(plans: dict[str, Plan]) -> None:
    plan = plans["model"]
    size = sum(
        p.numel() * 4 // plan.mesh.count(plan.spec(name).sharded_axes)
        for name, p in Model(4).named_parameters()
    )
    memory = page_data(plan)["memory"]
    assert memory["parameters"] == size
    assert memory["optimizer state"] == 2 * size
    assert page_data(plans["loaded"])["memory"] == memory


def test_a_page_has_one_step_time_and_one_peak() -> None:
    plan = fxpar.plan(Model(4), torch.ones(8, 8), mesh="dp=2", grad=True, mode="search")
    data, predicted = page_data(plan, plan.timeline), plan.predicted
    assert data["says"] == [str(predicted)]
    assert max(n for _, n in data["timeline"]["memory"]) == predicted.held_bytes
    assert sum(data["memory"].values()) == predicted.held_bytes
    assert short_bytes(predicted.held_bytes) in str(predicted)
    assert " ms" not in "".join(x for x in plan.notes if "by their predicted" not in x)


def group(items: list, *path: str) -> list:
    for label in path:
        (items,) = (item[2] for item in items if item[0] == label)
    return items


@pytest.mark.parametrize("name", ["model", "loaded"])
def test_layers_that_are_alike_are_folded(name: str, plans: dict[str, Plan]) -> None:
    data = page_data(plans[name])
    forward = group(data["tree"], "forward")
    fold = next(item for item in forward if item[1])
    assert fold[0] == "layers.0 … layers.3"
    assert [item[0] for item in fold[2]] == [f"layers.{i}" for i in range(4)]
    inside = fold[2][1][2]
    assert [item[0] for item in inside if not isinstance(item, int)] == [
        "norm", "up", "down",
    ]  # fmt: skip
    assert len({len(leaves(item[2])) for item in fold[2]}) == 1
    backward = group(data["tree"], "backward")
    assert backward[0][0] == "head", "the backward begins where the forward ends"
    assert [item[0] for item in backward if not isinstance(item, int) and item[1]] == [
        "layers.3 … layers.0"
    ]


def test_layers_that_differ_are_not_folded() -> None:
    modules = [f"forward/h.{i}.{part}" for i in range(5) for part in "ab"]
    keys = [0, 1, 0, 1, 0, 2, 0, 1, 0, 1]
    (forward,) = tree(modules, keys)
    assert isinstance(forward, ModuleGroup)
    first, third, last = forward.items
    assert (first.label, first.is_repeated) == ("h.0 … h.1", True)
    assert (third.label, third.is_repeated) == ("h.2", False)
    assert (last.label, last.is_repeated) == ("h.3 … h.4", True)
    assert tree(["forward/a", "forward/b"], [0, 0])[0].items[0].label == "a", (
        "modules without a number are never folded"
    )


def test_a_group_stands_where_its_first_row_does() -> None:
    modules = [None, "forward/a", "forward/", "forward/a", "forward/b.c.d"]
    assert tree(modules, range(5)) == [
        0,
        ModuleGroup(
            "forward", (ModuleGroup("a", (1, 3)), 2, ModuleGroup("b.c.d", (4,)))
        ),
    ]


def modules_of(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in plan.nodes:
        found.setdefault(node.module or "", set()).add(node.op)
    return found


def check_owners(plan: Plan) -> None:
    found = modules_of(plan)
    for phase in ("forward", "backward"):
        for i in range(4):
            layer = f"{phase}/layers.{i}"
            assert f"{layer}.norm" in found and f"{layer}.down" in found
    assert "aten.rsqrt.default" in found["forward/layers.2.norm"]
    assert any("relu" in op for op in found["forward/layers.2"])
    counts = Counter(node.module for node in plan.nodes)
    parts = {".".join(m.split(".")[2:]) for m in counts if "/layers." in m}
    for part in parts:
        number = {counts[f"forward/layers.{i}.{part}".rstrip(".")] for i in range(4)}
        assert len(number) == 1, f"layers differ in {part!r}"


def test_modules_are_found_without_dynamo(plans: dict[str, Plan]) -> None:
    check_owners(plans["model"])
    found = modules_of(plans["model"])
    assert "aten.add.Tensor" in found["backward/layers.2"], "sums of gradients"
    assert "aten.add.Tensor" not in found["backward/head"]


def test_modules_are_those_that_dynamo_notes() -> None:
    before = len(fxpar.plans())
    options = {"mesh": "dp=1", "codegen": "eager"}
    model = torch.compile(Model(4), backend="fxpar", options=options)
    model(torch.randn(8, 8, requires_grad=True)).sum().backward()
    (plan,) = fxpar.plans()[before:]
    check_owners(plan)


def test_modules_are_saved_and_change_no_hash(
    plans: dict[str, Plan], tmp_path: Path
) -> None:
    plan, path = plans["model"], tmp_path / "plan.json"
    plan.save(path)
    assert [n.module for n in Plan.load(path).nodes] == [n.module for n in plan.nodes]
    bare = replace(plan, nodes=tuple(replace(n, module=None) for n in plan.nodes))
    assert bare.hash == plan.hash
    data = json.loads(path.read_text())
    for node in data["nodes"]:
        del node["module"]
    path.write_text(json.dumps(data))
    old = Plan.load(path)
    assert {n.module for n in old.nodes} == {None}
    assert len(leaves(page_data(old)["tree"])) == len(page_data(old)["rows"])


def data_of(page: str) -> dict:
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(found)


def synthetic(ops: int, *, name: str = "op", per_layer: int = 40) -> Plan:
    """A plan of many ops: a third of them all-reduce."""
    split, whole = Spec("dp", None, "tp"), Spec("dp", None, None)
    partial = Spec("dp", None, None, partial={"tp": "sum"})
    nodes, values, collectives, reasons = [], [("x", whole)], [], []
    for i in range(ops):
        layer, k = divmod(i, per_layer)
        made = (split, whole, partial)[k % 3]
        line = f"model.py:{k}: y = self.layers[{k}](x) {EVIL if name == EVIL else ''}"
        nodes.append(
            NodePlan(
                f"{name}_{i}",
                "aten.mm.default",
                (("m", ("dp",)), ("k", ("tp",))),
                (),
                (split, whole),
                (made,),
                (made.without_partial(),),
                ((64, 128, 512),) * 3,
                ("float32",) * 3,
                "m k, k n -> m n",
                line,
                f"forward/model.layers.{layer}.{'attention' if k < 20 else 'mlp'}",
            )
        )
        values.append((nodes[-1].name, made.without_partial()))
        reasons.append((nodes[-1].name, f"  dp: batch dim of x\n    from {name}_{i}"))
        if made is partial:
            cause = f"{name}_{i} ({line})"
            collectives.append(Collective("all_reduce", ("tp",), 1 << 20, cause))
    return Plan(
        Mesh.parse("dp=8,tp=8"),
        (whole,),
        (whole,),
        (),
        (),
        tuple(values),
        tuple(nodes),
        tuple(collectives),
        (EVIL,),
        tuple(reasons),
        (EVIL,),
    )


def test_the_page_needs_nothing_else(plans: dict[str, Plan], tmp_path: Path) -> None:
    plans["model"].to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    without_data = re.sub(r'(id="data">).*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|//[a-z]|\bfetch\(|import\(|XMLHttp", without_data)
    assert not re.search(r"\bsrc=|\bhref=|@import|url\(", without_data)
    assert "default-src 'none'" in page
    assert page.count("<script") == 2
    assert data_of(page)["timeline"]["events"], "of a traced plan, the timeline too"
    plans["loaded"].to_html(tmp_path / "loaded.html")
    assert data_of((tmp_path / "loaded.html").read_text())["timeline"] is None


def test_a_program_without_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes is split by speed, so that each rank is simulated by itself."""
    monkeypatch.setenv("FXPAR_HARDWARE", "cpu")
    plan = fxpar.plan(lambda: torch.zeros(3), mesh="dp=2{1.0,0.5}", mode="search")
    assert str(plan.outputs[0]) in render(plan)
    assert plan.predicted.seconds > 0


def test_names_are_escaped() -> None:
    page = render(synthetic(12, name=EVIL))
    assert page.count("<script") == page.count("</script>") == 2
    assert "\u2028" not in page
    data = data_of(page)
    assert f"{EVIL}_3" in data["texts"] and data["unknown"] == [EVIL]


def test_ten_thousand_ops() -> None:
    plan = synthetic(10_000)
    begun = time.perf_counter()
    page = render(plan)
    seconds = time.perf_counter() - begun
    assert len(page.encode()) < 5e6
    assert seconds < 30, "takes about one second"
    data = data_of(page)
    assert len(data["rows"]) == 10_002
    (fold,) = group(data["tree"], "forward.model")
    assert fold[0] == "layers.0 … layers.249" and fold[1]


def test_a_timeline_is_plain_data() -> None:
    plan, event = synthetic(3), Event("op_1", "fused", "compute", 0.25, 0.5)
    line = Timeline((event,), 1.0, 0.5, 0.0, 0.0, (), ((0.25, 7),), 7, ())
    data = page_data(plan, line)
    shown = data["timeline"]
    assert texts(data, shown["events"][0][:3]) == ["op_1", "compute", "fused"]
    assert shown["events"][0][3:5] == [0.25, 0.5]
    assert shown["memory"] == [[0.25, 7]]
    assert page_data(plan)["timeline"] is None
    assert page_data(plan, replace(line, events=()))["timeline"]["events"] == []


WATCH = """<script>var failed = [];
addEventListener("error", e => failed.push(e.message));
addEventListener("securitypolicyviolation", e => failed.push(e.blockedURI));</script>"""

REPORT = """<script>
const said = {};
try { said.value = (() => { %s })(); } catch (e) { failed.push(String(e)); }
said.failed = failed;
const out = document.createElement("pre");
out.id = "said"; out.textContent = JSON.stringify(said); document.body.append(out);
</script>"""


def browse(page: str, code: str, folder: Path) -> dict:
    """What ``code`` returns on the page in a browser; fails on any error there."""
    file = folder / "page.html"
    page = page.replace("<head>", f"<head>{WATCH}", 1)
    page = page.replace("</body>", f"{REPORT % code}</body>")
    file.write_text(page, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--disable-gpu", "--window-size=1400,900"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        found = found.replace(entity, char)
    said = json.loads(found)
    assert said["failed"] == []
    return said["value"]


browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")


@browser
def test_the_page_works(plans: dict[str, Plan], tmp_path: Path) -> None:
    plan = plans["ops"]
    plan.to_html(tmp_path / "ops.html")
    code = """
      const by = name => ROWS.findIndex(r => r.name === name);
      const press = (key, to) => to.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const got = {};
      jump(by("max_1"));
      got.panel = document.getElementById("panel").textContent;
      got.arcs = document.querySelectorAll("#arcs path").length;
      got.on = document.querySelector(".r.on .name").textContent;
      press("ArrowDown", graph);
      got.below = LIST[at].kind + (LIST[at].row || LIST[at].edge).id;
      press("Home", graph); got.home = at;
      const open = LIST[0].group.open; press(open ? "ArrowLeft" : "ArrowRight", graph);
      got.folded = LIST[0].group.open !== open;
      press("/", document.body); got.focus = document.activeElement.id;
      find.value = "aten.max.dim"; search();
      got.found = document.getElementById("found").textContent;
      got.left = LIST.filter(x => x.kind === "o").map(x => x.row.name);
      find.value = "partial tp"; search();
      press("Escape", find); got.all = matching === null;
      for (const id of ["communication", "memory", "timeline", "notes"]) {
        tab(id); got[id] = document.getElementById(id).textContent;
      }
      got.hatched = swatch("[dp, _] partial(sum: tp)").className;
      got.boxes = swatch("[dp, _] partial(sum: tp)").children.length;
      got.bands = fill(["dp", "tp"]);
      return got;
    """  # noqa: E501
    said = browse((tmp_path / "ops.html").read_text(encoding="utf-8"), code, tmp_path)
    assert plan.why("max_1.0").splitlines()[1].strip() in said["panel"]
    assert "aten.max.dim" in said["panel"] and "max_1.1" in said["panel"]
    assert said["on"] == "max_1"
    assert said["arcs"] > 0
    assert said["home"] == 0 and said["folded"] and said["focus"] == "find"
    assert said["left"] == ["max_1"] and said["found"].startswith("1 of ")
    assert said["all"]
    assert (
        "all_reduce" in said["communication"]
        and "test_html.py" in (said["communication"])
    )
    assert "Predicted" in said["timeline"] and "inputs" in said["memory"]
    assert "odd" in said["notes"]
    assert said["hatched"] == "sw part" and said["boxes"] == 2
    assert "--axis0" in said["bands"] and "--axis1" in said["bands"]


@browser
@pytest.mark.slow
def test_a_page_of_ten_thousand_ops_is_usable(tmp_path: Path) -> None:
    code = """
      const begun = performance.now();
      jump(ROWS.findIndex(r => r.name.endsWith("_5000")));
      const drawn = document.querySelectorAll(".r").length;
      find.value = "_777"; search();
      return {name: ROWS[selected].name, drawn, ms: performance.now() - begun,
              opened: begun, left: LIST.filter(x => x.kind === "o").length,
              bold: document.querySelectorAll("b").length};
    """
    said = browse(render(synthetic(10_000, name=EVIL)), code, tmp_path)
    assert said["name"] == f"{EVIL}_5000"
    assert said["drawn"] < 100, "only rows in sight are drawn"
    assert said["left"] == 11, "777 and 7770 to 7779"
    assert said["bold"] == 0, "names are text"
    assert said["opened"] < 20_000 and said["ms"] < 20_000
