"""Which values of a region lie in slices between its collectives: an exact minimum cut.

In: the ``Rows`` of a local graph, and seconds for ops and collectives. Out: the ops to
run on slices and the all-reduces to split, so that the sum of seconds is least. Each
value is either sliced or whole; an op on slices takes its share of the time, a
collective along other axes that of a slice; an all-reduce whose result is sliced is a
reduce-scatter; a sliced value that anything reads whole is gathered once; slices of a
whole value are to be had for nothing; a sum over rows on slices is all-reduced. That is
a minimum cut between "sliced" and "whole":

    source -> op          op runs whole (its seconds)
    op -> sink            op runs on slices (its share, and what it must reduce)
    source -> v, v -> sink   v is all-reduced, or reduce-scattered
    v -> gathered(v)      v is sliced and somebody reads it whole (an all-gather)
    gathered(v) -> op     never: op reads v whole

It finds the reduce-scatters and all-gathers of Megatron's sequence parallelism
(Korthikanti et al., 2022), where they pay.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.fusion.sliced_dims import Rows

# Seconds become whole ticks, so that cuts are exact; none is more than a few hundred
# million of them.
_TICKS = 2**30
_NEVER = 2**30


@dataclass(frozen=True)
class Cut:
    """``sliced``: ops that run on slices. ``split``: all-reduces that are split, and
    along which dim; ``kept``: those that are not, of which ops on slices read slices.
    ``saved``: seconds."""

    sliced: tuple[fx.Node, ...]
    split: dict[fx.Node, int]
    kept: dict[fx.Node, int]
    saved: float

    @property
    def starts(self) -> dict[fx.Node, int]:
        """The all-reduces that slices begin at."""
        return {**self.split, **self.kept}


@dataclass(frozen=True)
class Prices:
    """Seconds. ``work(op, share)``: of a share of an op, 1 or ``share``, which is that
    of a slice. ``collective(kind, value)``: of a value as it is whole."""

    work: Callable[[fx.Node, float], float]
    collective: Callable[[str, fx.Node], float]
    share: float


class _Network:
    """Arcs with capacities in seconds, between numbered nodes; 0 source, 1 sink."""

    def __init__(self) -> None:
        self.number: dict[Any, int] = {"sliced": 0, "whole": 1}
        self.arcs: list[tuple[int, int, float]] = []

    def arc(self, tail: Any, head: Any, seconds: float) -> None:
        tail, head = (self.number.setdefault(k, len(self.number)) for k in (tail, head))
        self.arcs.append((tail, head, seconds))

    def sliced(self) -> tuple[set[Any], float]:
        """(what is on the side of the source, seconds of the cut). Of cuts of equal
        cost the one with most in slices, which takes least memory."""
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        finite = [seconds for *_, seconds in self.arcs if seconds != math.inf]
        unit = max(sum(finite), 1e-12) / _TICKS * 2
        tails, heads, seconds = map(list, zip(*self.arcs, strict=True))
        ticks = [
            _NEVER if s == math.inf else min(round(s / unit), _NEVER) for s in seconds
        ]
        count = len(self.number)
        graph = csr_array(
            (np.array(ticks, np.int64), (np.array(tails), np.array(heads))),
            shape=(count, count),
        )
        graph.sum_duplicates()
        graph.data = np.minimum(graph.data, _NEVER).astype(np.int32)
        flow = maximum_flow(graph, 0, 1)
        left = (graph - flow.flow).tocsr()
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        # What cannot reach the sink any more stands with the source.
        reach = set(breadth_first_order(left.T.tocsr(), 1, return_predecessors=False))
        side = {key for key, i in self.number.items() if i not in reach}
        return side, flow.flow_value * unit


def cut(rows: Rows, prices: Prices, *, split: bool = False) -> Cut:
    """The best choice for one region. ``split``: of those that split every one."""
    network = _Network()
    before = 0.0
    for op in rows.ops:
        work = prices.work(op, 1.0)
        reduces = prices.collective("all_reduce", op) if op in rows.sums else 0.0
        network.arc("sliced", op, work)
        network.arc(op, "whole", prices.work(op, prices.share) + reduces)
        before += work
    for value in rows.reduced:
        whole = prices.collective("all_reduce", value)
        may = rows.dims[value] is None or not split
        network.arc("sliced", value, whole if may else math.inf)
        network.arc(value, "whole", prices.collective("reduce_scatter", value))
        before += whole
    for value, dim in rows.dims.items():
        _value(network, rows, value, dim, prices)
    side, after = network.sliced()
    sliced = tuple(op for op in rows.ops if op in side)
    read = {value for op in sliced for value in rows.ops[op]}
    dims = {value: rows.dims[value] for value in rows.reduced}
    known = {value: dim for value, dim in dims.items() if dim is not None}
    return Cut(
        sliced,
        {value: dim for value, dim in known.items() if value in side},
        {value: dim for value, dim in known.items() if value in read - side},
        before - after,
    )


def _value(
    network: _Network, rows: Rows, value: fx.Node, dim: int | None, prices: Prices
) -> None:
    """A value is sliced as its op is; what reads it whole reads it gathered."""
    maker = rows.makers.get(value)
    if dim is None or (maker is None and value not in rows.reduced):
        # Whole; an op on slices takes its part of it for nothing.
        network.arc(maker or value, "whole", math.inf)
        return
    if maker not in (None, value):
        network.arc(maker, value, math.inf)
        network.arc(value, maker, math.inf)
    network.arc(value, ("gathered", value), prices.collective("all_gather", value))
    for user in value.users:
        if user.target is operator.getitem and user in rows.dims:
            continue
        slices = value in rows.ops.get(user, ())
        network.arc(("gathered", value), user if slices else "whole", math.inf)


def at_most(rows: Rows, prices: Prices) -> tuple[float, float]:
    """(seconds of ops that slices can save at most, seconds that collectives then take
    longer at least): all ops on slices, and gathers where something reads whole."""
    work = sum(prices.work(op, 1.0) - prices.work(op, prices.share) for op in rows.ops)
    more = 0.0
    for value in rows.reduced:
        more += prices.collective("reduce_scatter", value)
        more -= prices.collective("all_reduce", value)
    for value, dim in rows.dims.items():
        made = value in rows.reduced or value in rows.makers
        whole = any(value not in rows.ops.get(user, ()) for user in value.users)
        if made and whole and dim is not None:
            more += prices.collective("all_gather", value)
    return work, more
