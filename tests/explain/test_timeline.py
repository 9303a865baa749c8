"""A timeline as a trace: what Perfetto needs of each event, and what it would draw."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.explain.timeline import chrome_trace
from fxpar.passes.simulate.simulate_step import Event, Timeline

MS = 1e-3

# What each phase must have besides a name and a process.
NEEDED = {
    "X": {"ts", "dur", "tid", "cat", "args"},
    "M": {"tid", "args"},
    "C": {"ts", "args"},
    "i": {"ts", "s", "tid"},
    "s": {"ts", "tid", "id", "cat"},
    "f": {"ts", "tid", "id", "cat"},
}


def made(*events: Event, **fields: Any) -> Timeline:
    end = max(e.end for e in events)
    return Timeline(events, end, end, 0.0, 0.0, (), ((0.0, 10), (end, 20)), 20, ())


def hidden_and_exposed() -> Timeline:
    """A collective that a kernel hides, then one that is waited for."""
    both = {"axes": ("dp",), "bytes": 64}
    return made(
        Event("ar", "all_reduce", "dp", 0.0, 2 * MS, **both),
        Event("mm", "contraction", "compute", 0.0, 3 * MS, flops=8.0, origin="dot"),
        Event("w", "wait", "compute", 3 * MS, 0.0, of="ar"),
        Event("ar2", "all_reduce", "dp", 3 * MS, 4 * MS, line="a.py:1: x", **both),
        Event("w2", "wait", "compute", 3 * MS, 4 * MS, of="ar2"),
        Event("relu", "fused", "compute", 7 * MS, 1 * MS, nodes=3),
    )


def threads(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Slices by the name of their thread."""
    names = {
        e["tid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    out = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            out[names[event["tid"]]].append(event)
    return out


def check(trace: dict[str, Any]) -> None:
    """Required fields, events of a thread one after the other, arrows in pairs."""
    assert json.loads(json.dumps(trace)) == trace
    last = 0.0
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid"} | NEEDED[event["ph"]] <= set(event), event
        if event["ph"] != "M":
            assert event["ts"] >= last
            last = event["ts"]
    for slices in threads(trace).values():
        end = 0.0
        for event in slices:
            assert event["dur"] >= 0 and event["ts"] >= end - 1e-9
            end = event["ts"] + event["dur"]
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event["ph"])
    assert all(ends == ["s", "f"] for ends in arrows.values())


def test_a_thread_for_each_stream_and_an_event_for_each_launch():
    trace = chrome_trace(hidden_and_exposed(), {"dot": "[dp, _]"}, "rank 0")
    check(trace)
    found = threads(trace)
    assert {k: [e["name"] for e in v] for k, v in found.items()} == {
        "compute": ["mm", "w", "w2", "relu"],
        "communication dp": ["all_reduce", "all_reduce"],
    }
    by = {e["args"]["node"]: e for e in sum(found.values(), [])}
    assert (by["ar2"]["ts"], by["ar2"]["dur"]) == (3000.0, 4000.0)
    assert by["ar2"]["args"] == {
        "node": "ar2",
        "bytes": 64,
        "axes": "dp",
        "source": "a.py:1: x",
    }
    assert by["mm"]["args"] == {"node": "mm", "flops": 8.0, "spec": "[dp, _]"}
    assert by["relu"]["args"]["ops"] == 3
    assert by["w2"]["args"]["waits for"] == "ar2"
    names = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in names] == ["rank 0"]


def test_arrows_lead_from_collectives_to_their_waits():
    trace = chrome_trace(hidden_and_exposed())
    order = [
        (e["ph"], e.get("bp"), e["ts"], e["tid"])
        for e in trace["traceEvents"]
        if e["ph"] in "sf"
    ]
    # Without "bp" an arrow ends at the next slice: the wait, which takes no time.
    assert order == [
        ("s", None, 0.0, 1),
        ("f", None, 3000.0, 0),
        ("s", None, 3000.0, 1),
        ("f", "e", 3000.0, 0),
    ]
    shown = [e["ph"] + e["name"] for e in trace["traceEvents"] if e["ph"] != "M"]
    assert shown.index("fall_reduce") + 1 == shown.index("Xw")
    # The second begins inside its collective and ends inside its wait.
    assert shown.index("Xall_reduce", 2) < shown.index("sall_reduce", 3)
    assert shown.index("Xw2") < shown.index("fall_reduce", shown.index("Xw") + 1)


def test_memory_is_a_counter_and_the_backward_is_marked():
    line = hidden_and_exposed()
    trace = chrome_trace(line)
    counts = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]) for e in counts] == [
        (0.0, {"bytes": 10}),
        (8000.0, {"bytes": 20}),
    ]
    assert not [e for e in trace["traceEvents"] if e["ph"] == "i"]
    fields = dict(vars(line), backward=3 * MS)
    trace = chrome_trace(Timeline(**{k: v for k, v in fields.items() if k != "sent"}))
    check(trace)
    (mark,) = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("backward", 3000.0)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_plan_writes_its_trace(grad, tmp_path, monkeypatch):
    monkeypatch.setenv("FXPAR_HARDWARE", "a100")
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    hints = {"0.weight": ("tp", None), "2.weight": (None, "tp")}
    plan = fxpar.plan(
        model, torch.randn(8, 8), mesh="dp=2,tp=2", hints=hints, grad=grad
    )
    path = tmp_path / "trace.json"
    plan.to_trace(path)
    trace = json.loads(path.read_text())
    check(trace)
    slices = threads(trace)
    assert ("communication dp" in slices) == grad
    assert "communication tp" in slices
    assert len(sum(slices.values(), [])) == len(plan.timeline.events)
    marks = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert len(marks) == grad
    arguments = [e["args"] for e in slices["compute"]]
    assert any("test_timeline.py" in a.get("source", "") for a in arguments)
    assert any("tp" in a.get("spec", "") for a in arguments)
    names = [
        e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
        if "name" in e["args"]
    ]
    assert "a rank of dp=2,tp=2 on a100" in names
