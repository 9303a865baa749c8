"""Splits rows of experts whose batch the ranks do not divide.

In: the engine of a propagation in which the batch has its axes. Out: the same engine,
with seeds on rows of experts that no axis of the batch reaches. Unequal shards of
samples are no shards of merged rows, so that each rank would compute all rows. Never:
changes a row that has an axis.
"""

from __future__ import annotations

from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.program_kernels import seconds, work_alone
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.propagate.conventions import EXPERT_MM
from fxpar.sharding.propagate.propagation import Propagation, Seed
from fxpar.sharding.reshard.route import price
from fxpar.sharding.shard_sizes import can_split
from fxpar.sharding.strategy import Strategy, operand_spec


def seed_rows(engine: Propagation, axes: Axes, mesh: Mesh, hardware: Hardware) -> None:
    """Split rows of experts over ``axes`` if this saves more seconds of their products
    than gathering the rows takes. ``mesh``: with links; ``hardware``: for the prices.
    """
    program, state = engine.program, engine.state
    products = [op for op in program.ops if str(op.target) == EXPERT_MM]
    for op in products if axes else ():
        v = op.operands[0]
        value, rows = program.values[v], op.rule.operands[0][0]
        if len(rows) != 1 or not state.origins[v].keys().isdisjoint(axes):
            continue
        if not can_split(value.shape[0], mesh, axes, even=program.even):
            continue
        split, work = Strategy(((rows[0], axes),)), work_alone(op, program.values)
        whole, part = (
            seconds(op, work, each, mesh, hardware) for each in (Strategy(), split)
        )
        ends = operand_spec(op.rule, split, 0), operand_spec(op.rule, Strategy(), 0)
        gather = price(*ends, mesh, value.shape, value.dtype.itemsize)
        if whole - part > gather:
            dims: tuple[Axes, ...] = (axes, *[()] * (len(value.shape) - 1))
            shut = (False,) * len(dims)
            what = f"rows of experts of {value.name}"
            engine.seed([Seed(v, dims, shut, what, batch=True)])
