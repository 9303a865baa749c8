"""Random schedules of random programs change no number; what breaks one is noticed."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import fxpar
from fxpar.errors import FxparWarning, ScheduleError
from fxpar.fusion import stage
from fxpar.fusion.verbs import apply
from fxpar.passes import steps
from tests.passes.random_programs import Case
from tests.passes.test_fuzz import close, run
from tests.sharding.search.test_search import machine

QUICK, ALL = 30, 1000


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine().save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    monkeypatch.setenv("FXPAR_SCHEDULE", "auto")

    def failed(error: Exception) -> None:
        raise error

    monkeypatch.setattr(stage, "failed", failed)


def test_a_failure_to_choose_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: Any) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(stage, "choose", choose)
    x = torch.randn(4, 4)
    with pytest.warns(FxparWarning, match="no schedule is chosen: KeyError"):
        plan = fxpar.plan(torch.relu, x, mesh="dp=2", schedule="auto")
    torch.testing.assert_close(plan.simulate(x), torch.relu(x))


@pytest.mark.parametrize("start", range(0, QUICK, 10))
def test_what_is_chosen(start: int, slow: None) -> None:
    for seed in range(start, start + 10):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, ALL, 10))
def test_what_is_chosen_for_many(start: int, slow: None) -> None:
    for seed in range(start, start + 10):
        run(seed)


class Scheduler:
    """Grows a schedule line by line, each of which the graph so far allows."""

    def __init__(self, plan: Any, seed: int) -> None:
        self.plan, self.random = plan, random.Random(seed)
        self.lines: list[str] = []
        self.refused: Counter[str] = Counter()

    def graph(self, more: str = "") -> fx.Graph:
        text = "\n".join([*self.lines, more])
        return apply(text, self.plan.result.local, self.plan.mesh, lowered=False)

    def grow(self, tries: int) -> None:
        graph = self.graph()
        for number in range(tries):
            line = self._line(graph, number)
            if line is None:
                continue
            try:
                graph = self.graph(line)
                self.lines.append(line)
            except ScheduleError as error:
                self.refused[error.what.split(":")[0]] += 1

    def _line(self, graph: fx.Graph, number: int) -> str | None:
        calls = [n for n in graph.nodes if n.op == "call_function"]
        found = [n for n in calls if steps.is_step(n)]
        if not found:
            return None
        kind = self.random.choice(["split", "reorder", "reorder", "overlap", "other"])
        node = self.random.choice(found)
        if kind == "split":
            sums = [n for n in found if n.target is steps.all_reduce]
            if not sums:
                return None
            node = self.random.choice(sums)
            dim = self.random.randrange(max(node.meta["val"].dim(), 1))
            return f"split({node.name}, dim={dim})"
        if kind == "reorder":
            over = [n for n in found if n.target is steps.all_gather]
            over += [n for n in found if n.target is steps.all_reduce]
            node = self.random.choice(over) if over else node
            names = ", ".join(n.name for n in self._readers(node))
            return f"reorder([{names}], {node.name})" if names else None
        if kind == "overlap":
            pairs = list(self._pairs(found))
            if not pairs:
                return None
            one, other = self.random.choice(pairs)
            how = self.random.choice(["chunks=2", "chunks=2", "ring=1", "ring=2"])
            return f"overlap({one}, {other}, {how})"
        other = self.random.choice(found)
        return self.random.choice(
            [
                f"hoist({node.name})",
                f"sink({node.name})",
                f"merge({node.name}, {other.name})",
                f"drop({node.name})",
                f"bucket([{node.name}, {other.name}])",
                f"cut({self.random.choice(calls).name}, axes={steps.axes_of(node)[0]})",
                f"fuse([{node.name}, {self.random.choice(calls).name}])",
            ]
        )

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Some of what is made of a node."""
        known = {node}
        at = node.next
        while at.op != "output":
            if known.intersection(at.all_input_nodes) and self.random.random() < 0.8:
                known.add(at)
                yield at
            at = at.next

    def _pairs(self, found: list[fx.Node]) -> Iterator[tuple[str, str]]:
        for node in found:
            before = node.all_input_nodes[0]
            yield before.name, node.name
            yield from ((node.name, user.name) for user in node.users)


def check(seed: int) -> tuple[int, Counter[str]]:
    """How many lines were done, and refused by verb."""
    case = Case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        plan = case.plan()
    scheduler = Scheduler(plan, seed)
    scheduler.grow(12)
    after = apply("\n".join(scheduler.lines), plan.result.local, plan.mesh)
    changed = replace(plan, result=replace(plan.result, local=after))
    try:
        torch.manual_seed(0)
        got = changed.outcome(*case.tensors())
        torch.manual_seed(0)
        want = plan.outcome(*case.tensors())
        close(got.result, want.result)
        close(got.gradients, want.gradients)
        close(got.mutations, want.mutations)
    except Exception as error:
        error.add_note("\n".join([str(case), *scheduler.lines]))
        raise
    return len(scheduler.lines), scheduler.refused


@pytest.mark.parametrize("start", range(0, QUICK, 10))
def test_random_schedules(start: int) -> None:
    done = sum(check(seed)[0] for seed in range(start, start + 10))
    assert done


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, ALL, 10))
def test_many_random_schedules(start: int) -> None:
    for seed in range(start, start + 10):
        check(seed)
