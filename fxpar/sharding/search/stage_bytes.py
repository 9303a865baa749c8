"""Counts the bytes that stages hold, and those sent along their axis once a step.

In: a SearchResult for one part of the batch, its ops in a row (``stage_chain``), the
places of stages. Out: the ``StageMemory`` that they are cut by, and the seconds in
which places exchange weights, gradients and results. Inputs that the plan lays out
("own") stay at the places that read them; those that are whole at rest ("whole") are
sent to all places; those split along the axis ("split") are gathered at the stage that
reads them, and split again. Never: chooses a cut.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from fxpar.sharding.cost import collectives
from fxpar.sharding.cut_stages import Held, StageMemory
from fxpar.sharding.mesh import Link
from fxpar.sharding.search.batch_parts import STATIC
from fxpar.sharding.search.run_search import SearchResult
from fxpar.sharding.search.stage_chain import StageChain

# Bytes of one message, in which several tensors are sent.
MESSAGE = 4 << 20


def stage_memory(
    result: SearchResult,
    chain: StageChain,
    places: Sequence[int],
    flying: Sequence[float],
    budget: float,
) -> StageMemory:
    """Return the memory that stages hold. ``places``: of each stage; ``flying``: of
    each place, the most microbatches in flight; ``budget``: bytes of a rank."""
    form, parts = result.formulation, result.formulation.parts
    assert parts is not None, "the batch is cut"
    throughout, saved, every = list[Held](), list[Held](), 0.0
    changes = np.zeros(len(chain.program.ops) + 3)
    for entry, live in zip(form.memory_entries, form.problem.memory, strict=True):
        share = parts.share(entry)
        nbytes = float(live.usage[result.solution.choice[live.node]]) / share
        if entry.kind == "saved":
            saved.append((nbytes, (chain.place_of(entry.value),)))
        elif entry.kind in STATIC:
            every += nbytes * parts.share_at_every(entry)
            own = nbytes * parts.share_at_stage(entry)
            readers = chain.readers(entry.value) or (chain.place_of(entry.value),)
            throughout += [(own, readers)] if own else []
        else:
            changes[live.begin] += nbytes
            changes[live.end] -= nbytes
    passing = np.zeros(chain.length)
    alive = changes.cumsum()
    for op in chain.program.ops:
        if op.index not in chain.update:
            place = chain.at[op.index]
            passing[place] = max(passing[place], alive[op.index])
    rounds = len(places) // (max(places) + 1)
    room = (budget - every) / rounds
    return StageMemory(
        (room,) * len(places),
        tuple(flying[place] for place in places),
        throughout,
        saved,
        passing.tolist(),
        every,
    )


def exchange_seconds(
    result: SearchResult,
    chain: StageChain,
    cuts: Sequence[int],
    places: Sequence[int],
    link: Link,
) -> list[float]:
    """Return, for each place, the seconds in which it sends and receives, once a step,
    inputs that are whole or split along the axis of stages, and results."""
    parts, program = result.formulation.parts, chain.program
    assert parts is not None, "the batch is cut"
    count = max(places) + 1
    sent, received, messages = ([0.0] * count for _ in range(3))

    def size(v: int) -> float:
        axes = result.settled[v].sharded_axes
        return parts.whole.values[v].nbytes / result.mesh.count(axes)

    def broadcast(nbytes: float, source: int) -> None:
        sent[source] += nbytes
        for place in range(count):
            received[place] += nbytes if place != source else 0.0
            messages[place] += nbytes / MESSAGE

    def deal(nbytes: float, source: int) -> None:
        sent[source] += nbytes * (count - 1) / count
        for place in range(count):
            received[place] += nbytes / count if place != source else 0.0
            messages[place] += nbytes / MESSAGE

    def put_together(nbytes: float, target: int) -> None:
        received[target] += nbytes * (count - 1) / count
        for place in range(count):
            sent[place] += nbytes / count if place != target else 0.0
            messages[place] += nbytes / count / MESSAGE

    for v, along in layouts_to_send(chain, parts.along_stages).items():
        source = places[bisect_right(cuts, chain.place_of(v))]
        (deal if along == "split" else broadcast)(size(v), source)
    for weight, along in parts.along_stages.items():
        if along == "split" and weight not in program.producers:
            for stage in {bisect_right(cuts, at) for at in chain.readers(weight)}:
                put_together(size(weight), places[stage])
    link = collectives.between_two(link)
    fixed = link.latency + link.overhead
    return [
        max(out, arrived) / link.bandwidth + math.ceil(number) * fixed
        for out, arrived, number in zip(sent, received, messages, strict=True)
    ]


def layouts_to_send(chain: StageChain, along_stages: dict[int, str]) -> dict[int, str]:
    """Return values that a stage sends to other places once a step, with "whole" or
    "split" for what each gets: results, gradients, and values that an update reads."""
    program, along_of = chain.program, dict[int, str]()
    for result, v in zip(program.signature.outputs, program.outputs, strict=True):
        if v is None or v not in program.producers:
            continue
        along = "own" if result.is_free else "whole"
        if result.kind == "gradient":
            along = along_stages.get(v, "own")
        if program.producers[v][0] not in chain.update and along != "own":
            along_of[v] = along
    split = "split" in along_stages.values()
    for index in chain.update:
        for v in program.ops[index].operands:
            maker = program.producers.get(v, (-1,))[0]
            if maker >= 0 and maker not in chain.update:
                along_of[v] = "split" if split else "whole"
    return along_of
