"""Fit curves to measured times, for ``calibrate``.

In: points, each a size and the seconds it took. Out: the parameters of ``Peak`` or
``Measured`` whose prediction is nearest in ratio, so that small and large sizes count
equally. Never: a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware_table import Measured, Peak, ProductDims
from fxpar.sharding.mesh import Link

# For a collective: ranks, bytes on each before, seconds.
Point = tuple[float, float, float]
# For a contraction: flops, dims, seconds.
ContractionPoint = tuple[float, ProductDims, float]

_TIE = 0.01  # weight of a fit's starting point, compared with 1 for each point


def fit_peak(points: Sequence[ContractionPoint]) -> Peak:
    """Return the curve nearest to the seconds of some contractions."""
    rows = [(flops, dims.m, dims.n, dims.k, seconds) for flops, dims, seconds in points]
    flops, m, n, k, seconds = np.array(rows).T
    dims = ProductDims(m, n, k)

    def peak_of(p: Sequence[float] | np.ndarray) -> Peak:
        peak, half_flops, half_dim, half_contracted = p
        return Peak(peak, 1.0, half_flops, half_dim, half_contracted)

    def model(p: np.ndarray) -> np.ndarray:
        return flops / peak_of(p).rate(flops, dims)

    least_outer, least_contracted = float(min(m.min(), n.min())), float(k.min())
    start = [float((flops / seconds).max()), float(flops.min())]
    return peak_of(fit(model, [*start, least_outer, least_contracted], seconds))


def fit_collective(kind: str, points: Sequence[Point]) -> Measured:
    """Return overhead, latency and bandwidth nearest to (ranks, bytes, seconds) of some
    collectives. Groups of one size do not separate overhead from latency: it is 0
    then."""
    count, nbytes, seconds = np.array(points).T
    steps, sent_share = (
        np.array([collectives.seconds(kind, (int(n),), (link,), size) for n in count])
        for link, size in ((Link(math.inf, 1.0), 0.0), (Link(1.0, 0.0), 1.0))
    )
    several = len(set(count)) > 1

    def model(p: np.ndarray) -> np.ndarray:
        once = p[2] if several else 0.0
        return once + steps * p[0] + sent_share * nbytes / p[1]

    start = [
        float(seconds.min() / steps.max()),
        float((sent_share * nbytes / seconds).max()),
        float(seconds.min()),
    ]
    fitted = fit(model, start[: 3 if several else 2], seconds)
    return Measured(fitted[2] if several else 0.0, fitted[0], fitted[1])


def fit(
    model: Callable[[np.ndarray], np.ndarray], start: Sequence[float], seconds: Any
) -> list[float]:
    """Return positive parameters whose ``model`` is nearest to ``seconds`` in ratio:
    least squares of logarithms, by Levenberg and Marquardt's method. Parameters that
    the points do not determine stay close to ``start``."""
    begin, target = np.log(start), np.log(seconds)

    def off(at: np.ndarray) -> np.ndarray:
        return np.append(np.log(model(np.exp(at))) - target, _TIE * (at - begin))

    at, now, damping, nudge = begin, off(begin), 1e-2, 1e-4
    for _ in range(200):
        nudged = [off(at + nudge * unit) - now for unit in np.eye(len(at))]
        jacobian = np.stack(nudged, 1) / nudge
        square = jacobian.T @ jacobian + damping * np.eye(len(at))
        step = np.clip(np.linalg.solve(square, -jacobian.T @ now), -2, 2)
        further = off(at + step)
        if further @ further < now @ now:
            at, now, damping = at + step, further, damping / 3
        else:
            damping *= 4
        if np.abs(step).max() < 1e-6:
            break
    return [float(value) for value in np.exp(at)]
