"""Reads schedules of pipelines from torch's classes: the actions of each rank.

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

# Below, private methods of ``torch.distributed.pipelining.schedules`` give the actions
# of one rank, or of all, and read only the attributes set here.


def one_f_one_b(places: int, parts: int, rounds: int) -> list[list[Action]]:
    """Return the actions of 1F1B: a forward, then a backward, once the pipeline is
    full, one stage a rank. (``Schedule1F1B`` (2.13) has a table for pictures, which
    lacks a forward on the last rank.)"""
    from torch.distributed.pipelining import schedules

    tables: Any = schedules
    rows = []
    for rank in range(places):
        first = min(parts, places - 1 - rank)
        ops = tables._get_1f1b_rank_ops(
            1,
            places,
            first,
            parts - first,
            first,
            rank,
            lambda step, rank=rank: rank,
            lambda step, rank=rank: rank,
        )
        rows.append(_actions(ops))
    return rows


def gpipe(places: int, parts: int, rounds: int) -> list[list[Action]]:
    """Return the actions of all forwards, then all backwards (``ScheduleGPipe``)."""
    schedule = SimpleNamespace(_num_stages=places, _n_microbatches=parts)
    table = _class("ScheduleGPipe")._get_pipeline_order(schedule)
    return [_actions(table[rank]) for rank in range(places)]


def rank_tables(name: str) -> Callable[[int, int, int], list[list[Action]]]:
    """Return a function of places, parts and rounds: the actions of torch's
    ``Schedule{name}``."""
    return partial(_rank_tables, f"Schedule{name}")


def _rank_tables(name: str, places: int, parts: int, rounds: int) -> list[list[Action]]:
    turns = max(1, parts // places)
    schedule = SimpleNamespace(
        pp_group_size=places,
        num_stages=places * rounds,
        n_local_stages=rounds,
        _stages=range(rounds),
        _n_microbatches=parts,
        number_of_rounds=turns,
        microbatches_per_round=parts // turns,
    )
    operations: Callable[..., Any] = _class(name)._calculate_single_rank_operations
    return [_actions(operations(schedule, rank)) for rank in range(places)]


def _class(name: str) -> Any:
    from torch.distributed.pipelining import schedules

    return getattr(schedules, name)


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
