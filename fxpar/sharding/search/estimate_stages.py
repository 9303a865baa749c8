"""Guesses the seconds of a step in stages on a mesh, to choose the order of searches.

In: a Program whose batch is cut, the Hardware, meshes. Out: seconds: the arithmetic,
shared by all ranks; the wait of the pipeline; and the least exchange of ranks that
split the weights of a stage. Ranks of a stage split weights as far as memory asks (a
weight and the sum of its gradients are held where they are used), and the batch as far
as a microbatch has rows. Never: proves anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware import Hardware
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.conventions import parameter_roots
from fxpar.sharding.search.batch_parts import BatchCut, PartProgram
from fxpar.sharding.search.memory_constraints import Entry
from fxpar.sharding.search.price_stages import least_staged

# The share of memory that weights and sums of their gradients may take: activations
# need some.
_ROOM = 0.8


@dataclass(frozen=True)
class StagesEstimate:
    """Holds the numbers of a program that an estimate needs."""

    # Seconds on one device.
    arithmetic: float
    # Bytes of weights and sums of gradients, which are held where they are used.
    used: float
    # Bytes of optimizer state and gradients, shared by all ranks of a stage.
    resting: float
    # Bytes that ranks that split all weights exchange in a step: for each weight the
    # smaller of its op's operands and results.
    exchanged: float
    # Rows of the batch.
    rows: int

    def seconds(
        self, mesh: Mesh, parts: int, hardware: Hardware, budget: float
    ) -> float:
        """Return the seconds of a step in ``parts`` microbatches. ``mesh``: the first
        axis is of stages; ``budget``: bytes of a rank."""
        (_, places), *axes = mesh.axes
        links = hardware.links(mesh)[1:]
        size, inner = mesh.size, mesh.size // places
        room = _ROOM * budget - self.resting / size
        exchange, least = math.inf, self.used / places / max(room, 1.0)
        for count in range(len(axes) + 1):
            for chosen_axes in itertools.combinations(range(len(axes)), count):
                sizes = [axes[i][1] for i in chosen_axes]
                ways = math.prod(sizes)
                groups = inner // ways
                if ways < inner and (ways < least or self.rows // parts % groups):
                    continue
                nbytes = self.exchanged / places / groups
                on = [links[i] for i in chosen_axes]
                seconds = collectives.seconds("all_reduce", sizes, on, nbytes)
                exchange = min(exchange, seconds if sizes else 0.0)
        return least_staged(
            self.arithmetic / inner / parts + exchange * places / parts, places, parts
        )


def estimate_stages(
    program: Program, cut: BatchCut, live: Sequence[Entry], arithmetic: float
) -> StagesEstimate:
    """Return the estimate of a program. ``live``: entries of the whole batch;
    ``arithmetic``: seconds on one device."""
    entries = PartProgram(program, cut, 1).held(live)
    nbytes = {
        kind: float(sum(entry.nbytes for entry in entries if entry.kind == kind))
        for kind in ("parameter", "optimizer", "gradient", "accumulated")
    }
    return StagesEstimate(
        arithmetic,
        nbytes["parameter"] + nbytes["accumulated"],
        nbytes["optimizer"] + nbytes["gradient"],
        _exchanged(program),
        cut.rows,
    )


def _exchanged(program: Program) -> float:
    roots, backward = parameter_roots(program), program.backward
    total = 0.0
    for op in program.ops:
        if op.index in backward or not op.rule.contracted:
            continue
        others = [v for v in op.operands if v not in roots]
        if len(others) < len(op.operands) and others:
            sizes = [program.values[v].nbytes for v in (*others, *op.results)]
            total += min(sizes)
    return total if backward else total / 2
