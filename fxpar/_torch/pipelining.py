"""Gives schedules of pipelines, most of them from torch: the actions of each rank.

In: the numbers of places, microbatches (``parts``) and stages a rank (``rounds``). Out:
a list of actions for each rank. Never: runs a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

# (stage, "F", "B", "I" or "W", microbatch)
Action = tuple[int, str, int]


def one_f_one_b(places: int, parts: int, rounds: int) -> list[list[Action]]:
    """Return the actions of 1F1B: a forward, then a backward, once the pipeline is
    full, one stage a rank."""
    rows = []
    for rank in range(places):
        first = min(parts, places - 1 - rank)
        forwards, backwards = ([(rank, kind, i) for i in range(parts)] for kind in "FB")
        pairs = zip(forwards[first:], backwards, strict=False)
        steady = [action for pair in pairs for action in pair]
        rows.append([*forwards[:first], *steady, *backwards[parts - first :]])
    return rows


def gpipe(places: int, parts: int, rounds: int) -> list[list[Action]]:
    """Return the actions of all forwards, then all backwards."""
    return [
        [(rank, kind, i) for kind in "FB" for i in range(parts)]
        for rank in range(places)
    ]


def rank_tables(name: str) -> Callable[[int, int, int], list[list[Action]]]:
    """Return a function of places, parts and rounds: the actions of torch's
    ``Schedule{name}``."""
    return partial(_rank_tables, f"Schedule{name}")


def _rank_tables(name: str, places: int, parts: int, rounds: int) -> list[list[Action]]:
    from torch.distributed.pipelining import schedules

    turns = max(1, parts // places)
    # Private methods of torch give the actions of one rank, and read only these.
    schedule = SimpleNamespace(
        pp_group_size=places,
        num_stages=places * rounds,
        n_local_stages=rounds,
        _stages=range(rounds),
        _n_microbatches=parts,
        number_of_rounds=turns,
        microbatches_per_round=parts // turns,
    )
    operations = getattr(schedules, name)._calculate_single_rank_operations
    return [_actions(operations(schedule, rank)) for rank in range(places)]


def _actions(row: Any) -> list[Action]:
    """Return the actions that compute; of two that overlap, one after the other."""
    out: list[Action] = []
    for action in row:
        if action is None:
            continue
        if action.sub_actions:
            out += _actions(action.sub_actions)
            continue
        kind = action.computation_type.value
        if kind in ("F", "B", "I", "W") and action.microbatch_index is not None:
            out.append((action.stage_index, kind, action.microbatch_index))
    return out
