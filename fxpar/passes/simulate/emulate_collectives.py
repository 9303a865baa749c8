"""Emulates collectives and messages between simulated ranks, in this process; splits
global values into one part per rank, and joins them.

In: the values of a group's members. Out: each member's result. Messages (functional
isend, irecv) are received in the order in which they were sent, as with NCCL; callers
ask first whether one has arrived. ``lockstep`` runs graphs with these functions. A spec
gives the part of a global value that a rank holds; ranks with the same part share the
object. Never communicates or waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.graph import custom_ops, exact_ops
from fxpar.graph.collective_nodes import COMBINE
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.steps import MASKED
from fxpar.sharding.spec import Spec

Ranks = list[Any]  # one value per rank
Ends = Sequence[tuple[int, int]]  # (sender, receiver) of each rank's message
Env = dict[fx.Node, Ranks]


def ends_of(node: fx.Node, mesh: Mesh, ranks: Sequence[int]) -> Ends:
    """Return (rank, the peer that a message names) for each rank."""
    peer, _, name = node.args[-3:]
    axes = custom_ops.group_axes(name)
    return [(r, mesh.group(r, axes)[peer]) for r in ranks]


class Post:
    """Holds messages under way, by (sender, receiver): tag and value."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        self.sent = 0
        self.draws: dict[str, Ranks] = {}

    def send(self, node: fx.Node, env: Env, ends: Ends) -> Ranks:
        """Send the messages of a node; return its empty results."""
        values = env[node.args[0]]
        for end, value in zip(ends, values, strict=True):
            self.give([end], value, node.args[-2])
        return [values[0].new_empty(0)] * len(ends)

    def give(self, ends: Ends, value: torch.Tensor, tag: int = -1) -> None:
        for end in ends:
            self.boxes.setdefault(end, []).append((tag, value))
        self.sent += 1

    def has_message(self, ends: Ends) -> bool:
        return all(self.boxes.get(box) for box in ends)

    def receive(self, node: fx.Node, env: Env, ends: Ends) -> Ranks:
        """Return the values that a node receives, into buffers or as new tensors.
        Raises PlanError unless they fit."""
        sizes = [node.args[1]] * len(ends)
        if node.target is torch.ops._c10d_functional.irecv.default:
            sizes = [buffer.shape for buffer in env[node.args[0]]]
        messages = [self.boxes[end].pop(0) for end in ends]
        for size, (tag, value) in zip(sizes, messages, strict=True):
            shape = list(value.shape)
            if (tag, shape) != (node.args[-2], list(size)):
                raise PlanError(f"{node.name} receives {shape} with tag {tag}")
        return [value for _, value in messages]

    def drawn(self, name: str, draw: Callable[[], Ranks]) -> Ranks:
        """Return the numbers that a node of this name drew; the first of several graphs
        that have it draws."""
        if name not in self.draws:
            self.draws[name] = draw()
        return self.draws[name]


def shared(
    node: fx.Node,
    env: Env,
    mesh: Mesh,
    ranks: Sequence[int],
    post: Post,
) -> Generator[None, None, Ranks]:
    """Return the value of one member of each group, on all members; yields while the
    message has not arrived."""
    values, source, axes = env[node.args[0]], node.args[2], node.args[3]
    groups = [mesh.group(r, custom_ops.group_axes(axes)) for r in ranks]
    for r, value, group in zip(ranks, values, groups, strict=True):
        if group[source] == r:
            post.give([(r, peer) for peer in group if peer != r], value)
    ends = [
        (g[source], r) for r, g in zip(ranks, groups, strict=True) if g[source] != r
    ]
    while not post.has_message(ends):
        yield
    received = {r: post.boxes[source, r].pop(0)[1] for source, r in ends}
    return [received.get(r, value) for r, value in zip(ranks, values, strict=True)]


def _gather_matmul(args: Ranks) -> Ranks:
    whole = torch.cat([x for x, *_ in args], args[0][2])
    return [[whole, *(whole @ w for w in ws)] for _, ws, *_ in args]


def _matmul_scatter(args: Ranks) -> Ranks:
    _, _, op, dim, *_ = args[0]
    return reduce_scatter([x @ w for x, w, *_ in args], op, dim=dim)


def reduced(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of values, in order, in memory of its own."""
    if len(values) == 1:
        return values[0].clone()
    if op != "avg":
        return functools.reduce(COMBINE[op], values)
    count, dtype = len(values), values[0].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return functools.reduce(torch.add, (x / count for x in values))
    total = functools.reduce(torch.add, values)
    return torch.div(total, count, rounding_mode="trunc")


def all_reduce(members: Ranks, op: str, *_: Any) -> Ranks:
    """Return the reduction for each member."""
    return [reduced(members, op)] * len(members)


def reduce_scatter(members: Ranks, op: str, *_: Any, dim: int = 0) -> Ranks:
    """Return a part of the reduction for each member."""
    total = reduced(members, op)
    return [part.contiguous() for part in total.tensor_split(len(members), dim)]


def all_gather(members: Ranks, *_: Any, dim: int = 0) -> Ranks:
    """Return all values joined for each member."""
    return [torch.cat(members, dim)] * len(members)


def all_to_all(members: Ranks, out_sizes: Any, in_sizes: Any, *_: Any) -> Ranks:
    """Return for each member its blocks of all values, joined along dim 0."""
    cut = [x.split(in_sizes) for x in members]
    return [torch.cat([blocks[i] for blocks in cut]) for i in range(len(members))]


def permute(members: Ranks, sources: Sequence[int], *_: Any) -> Ranks:
    """Return for each member a copy of the value of the member that it names, which may
    write over its own later."""
    copies = {id(x): x.clone() for x in members}
    return [copies[id(members[i])] for i in sources]


def coalesced(run: Callable[..., Ranks]) -> Callable[..., Ranks]:
    """Return the same collective for lists of tensors."""

    def each(members: Ranks, *args: Any) -> Ranks:
        results = [run(list(xs), *args) for xs in zip(*members, strict=True)]
        return [list(rank) for rank in zip(*results, strict=True)]

    return each


def _sent_exactly(run: Callable[..., torch.Tensor], args: Ranks) -> Ranks:
    return exact_ops.in_lockstep(run, [each[:-1] for each in args])


# Ops that fuse a matmul with a collective, and exchanges of exact numbers of rows:
# (arguments of each member) -> results.
PRODUCTS: dict[Any, Callable[[Ranks], Ranks]] = {
    torch.ops.fxpar.gather_matmul.default: _gather_matmul,
    torch.ops.fxpar.matmul_scatter.default: _matmul_scatter,
    exact_ops.SEND: functools.partial(_sent_exactly, exact_ops.sent_rows),
    exact_ops.RETURN: functools.partial(_sent_exactly, exact_ops.returned_rows),
}


def _exchange_on(members: Ranks, dims: Sequence[int], op: str) -> Ranks:
    source, target = dims
    cut = [x.chunk(len(members), target) for x in members]
    return [torch.cat([x[i] for x in cut], source) for i in range(len(members))]


# Kind -> the collective of manual regions, on any dim.
ON_DIMS: dict[str, Callable[..., Ranks]] = {
    "all_reduce": lambda members, dims, op: all_reduce(members, op),
    "reduce_scatter": lambda members, dims, op: reduce_scatter(
        members, op, dim=dims[0]
    ),
    "all_gather": lambda members, dims, op: all_gather(members, dim=dims[0]),
    "all_to_all": _exchange_on,
    "permute": lambda members, dims, op: permute(members, dims),
}


def masked(x: torch.Tensor, op: str, count: int) -> Ranks:
    """Return the value, then the identity of the reduction for all other ranks; for
    avg, max and min all have the value."""
    mask = torch.full_like(x, int(op == "product")) if op in MASKED else x
    return [x, *[mask] * (count - 1)]


def scatter(
    x: torch.Tensor,
    spec: Spec,
    mesh: Mesh,
    summands: Callable[[torch.Tensor, str, int], Ranks] = masked,
) -> list[torch.Tensor]:
    """Return each rank's part of a global value; ranks with the same part share it.
    ``summands``: (value, reduction, count) -> the values along a partial axis."""
    values: dict[tuple[int, ...], torch.Tensor] = {(): x}
    for axis, op in spec.partial:
        values = {
            (*key, i): summand
            for key, value in values.items()
            for i, summand in enumerate(summands(value, op, mesh.axis_size(axis)))
        }
    parts: dict[Any, torch.Tensor] = {}
    out = []
    for rank in range(mesh.size):
        value = values[tuple(mesh.index(rank, [axis]) for axis in spec.partial_axes)]
        key = id(value), *(mesh.index(rank, axes) for axes in spec.dims)
        if key not in parts:
            part = value[spec.slices(mesh, x.shape, rank)]
            parts[key] = value if part.shape == x.shape else part.clone()
        out.append(parts[key])
    return out


def gather(parts: Sequence[Any], spec: Spec, mesh: Mesh) -> Any:
    """Return the global value of one part per rank, partial ones reduced.

    Raises AssertionError unless ranks that hold the same shard agree exactly (NaN
    equals NaN).
    """
    if not isinstance(parts[0], torch.Tensor):
        if any(part != parts[0] for part in parts):
            raise AssertionError(f"ranks disagree: {list(parts)}")
        return parts[0]
    owners: dict[Any, tuple[int, torch.Tensor]] = {}
    shards: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for rank, part in enumerate(parts):
        shard = tuple(mesh.index(rank, axes) for axes in spec.dims)
        summand = tuple(mesh.index(rank, [axis]) for axis in spec.partial_axes)
        first, expected = owners.setdefault((shard, summand), (rank, part))
        if not _is_equal(expected, part):
            raise AssertionError(
                f"ranks {first} and {rank} hold the same shard {shard} of {spec} on "
                f"mesh {mesh}, but differ: {_difference(expected, part)}"
            )
        shards.setdefault(shard, {})[summand] = expected
    reduced_shards = {
        shard: _reduced(summands, spec) for shard, summands in shards.items()
    }
    if len(reduced_shards) == 1:
        return next(iter(reduced_shards.values()))
    return _joined(reduced_shards)


def _joined(shards: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """Return the value joined from shards by their places; shards may be uneven."""
    sample = next(iter(shards.values()))
    slices: list[list[slice]] = []
    for d in range(sample.dim()):
        sizes = {place[d]: part.shape[d] for place, part in shards.items()}
        ends = list(itertools.accumulate(sizes[i] for i in sorted(sizes)))
        starts = zip([0, *ends], ends, strict=False)
        slices.append([slice(start, end) for start, end in starts])
    out = sample.new_empty([cuts[-1].stop for cuts in slices])
    for place, part in shards.items():
        out[tuple(cuts[i] for i, cuts in zip(place, slices, strict=True))] = part
    return out


def _reduced(summands: dict[tuple[int, ...], torch.Tensor], spec: Spec) -> torch.Tensor:
    """Return the reduction over partial axes, the last first. Keys: position along
    each axis."""
    for _, op in reversed(spec.partial):
        lines: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key in sorted(summands):
            lines.setdefault(key[:-1], []).append(summands[key])
        summands = {key: reduced(values, op) for key, values in lines.items()}
    return summands[()]


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
