"""A rank that does not do what the others do: an error on all ranks that wait, in
FXPAR_TIMEOUT, and ranks that go on together if a script catches it."""

from __future__ import annotations

import os
import re
import tempfile
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar import pipeline
from fxpar.errors import PlanError, RankMismatchError
from tests.helpers.patience import given_up
from tests.helpers.scripts import run_script
from tests.helpers.spawn import shared_pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

SOON = {"FXPAR_TIMEOUT": "2", "FXPAR_LATE_TIMEOUT": "2"}


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def model_of(width: int = 8) -> nn.Module:
    return Model(width)


def compiled(fn: Any, **options: Any) -> Any:
    given = {"codegen": "eager", "mesh": "dp=2"} | options
    return torch.compile(fn, backend="fxpar", options=given)


def rank() -> int:
    return dist.get_rank()


def said(fn: Any, *args: Any) -> tuple[str, str, float]:
    """Kind and text of what a call raises, "" if nothing, and seconds it took."""
    begin = time.monotonic()
    try:
        fn(*args)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def evaluates_on_rank_0(inputs: str) -> tuple[str, str, float]:
    torch._dynamo.reset()
    model = model_of()
    run = compiled(model, inputs=inputs)
    x = torch.ones(4, 4)
    run(x).sum().backward()
    if rank() == 0:
        model.eval()
        with torch.no_grad():
            return said(run, torch.ones(6, 4))
    return said(run, x)


def test_evaluation_on_one_rank_is_told_at_once() -> None:
    outcomes = shared_pool(2).run(evaluates_on_rank_0, "global", timeout=60.0)
    for kind, text, _ in outcomes:
        assert kind == "RankMismatchError"
        assert "with fxpar.alone(): evaluate(model)" in text
        assert "x: [6, 4]" in text and "x: [4, 4]" in text
        assert "gradients off" in text and "gradients on" in text
    assert max(seconds for *_, seconds in outcomes) < 15.0


def test_in_local_mode_one_rank_may_evaluate() -> None:
    """As under DDP, of a model without buffers."""
    outcomes = shared_pool(2).run(evaluates_on_rank_0, "local", timeout=60.0)
    assert [kind for kind, *_ in outcomes] == ["", ""]


def breaks_early(who: int, idle: str) -> tuple[str, str, float]:
    torch._dynamo.reset()
    run = compiled(model_of())
    outcome = ("", "", 0.0)
    for step in range(4):
        if rank() == who and step == 2:
            break
        outcome = said(run, torch.ones(4, 4))
        if outcome[0]:
            break
    if rank() == who:
        if idle == "barrier":
            outcome = said(dist.barrier)
        elif idle == "sleeps":
            while not given_up():
                time.sleep(0.5)
        outcome = said(run, torch.ones(4, 4))  # late: it is told so
    return outcome


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_breaks_early(who: int) -> None:
    pool = shared_pool(2)
    outcomes = pool.run(breaks_early, who, "sleeps", env=SOON, timeout=60.0)
    pool.renew()
    for kind, text, _ in outcomes:
        assert kind == "RankMismatchError", outcomes
        assert f"rank {who} did not reach a call of the graph at " in text
        assert "with fxpar.alone()" in text and "FXPAR_TIMEOUT" in text
        assert f"rank {who} is idle at " in text
        assert "test_ranks_that_stop.py:" in text or "patience.py:" in text


ENDS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
run = torch.compile(model, backend="fxpar", options={"codegen": "eager"})
torch.manual_seed(0)
for step in range(9):
    if step == 3 and dist.get_rank() == %d:
        break
    run(torch.ones(4, 4)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_ends_early(who: int) -> None:
    ended = run_script(ENDS % who, ranks=2, timeout=60.0)
    assert ended[who].code == 0 and ended[1 - who].code == 1
    assert f"rank {who} did not reach" in ended[1 - who].output
    assert f"rank {who} has ended" in ended[1 - who].output
    assert "FXPAR_TIMEOUT" not in ended[1 - who].output  # that is not what it met


LEAVES_OUT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
run = torch.compile(model, backend="fxpar", options={"codegen": "%s"})
torch.manual_seed(0)
for step in range(9):
    loss = run(torch.ones(4, 4)).sum()
    if step != 3 or dist.get_rank() != 1:
        loss.backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_rank_that_leaves_out_a_backward(codegen: str) -> None:
    """It waits at its next call, and then ends; the others end with it."""
    ended = run_script(LEAVES_OUT % codegen, ranks=2, env=SOON, timeout=120.0)
    assert [each.code for each in ended] == [1, 1]
    text = ended[1].output
    assert "rank 0 did not reach" in text and "every backward" in text
    assert re.search(r"rank 0 is in a graph at \S+:10\b", text), text


def works_long() -> list[str]:
    """Rank 1 comes late, since it computes; in a library's code."""
    torch._dynamo.reset()
    run, out = compiled(model_of()), []
    for step in range(2):
        if rank() == 1:
            end = time.monotonic() + 2.6 * step
            while time.monotonic() < end:
                torch.ones(200, 200) @ torch.ones(200, 200)
        out.append(said(run, torch.ones(4, 4))[1])
    return out


def test_a_rank_that_computes_is_waited_for() -> None:
    runs = shared_pool(2).run(works_long, env=SOON, timeout=60.0)
    assert runs == [["", ""], ["", ""]]


def fails_to_plan(who: int, kind: str) -> list[tuple[str, str, float]]:
    """Failures that a script catches, then calls that all ranks make."""
    torch._dynamo.reset()
    out, before = [], pipeline.decided

    def decided(*args: Any, **kwargs: Any) -> Any:
        raise PlanError("nothing fits", fix="give it more")

    for turn in range(2):
        if rank() == who and kind == "plan":
            pipeline.decided = decided
        hints = {"up.weight": ["nowhere", "_"]} if rank() == who else None
        options = {"hints": hints} if kind == "option" else {}
        try:
            out.append(said(compiled(model_of(10 + turn), **options), torch.ones(4, 4)))
        finally:
            pipeline.decided = before
    run = compiled(model_of())
    out += [said(run, torch.ones(rows, 4)) for rows in (4, 6, 4)]
    return out


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plan", "option"])
def test_errors_that_are_caught_leave_ranks_in_step(who: int, kind: str) -> None:
    runs = shared_pool(2).run(fails_to_plan, who, kind, timeout=100.0)
    for me, outcomes in enumerate(runs):
        for name, text, seconds in outcomes[:2]:
            own = me == who and kind == "plan"
            assert name == ("PlanError" if own else "RankMismatchError"), runs
            if kind == "option":
                assert (
                    "FXPAR_HINTS is " in text
                    and f"nowhere', '_']}}\" on rank {who}" in text
                )
            elif me != who:
                assert f"rank {who} failed:\nPlanError" in text
            assert seconds < 20.0
        assert [name for name, *_ in outcomes[2:]] == ["", "", ""], runs


def one_option_is_wrong() -> list[tuple[str, str, float]]:
    torch._dynamo.reset()
    options = {"plan": "propogate"} if rank() == 1 else {}
    out = [said(compiled(model_of(), **options), torch.ones(4, 4)) for _ in range(2)]
    return [*out, said(compiled(model_of()), torch.ones(4, 4))]


def test_a_rank_that_fails_before_it_compiles() -> None:
    runs = shared_pool(2).run(one_option_is_wrong, timeout=60.0)
    for me, (first, second, last) in enumerate(runs):
        kind = "OptionError" if me else RankMismatchError.__name__
        assert [first[0], second[0], last[0]] == [kind, kind, ""], runs
        assert "propogate" in first[1] and first[2] < 20.0


def has_other_options(name: str, value: str) -> list[tuple[str, str, float]]:
    """Rank 1 has another variable at the first call; then none has."""
    torch._dynamo.reset()
    run = torch.compile(model_of(), backend="fxpar")
    with mock.patch.dict(os.environ, {f"FXPAR_{name}": value} if rank() else {}):
        first = said(run, torch.ones(4, 4))
    return [first, said(run, torch.ones(4, 4))]


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("INPUTS", "local", "global"),
        ("CODEGEN", "inductor", "eager"),
        ("DISABLE", "bucket,delay", ""),
        ("MESH", "tp=2", "dp=2"),
        ("MESH", "auto", "dp=2"),
    ],
)
def test_other_options_on_one_rank(name: str, value: str, default: str) -> None:
    env = {"FXPAR_CODEGEN": "eager"}
    runs = shared_pool(2).run(has_other_options, name, value, env=env, timeout=60.0)
    assert runs[0][0][1] == runs[1][0][1]
    for first, after in runs:
        assert first[0] == "RankMismatchError" and first[2] < 20.0, runs
        values = f"FXPAR_{name} is {default!r} on rank 0, {value!r} on rank 1"
        assert f"options differ between ranks:\n  {values}\n" in first[1]
        assert after[0] == "", runs


def shards_alone() -> tuple[str, str, float]:
    """Rank 1 alone shards its model."""
    torch._dynamo.reset()
    if rank():
        return said(fxpar.shard, model_of(), "dp=2")
    return said(compiled(model_of()), torch.ones(4, 4))


def test_sharding_on_one_rank_is_named() -> None:
    for kind, text, _ in shared_pool(2).run(shards_alone, timeout=60.0):
        assert kind == "RankMismatchError"
        assert "rank 1 is at 'options of fxpar.shard or a first call'" in text


def has_own_reports() -> str:
    """Each rank prints, dumps and waits as it likes."""
    torch._dynamo.reset()
    run, me = compiled(model_of()), rank()
    own = {"FXPAR_TIMEOUT": f"{20 + me}", "FXPAR_DEBUG": f"{me}"}
    with tempfile.TemporaryDirectory() as folder:
        own["FXPAR_DUMP"] = f"{folder}/{me}"
        with mock.patch.dict(os.environ, own):
            return said(run, torch.ones(4, 4))[1]


def test_options_that_change_no_program_may_differ() -> None:
    assert shared_pool(2).run(has_own_reports, timeout=60.0) == ["", ""]


def changes_on_one_rank() -> list[tuple[str, str, float]]:
    """A branch that one rank takes: another program under the same code."""
    torch._dynamo.reset()
    model = model_of()

    def fn(x: torch.Tensor, scaled: bool) -> torch.Tensor:
        return model(x) * 2 if scaled else model(x)

    run, x = compiled(fn), torch.ones(4, 4)
    return [said(run, x, False), said(run, x, rank() == 1), said(run, x, False)]


def test_another_branch_on_one_rank() -> None:
    for before, other, after in shared_pool(2).run(changes_on_one_rank, timeout=60.0):
        assert before[0] == after[0] == ""
        assert other[0] == "RankMismatchError"
        assert "ranks disagree about the program they call: rank 1" in other[1]
        assert "mul" in other[1] and other[2] < 15.0


def breaks_a_backward(how: str) -> list[tuple[str, str, float]]:
    """A backward that rank 1 compiles as no other does, fails to, or never calls; then
    a step that all take."""
    torch._dynamo.reset()
    scheduled, backwards = pipeline.scheduled, list[bool]()

    def one_more(graph: Any, *args: Any, **kwargs: Any) -> Any:
        regions = scheduled(graph, *args, **kwargs)
        backwards.append(kwargs["backward"])
        if kwargs["backward"]:
            if how == "fails":
                raise PlanError("nothing fits", fix="give it more")
            first = next(n for n in graph.nodes if "all_reduce" in str(n.target))
            with graph.inserting_before(first):
                graph.node_copy(first)
        return regions

    if rank() == 1 and how != "left out":
        pipeline.scheduled = one_more
    try:
        loss = compiled(model_of())(torch.ones(4, 4)).sum()
        assert rank() == 0 or how == "left out" or backwards == [False]  # not yet
        if rank() == 1 and how == "left out":
            while not given_up():
                time.sleep(0.1)
            outcome = ("", "", 0.0)
        else:
            outcome = said(loss.backward)
    finally:
        pipeline.scheduled = scheduled
    if how == "left out":
        return [outcome]
    again = compiled(model_of(10))
    return [outcome, said(lambda: again(torch.ones(4, 4)).sum().backward())]


def test_another_backward_on_one_rank_is_told_before_it_runs() -> None:
    for outcome, after in shared_pool(2).run(breaks_a_backward, "differs"):
        assert outcome[0] == "RankMismatchError"
        assert "about the collectives they launch: rank 1 from rank 0" in outcome[1]
        assert "+all_reduce" in outcome[1] and outcome[2] < 20.0
        assert after[0] == "", after


def test_a_backward_that_one_rank_cannot_compile() -> None:
    runs = shared_pool(2).run(breaks_a_backward, "fails")
    for me, (outcome, after) in enumerate(runs):
        assert outcome[0] == ("PlanError" if me else "RankMismatchError")
        assert "nothing fits" in outcome[1] and outcome[2] < 20.0
        assert after[0] == "", after


def test_a_backward_that_one_rank_leaves_out() -> None:
    pool = shared_pool(2)
    pool.renew()
    runs = pool.run(breaks_a_backward, "left out", env=SOON, timeout=60.0)
    pool.renew()
    name, text, _ = runs[0][0]
    assert name == "RankMismatchError"
    assert "rank 1 did not reach 'the backward of graph" in text
