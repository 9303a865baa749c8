"""Buffers that a graph updates at its end: read whole, written behind all else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxpar.errors import ScheduleError
from tests.helpers.toys import Toy, all_reduce

WRITE = torch.ops.aten.copy_.default
GIVEN = ("[_, _] partial(sum: tp)", (4, 8)), ("[_, _]", (4, 8))


def after(f: Any, schedule: str) -> fx.Graph:
    return Toy(f, *GIVEN, mesh="tp=2").after(schedule)


def updating(x: Any, buffer: Any) -> Any:
    y = all_reduce(x)
    new = buffer * 0.9 + y * 0.1
    buffer.copy_(new)
    return torch.relu(y) + 1, new


SPLIT = "split(all_reduce, dim=1) -> rs, ag\nreorder([relu, add_1], ag)"


def test_a_write_stays_behind_all_else() -> None:
    graph = after(updating, SPLIT)
    (write,) = graph.find_nodes(op="call_function", target=WRITE)
    target, value = write.args
    assert target.name.startswith("buffer") and value.name == "add"
    assert max(target.users) is write and not write.users
    assert len(graph.output_node().args[0]) == 2


def test_what_is_written_is_read_whole() -> None:
    """It is a result as others are: a gather that only it reads is not dropped."""
    schedule = "split(all_reduce, dim=1) -> rs, ag\ndrop(ag)"
    with pytest.raises(ScheduleError, match="is read whole by"):
        after(updating, schedule)


def test_numbers() -> None:
    Toy(updating, *GIVEN, mesh="tp=2").check(SPLIT)


def read_later(x: Any, buffer: Any) -> Any:
    buffer.copy_(buffer + all_reduce(x))
    return buffer * 2


def read_by_a_view(x: Any, buffer: Any) -> Any:
    seen = buffer.view(8, 4)
    buffer.copy_(buffer + all_reduce(x))
    return seen * 2


@pytest.mark.parametrize("f", [read_later, read_by_a_view])
def test_what_is_read_behind_a_write_is_refused(f: Any) -> None:
    with pytest.raises(ScheduleError, match="writes to its operand"):
        after(f, "")


def handed_back(x: Any, buffer: Any) -> Any:
    y = all_reduce(x)
    new = buffer.copy_(buffer * 0.9 + y * 0.1)
    return torch.relu(y) + 1, new, new


def test_what_is_written_may_be_handed_back() -> None:
    """A static cache returns its length, which it counts in place."""
    graph = after(handed_back, SPLIT)
    (write,) = graph.find_nodes(op="call_function", target=WRITE)
    first, *written = graph.output_node().args[0]
    assert first is not write and written == [write, write]
    Toy(handed_back, *GIVEN, mesh="tp=2").check(SPLIT)
