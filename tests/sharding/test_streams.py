"""Streams: collectives that wait for others, and that change their axes."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest

from fxpar.passes.simulate.simulate_step import Task

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from delta_simulation import DeltaSimulation

AXES = ("a", "b", "c")


def by_hand(tasks: list[Task]) -> tuple[float, list[float]]:
    """(when all is done, end of each task)."""
    now, free = 0.0, dict.fromkeys(AXES, 0.0)
    ends: list[float] = []
    for task in tasks:
        waited = 0.0 if task.of is None else ends[task.of]
        if task.axes and not task.seconds:
            ends.append(max(now, waited))
            continue
        now = max(now, waited)
        if not task.axes:
            now += 0.0 if task.of is not None else task.seconds
            ends.append(now)
            continue
        end = max([now, *(free[axis] for axis in task.axes)]) + task.seconds
        free.update(dict.fromkeys(task.axes, end))
        ends.append(end)
    return max([now, *free.values()]), ends


def random_tasks(chance: random.Random, count: int) -> list[Task]:
    tasks: list[Task] = []
    sent: list[int] = []
    for i in range(count):
        of = chance.choice(sent) if sent and chance.random() < 0.5 else None
        kind = chance.random()
        if kind < 0.4:
            axes = tuple(chance.sample(AXES, chance.randint(1, 2)))
            seconds = chance.choice([0.0, 1.0, chance.random() * 5])
            tasks.append(Task("send", seconds, axes, of))
            sent.append(i)
        elif of is not None:
            tasks.append(Task("wait", of=of))
        else:
            tasks.append(Task("run", chance.random()))
    return tasks


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
def test_any_change_gives_what_a_simulation_by_hand_gives(compiled: bool) -> None:
    chance = random.Random(2)
    for _ in range(60):
        tasks = random_tasks(chance, chance.randint(1, 50))
        simulation = DeltaSimulation(tasks, axes=AXES, compiled=compiled)
        assert (simulation.seconds, list(simulation.ends)) == by_hand(tasks)
        free = [i for i, task in enumerate(tasks) if task.axes or task.of is None]
        for _ in range(10):
            durations, along = {}, {}
            for i in chance.sample(free, min(len(free), chance.randint(1, 3))):
                durations[i] = chance.choice([0.0, 1.0, chance.random() * 5])
                axes = tasks[i].axes
                if axes and chance.random() < 0.5:
                    axes = tuple(chance.sample(AXES, chance.randint(1, 3)))
                    along[i] = simulation.bits(axes)
                tasks[i] = dataclasses.replace(
                    tasks[i], seconds=durations[i], axes=axes
                )
            seconds = simulation.change(durations, along)
            assert (seconds, list(simulation.ends)) == by_hand(tasks)


def test_what_a_collective_waits_for_holds_compute_back() -> None:
    scatter = [Task("scatter", 2.0, ("a",)), Task("reduce", 3.0, ("b",), of=1)]
    tasks = [Task("run", 1.0), *scatter, Task("run", 4.0), Task("wait", of=2)]
    simulation = DeltaSimulation(tasks, axes=AXES, compiled=False)
    assert list(simulation.ends) == [1.0, 3.0, 6.0, 7.0, 7.0]
    # Without the second step nothing waits for the first but the wait, for its result.
    assert simulation.change({2: 0.0}) == 5.0
    assert simulation.change({3: 1.0}) == 3.0


def test_a_change_that_only_a_wait_sees_later() -> None:
    # The third runs behind the second alone once the first is shorter.
    sends = [Task("first", 10.0, ("a",)), Task("second", 10.0, ("b",))]
    tasks = [*sends, Task("third", 1.0, ("a", "b")), Task("run", 1.0)]
    tasks += [Task("wait", of=0), Task("run", 5.0)]
    simulation = DeltaSimulation(tasks, axes=AXES, compiled=False)
    assert simulation.seconds == 15.0
    assert simulation.change({0: 8.0}) == 13.0


def test_waits_have_no_duration_to_change() -> None:
    tasks = [Task("s", 1.0, ("a",)), Task("w", of=0)]
    simulation = DeltaSimulation(tasks, compiled=False)
    with pytest.raises(ValueError, match="task 1"):
        simulation.change({1: 2.0})
    with pytest.raises(IndexError):
        simulation.change({2: 2.0})


def test_only_what_follows_a_change_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = [Task("send", 100.0, ("a",)), *(Task("run", 1.0) for _ in range(10))]
    tasks += [Task("wait", of=0), *(Task("run", 1.0) for _ in range(10))]
    simulation = DeltaSimulation(tasks, compiled=False)
    stops: list[int] = []
    run = simulation._advance
    monkeypatch.setattr(
        simulation, "_advance", lambda *args: stops.append(run(*args)) or stops[-1]
    )
    assert simulation.change({3: 2.0}) == 110.0
    assert stops == [11]  # the wait takes up what the kernel lost
    assert simulation.change({0: 101.0}) == 111.0
    assert stops[1] == len(tasks) - 1
    assert simulation.change({}) == 111.0
