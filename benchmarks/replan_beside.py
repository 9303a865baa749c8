"""Why a plan for other sizes is made while the call waits: planning beside the steps.

    python benchmarks/replan_beside.py [--json FILE]

A Llama of two layers trains, compiled by Inductor, on one thread; then a plan is made
for it (``fxpar.plan``, by search, four layers), alone, and in a thread of the process
beside the steps. Both need the interpreter: of a step, all that is not inside a large
kernel; of planning, nearly all. ``alone``: seconds of a step, and of the plan;
``beside``: of each while the other runs; ``lost``: seconds by which the steps that ran
beside the plan were longer, over the seconds that the plan takes alone: at 1 a plan
beside the steps costs the job what it costs when all wait for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable

import torch
from _common import conditions, llama, write

import fxpar

STEPS, PAIRS = 40, 5
os.environ.setdefault("FXPAR_HARDWARE", "cpu")


def trained() -> Callable[[], None]:
    """A training step."""
    model = llama(2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(model)
    ids = torch.randint(0, 256, (8, 128))

    def run() -> None:
        step(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def planned() -> None:
    ids = torch.zeros(8, 128, dtype=torch.long)
    fxpar.plan(llama(4), input_ids=ids, labels=ids, mesh="dp=2,tp=4", grad=True)


def seconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def pair(step: Callable[[], None]) -> dict[str, float]:
    """Steps and a plan alone, then beside each other."""
    alone = statistics.median(seconds(step) for _ in range(STEPS))
    plan_alone = seconds(planned)
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(seconds(planned)))
    thread.start()
    beside = []
    while thread.is_alive():
        beside.append(seconds(step))
    thread.join()
    lost = sum(beside) - alone * len(beside)
    return {
        "step_alone": alone,
        "step_beside": statistics.median(beside),
        "plan_alone": plan_alone,
        "plan_beside": took[0],
        "lost": lost / plan_alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before, step = conditions(), trained()
    planned()
    step()
    pairs = [pair(step) for _ in range(PAIRS)]
    for name in pairs[0]:
        values = sorted(each[name] for each in pairs)
        print(f"{name:12} {statistics.median(values):8.4f}  {values}")
    write(args.json, "replan_beside", {"conditions": before, "pairs": pairs})


if __name__ == "__main__":
    main()
