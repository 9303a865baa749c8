"""Random schedules of random programs, as planned, change no number; nor does what is
chosen. Programs written by hand, and all verbs, are in test_fuzz_by_hand."""

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
from fxpar.fusion import choose_schedule
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.graph import collective_nodes
from tests.helpers.check_random import close, run
from tests.helpers.machines import machine
from tests.helpers.random_programs import Case
from tests.helpers.toys import form_of

QUICK, ALL = 5, 1000
# Seeds whose schedules have every verb, and some more.
FIRST = (2, 17, 33, 50, 0, 1, 3, 4)

HOW = ("chunks=2", "chunks=2", "ring=1", "ring=2", "fused=1")

# What is done at least once in the quick run. Plans have no step twice, nor one that
# nobody reads: ``merge`` and ``drop`` are for programs by hand.
VERBS = {
    "split",
    "reorder",
    "chunks",
    "ring",
    "hoist",
    "sink",
    "bucket",
    "cut",
    "fuse",
}


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine().save(tmp_path / "slow.json")
    monkeypatch.setenv("FXPAR_HARDWARE", str(tmp_path / "slow.json"))
    monkeypatch.setenv("FXPAR_SCHEDULE", "auto")

    def failed(error: Exception) -> None:
        raise error

    monkeypatch.setattr(choose_schedule, "failed", failed)


def test_a_failure_to_choose_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: Any, **__: Any) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(choose_schedule, "choose", choose)
    x = torch.randn(4, 4)
    with pytest.warns(FxparWarning, match="no schedule is chosen: KeyError"):
        plan = fxpar.plan(torch.relu, x, mesh="dp=2", schedule="auto")
    torch.testing.assert_close(plan.simulate(x), torch.relu(x))


def test_what_is_chosen(slow: None) -> None:
    for seed in range(QUICK):
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
        self.done: Counter[str] = Counter()

    def grow(self, tries: int) -> fx.Graph:
        """The graph after its lines, each of which is applied to the one before."""
        mesh = self.plan.mesh
        graph = apply("", self.plan.result.local, mesh, lowered=False)
        for _ in range(tries):
            line = self._line(graph)
            if line is None:
                continue
            try:
                graph = apply(line, graph, mesh, lowered=False)
            except Unexpected:
                raise
            except ScheduleError:
                continue
            self.lines.append(line)
            self.done[form_of(line)] += 1
        return apply("", graph, mesh, lowered=True)

    def _line(self, graph: fx.Graph) -> str | None:
        calls = [n for n in graph.nodes if n.op == "call_function"]
        found = [n for n in calls if collective_nodes.is_step(n)]
        if not found:
            return None
        kind = self.random.choice(["split", "reorder", "reorder", "overlap", "other"])
        node = self.random.choice(found)
        if kind == "split":
            sums = [n for n in found if n.target is collective_nodes.all_reduce]
            if not sums:
                return None
            node = self.random.choice(sums)
            inner, *outer = collective_nodes.axes_of(node)
            if outer and self.random.random() < 0.5:
                how = f"inner={inner}, outer={'_and_'.join(outer)}"
                return f"hierarchical({node.name}, {how})"
            dim = self.random.randrange(max(node.meta["val"].dim(), 1))
            return f"split({node.name}, dim={dim})"
        if kind == "reorder":
            over = [n for n in found if n.target is collective_nodes.all_gather]
            over += [n for n in found if n.target is collective_nodes.all_reduce]
            node = self.random.choice(over) if over else node
            names = ", ".join(n.name for n in self._readers(node))
            return f"reorder([{names}], {node.name})" if names else None
        if kind == "overlap":
            pairs = list(self._pairs(found))
            if not pairs:
                return None
            one, other = self.random.choice(pairs)
            how = self.random.choice(HOW)
            return f"overlap({one}, {other}, {how})"
        other = self.random.choice(found)
        return self.random.choice(
            [
                f"hoist({node.name})",
                f"sink({node.name})",
                f"merge({node.name}, {other.name})",
                f"drop({node.name})",
                f"bucket([{node.name}, {other.name}])",
                f"cut({self.random.choice(calls).name}, "
                f"axes={collective_nodes.axes_of(node)[0]})",
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


def check(seed: int) -> Counter[str]:
    """How many lines were done, by verb."""
    case = Case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        plan = case.plan()
    scheduler = Scheduler(plan, seed)
    after = scheduler.grow(12)
    changed = replace(plan, result=replace(plan.result, graph=after))
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
    return scheduler.done


def test_random_schedules() -> None:
    done: Counter[str] = Counter()
    for i, seed in enumerate([*FIRST, *range(ALL)]):
        # Another torch traces other graphs, of which some verbs need more.
        if i >= len(FIRST) and set(done) >= VERBS:
            break
        done += check(seed)
    assert set(done) >= VERBS, VERBS - set(done)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, ALL, 10))
def test_many_random_schedules(start: int) -> None:
    for seed in range(start, start + 10):
        check(seed)
