"""Prices swaps of queries by which a schedule may balance a causal attention.

In: a call of attention in a graph of global shapes, and a strategy that splits its
queries. Out: whether ranks may swap halves of their queries so that all have equal work
(``sequences.balance`` asks ``obstacle`` too), and the seconds of the swaps. With
them a call costs the mean of all ranks' work (``visible_pairs``). Never: changes a
graph.
"""

from __future__ import annotations

from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import nbytes_of, query_position
from fxpar.sharding.cost.visible_pairs import has_causal_mask
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.op_table import tensors_of
from fxpar.sharding.program import Op, tensor_nodes
from fxpar.sharding.strategy import Strategy, operand_spec, result_spec


def obstacle(queries: int, keys: int, ranks: int) -> str | None:
    """Return why ``queries`` of a rank, in order of all of them, cannot be balanced;
    None if they can."""
    if keys != queries * ranks or ranks < 2:
        return "does not read all keys, in order, and a part of the queries"
    if queries % 2:
        return f"has {queries} queries, which cannot be halved"
    return None


def swap_seconds(op: Op, strategy: Strategy, mesh: Mesh, on: Hardware) -> float | None:
    """Return the seconds of swapping halves of all tensors with a row for each query,
    and of the copies around that; None where a strategy leaves nothing to balance."""
    first = query_position(op.target)
    if first is None or not has_causal_mask(op.node):
        return None
    (queries,), (keys,) = (op.rule.tensors[first + i][-2] for i in range(2))
    axes, size = strategy.axes_of.get(queries, ()), op.rule.size
    ranks = mesh.count(axes)
    if mesh.count(strategy.axes_of.get(keys, ())) > 1 or size[queries] % ranks:
        return None
    if obstacle(size[queries] // ranks, size[keys], ranks) is not None:
        return None
    total, permute = 0.0, along("permute", mesh, mesh.ordered(axes))
    for nbytes, is_result in _with_factor(op, strategy, mesh, queries):
        # A half is copied before it is sent; of a result both are joined.
        copied = nbytes + 2 * nbytes * is_result
        total += permute.seconds(nbytes / 2) + on.streaming(copied)
    return total


def _with_factor(
    op: Op, strategy: Strategy, mesh: Mesh, factor: str
) -> list[tuple[float, bool]]:
    """Return (bytes on one rank, whether it is a result) of each tensor that has a
    factor."""
    operands = [node.meta["val"] for node in tensor_nodes(op.node)]
    out = []
    for i, dims in enumerate(op.rule.tensors):
        if not any(factor in dim for dim in dims):
            continue
        place = i - len(operands)
        spec = (
            operand_spec(op.rule, strategy, i)
            if place < 0
            else result_spec(op.rule, strategy, place)
        )
        value = operands[i] if place < 0 else tensors_of(op.node.meta["val"])[place]
        out.append((nbytes_of(value) / mesh.count(spec.sharded_axes), place >= 0))
    return out
