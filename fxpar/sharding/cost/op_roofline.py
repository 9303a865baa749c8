"""What an op's own work costs: a roofline over one rank's share.

Only used to break ties between strategies; the figures are those of one current
accelerator and enter as ratios. Communication is priced in ``reshard``, but for what an
op itself sends (``shifts``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpar.sharding import shift_messages
from fxpar.sharding.factors import Strategy
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Op, Value, contracts

_FLOPS = 4e14  # per second, matrix units
_BANDWIDTH = 3e12  # bytes per second, device memory


def work(op: Op, strategy: Strategy, values: Sequence[Value], mesh: Mesh) -> float:
    """Seconds one rank computes: the larger of arithmetic and memory traffic; and what
    it sends meanwhile.

    An op is a contraction, one multiplication per point of its factor space, if two
    operands share a contracted factor; any other op is one pass over its tensors.
    """
    axes_of = strategy.axes_of
    shards = {f: mesh.count(axes) for f, axes in axes_of.items()}
    moved = 0.0
    for dims, v in zip(op.rule.tensors, op.tensors, strict=True):
        split = math.prod(shards.get(f, 1) for dim in dims for f in dim)
        moved += values[v].nbytes / split
    flops = 0.0
    if contracts(op):
        sizes = op.rule.size
        flops = 2.0 * math.prod(sizes[f] / shards.get(f, 1) for f in op.rule.factors)
    taken = max(flops / _FLOPS, moved / _BANDWIDTH)
    return taken + shift_messages.seconds(op, strategy, mesh)
