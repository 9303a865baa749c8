"""Gives rules to counts, segments and distances between points.

Counts of shards add up where the bins do not depend on the data; a distance between
points adds up over their coordinates where it needs no root.
In: calls of these ops. Out: their rules.
Never: splits data on which bins depend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import aligned, at, make, rows, tensors_of, words_of

Maybe = torch.Tensor | None


# Histograms


def _counted(
    points: Sequence[str], edges: int, weight: Maybe, counts: int, ends: int, adds: bool
) -> Rule:
    """Return the rule of counts. ``points``: words of the data, whole unless ``adds``,
    which says that counts of shards add up. ``edges``: number of further tensors that
    say where bins end. Results: counts over ``counts`` bins, and ``ends`` tensors of
    ends, equal on every rank."""
    words = [w if adds or w == "_" else f"{w}!" for w in points]
    weights = [words[: weight.ndim]] if weight is not None else []
    unreduced = [f"~{w.rstrip('!')}" for w in words if w != "_"]
    results = [["_"] * counts] * bool(counts) + [["_", *unreduced]] * ends
    return make([words, *[["_"]] * edges, *weights], results)


def histc(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Rule:
    """Return the rule; bins depend on the least and largest element unless both ends
    are given."""
    return _counted(words_of(x), 0, None, 1, 0, low != high)


def histogram(
    x: torch.Tensor,
    bins: Any = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Maybe = None,
    density: bool = False,
    of_points: bool = False,
    counts: bool = True,
) -> Rule:
    """Return the rule of counts, or their density, which no rank knows alone, and of
    the edges of bins. ``of_points``: the last dim of ``x`` has coordinates, with bins
    for each; results are counts alone, or edges alone without ``counts``."""
    edges = len(tensors_of(bins))
    adds = (bool(edges) or range is not None) and not density
    if not of_points:
        return _counted(words_of(x), edges, weight, 1, 1, adds)
    points, many = [*words_of(x.shape[:-1]), "_"], len(bins)
    if counts:
        return _counted(points, edges, weight, many, 0, adds)
    return _counted(points, 0, weight, 0, many, range is not None)


# Segments of one dim


def segments(is_backward: bool, *args: Any, axis: int = 0, **named: Any) -> Rule:
    """Return the rule of a reduction of segments, or of its backward, which reads the
    gradient and the result as well; lengths, indices and offsets are by name."""
    x = args[2 * is_backward]
    axis = at(axis, x.ndim)
    full = words_of(x, {axis})
    cut = [*full[:axis], "_", *full[axis + 1 :]]
    ends = ("lengths", "indices", "offsets")
    counts = [[*full[:axis], "_"] for end in ends if named.get(end) is not None]
    if is_backward:
        return make([cut, cut, full, *counts], [full])
    return make([full, *counts], [cut])


# Distances

# Orders of norms that coordinates add up to without a root -> the reduction.
_REDUCTION = {math.inf: "max", 1: "sum", 0: "sum"}


def _coordinate(p: float) -> tuple[str, dict[str, str]]:
    """Return (word of the dim of coordinates, its reduction)."""
    reduction = _REDUCTION.get(p)
    return ("k", {"k": reduction}) if reduction else ("k!", {})


def cdist(x: torch.Tensor, y: torch.Tensor, p: float, mode: int | None) -> Rule:
    k, reductions = _coordinate(p)
    batch, (left, right) = aligned([x.shape[:-2], y.shape[:-2]])
    operands = [[*left, "m", k], [*right, "n", k]]
    return make(operands, [[*batch, "m", "n"]], reductions=reductions)


def cdist_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    p: float,
    distance: torch.Tensor,
) -> Rule:
    """Return the rule: once distances are known, coordinates are free."""
    tensors = (grad, x, y, distance)
    batch, own = aligned([t.shape[:-2] for t in tensors])
    cores = (["m", "n"], ["m", "k"], ["n", "k"], ["m", "n"])
    operands = [b + core for b, core in zip(own, cores, strict=True)]
    return make(operands, [[*batch, "m", "k"]])


def pdist(x: torch.Tensor, p: float = 2.0) -> Rule:
    k, reductions = _coordinate(p)
    return make([["_", k]], [["_"]], reductions=reductions)


ROWS = {
    **rows("histc", histc),
    **rows("histogram.bins_tensor histogram.bin_ct", histogram),
    **rows(
        "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors",
        partial(histogram, of_points=True),
    ),
    **rows("_histogramdd_bin_edges", partial(histogram, of_points=True, counts=False)),
    **rows("segment_reduce", partial(segments, False)),
    **rows("_segment_reduce_backward", partial(segments, True), linear="0"),
    **rows("_cdist_forward", cdist),
    **rows("_cdist_backward", cdist_backward, linear="0"),
    **rows("_pdist_forward", pdist),
    **rows("_pdist_backward", "_, _ k, _ -> _ k", linear="0"),
}
