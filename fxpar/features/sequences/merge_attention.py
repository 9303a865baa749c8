"""Merges what queries see of several sets of keys.

In: for each set of keys an output and the log-sum-exp of each query's scores,
[batch, heads, queries], by which outputs are weighted. Out: nodes of the result over
all keys. Never: sends more than log-sum-exps. Kernels give 0 for a query to which a
mask hides all keys, as it may hide all of a part: ``of_visible`` makes that ``-inf``,
no weight.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.sharding.factors import Axes

aten = torch.ops.aten

# In memory a row of a bias is padded to a multiple of so many elements.
_GRAIN = 16


def gathered(build: Builder, lse: fx.Node, axes: Axes) -> fx.Node:
    """Gather a value of each query from all ranks along axes, in mesh order:
    [ranks, batch, heads, queries]."""
    row, axes = build.call(aten.unsqueeze.default, lse, 0), build.mesh.ordered(axes)
    return collective_nodes.step(build, collective_nodes.all_gather, row, 0, axes)


def of_visible(build: Builder, lse: fx.Node, mask: fx.Node) -> fx.Node:
    """Return a log-sum-exp that is ``-inf`` where a mask (boolean or additive, it
    broadcasts to the scores) hides all keys."""
    if mask.meta["val"].dtype is not torch.bool:
        mask = build.call(aten.ne.Scalar, mask, -math.inf)
    return build.where(build.call(aten.any.dim, mask, -1), lse, -math.inf)


def of_seen_rows(build: Builder, out: fx.Node, lse: fx.Node) -> fx.Node:
    """Return an output that is 0 for queries that see no key, for which a kernel may
    give NaN."""
    sees_keys = build.call(aten.ne.Scalar, lse, -math.inf)
    return build.where(build.call(aten.unsqueeze.default, sees_keys, -1), out, 0.0)


def of_ranks(
    build: Builder, out: fx.Node, lse: fx.Node, axes: Axes
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return the attention over the keys of all ranks along axes: this rank's summand
    of the output, the log-sum-exp, and the largest of those of the ranks. ``out``,
    ``lse``: over a rank's own keys."""
    lse_of_ranks = gathered(build, lse, axes)
    shift = build.call(aten.amax.default, lse_of_ranks, [0])
    finite = finite_or_zero(build, shift)
    weights = _weight(build, lse_of_ranks, finite)
    weights = build.call(aten.sum.dim_IntList, weights, [0])
    own = _scaled(build, out, _weight(build, lse, finite))
    merged, total = RunningAttention(own, shift, weights).result(build)
    return build.cast(merged, out.meta["val"].dtype), total, shift


def items(build: Builder, node: fx.Node) -> list[fx.Node]:
    """Return the results of a call that gives several."""
    count = len(node.meta["val"])
    return [build.call(operator.getitem, node, i) for i in range(count)]


@dataclass(frozen=True)
class RunningAttention:
    """Holds attention over the parts of the keys so far. Weights are summed: where a
    bias makes scores the least number there is, a log-sum-exp keeps no count."""

    # Outputs times their weights.
    out: fx.Node
    # The largest log-sum-exp, which is subtracted from each; ``-inf``: no key is seen.
    shift: fx.Node
    # Sum of weights; None: one part.
    weights: fx.Node | None = None

    def add(self, build: Builder, out: fx.Node, lse: fx.Node) -> RunningAttention:
        """Return the attention with one more part of as many keys."""
        shift = build.call(aten.maximum.default, self.shift, lse)
        finite = finite_or_zero(build, shift)
        before, weight = (_weight(build, x, finite) for x in (self.shift, lse))
        weights = before
        if self.weights is not None:
            weights = build.call(aten.mul.Tensor, self.weights, before)
        weights = build.call(aten.add.Tensor, weights, weight)
        sums = _scaled(build, self.out, before), _scaled(build, out, weight)
        out = build.call(aten.add.Tensor, *sums)
        return RunningAttention(out, shift, weights)

    def result(self, build: Builder) -> tuple[fx.Node, fx.Node]:
        """Return output and log-sum-exp; both 0 for a query that sees no key, as
        kernels give."""
        assert self.weights is not None, "of several parts"
        sees_keys = build.call(aten.ne.Scalar, self.weights, 0)
        weights = build.where(sees_keys, self.weights, 1)
        shift = finite_or_zero(build, self.shift)
        total = build.call(
            aten.add.Tensor, shift, build.call(aten.log.default, weights)
        )
        scale = build.call(aten.reciprocal.default, weights)
        return _scaled(build, self.out, scale), total


def of_places(
    build: Builder, mask: fx.Node, queries: fx.Node, keys: fx.Node
) -> fx.Node:
    """Return a mask (boolean or additive) that hides later keys too. ``queries``,
    ``keys``: the place of each row in the whole sequence."""
    rows = build.call(aten.unsqueeze.default, queries, -1)
    visible = build.call(aten.ge.Tensor, rows, keys)
    hidden = False if mask.meta["val"].dtype is torch.bool else -math.inf
    return build.where(visible, mask, hidden)


def aligned(build: Builder, mask: fx.Node) -> fx.Node:
    """Return a mask in the layout that the memory-efficient kernel reads."""
    shape = list(mask.meta["val"].shape)
    padding = -shape[-1] % _GRAIN
    if not padding:
        return mask
    padded = build.pad_dim(mask, len(shape) - 1, 0, padding)
    return build.call(aten.slice.Tensor, padded, len(shape) - 1, 0, shape[-1])


def finite_or_zero(build: Builder, lse: fx.Node) -> fx.Node:
    """Return 0 for ``-inf``, which stands for no scores and cannot be subtracted from
    itself."""
    return build.where(build.call(aten.ne.Scalar, lse, -math.inf), lse, 0)


def _weight(build: Builder, lse: fx.Node, shift: fx.Node) -> fx.Node:
    return build.call(aten.exp.default, build.call(aten.sub.Tensor, lse, shift))


def _scaled(build: Builder, out: fx.Node, weight: fx.Node) -> fx.Node:
    weight = build.call(aten.unsqueeze.default, weight, -1)
    return build.call(aten.mul.Tensor, out, weight)
