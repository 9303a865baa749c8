"""What collectives and messages between simulated ranks compute, in this process.

In: the values that the members of a group hold. Out: what each of them gets. Messages
(functional isend, irecv) are received in the order in which they were sent, as NCCL
does it; whether one is there is asked first, nothing waits. ``lockstep`` runs graphs
with these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.passes import custom_ops
from fxpar.sharding.mesh import Mesh

Ranks = list[Any]  # one value per rank
Ends = Sequence[tuple[int, int]]  # (sender, receiver) of each rank's message
Env = dict[fx.Node, Ranks]


def ends_of(node: fx.Node, mesh: Mesh, ranks: Sequence[int]) -> Ends:
    """Each rank, and the peer that a message names."""
    axes, peer = custom_ops.group_axes(node.args[3]), node.args[1]
    return [(r, mesh.group(r, axes)[peer]) for r in ranks]


class Post:
    """Messages on their way, by (sender, receiver): tag and value."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        self.sent = 0
        self.draws: dict[str, Ranks] = {}

    def send(self, node: fx.Node, env: Env, ends: Ends) -> Ranks:
        value, tag = env[node.args[0]], node.args[2]
        for i, box in enumerate(ends):
            self.boxes.setdefault(box, []).append((tag, value[i]))
        self.sent += 1
        return [value[0].new_empty(0)] * len(ends)

    def start(self, node: fx.Node, env: Env, ends: Ends) -> Ranks:
        """A message of ``fxpar::send``."""
        values, tag = env[node.args[0]], node.args[-2]
        for end, value in zip(ends, values, strict=True):
            self.give([end], value, tag)
        return [values[0].new_empty(0)] * len(ends)

    def give(self, ends: Ends, value: torch.Tensor, tag: int = -1) -> None:
        for end in ends:
            self.boxes.setdefault(end, []).append((tag, value))
        self.sent += 1

    def arrived(self, node: fx.Node, ends: Ends) -> Ranks:
        """What ``fxpar::receive`` gets."""
        size, tag, out = node.args[1], node.args[-2], []
        for end in ends:
            sent, value = self.boxes[end].pop(0)
            if sent != tag or list(value.shape) != list(size):
                raise PlanError(f"{node.name} receives {list(value.shape)}, tag {sent}")
            out.append(value)
        return out

    def drawn(self, name: str, draw: Callable[[], Ranks]) -> Ranks:
        """What a node of this name drew, wherever it stands first."""
        if name not in self.draws:
            self.draws[name] = draw()
        return self.draws[name]

    def has_message(self, ends: Ends) -> bool:
        return all(self.boxes.get(box) for box in ends)

    def receive(self, node: fx.Node, env: Env, ends: Ends) -> Ranks:
        messages = [self.boxes[box].pop(0) for box in ends]
        for buffer, (tag, value) in zip(env[node.args[0]], messages, strict=True):
            if (tag, value.shape) != (node.args[2], buffer.shape):
                raise PlanError(
                    f"{node.name} receives {list(value.shape)} with tag {tag}"
                )
        return [value for _, value in messages]


def peers_of(node: fx.Node, mesh: Mesh, ranks: Sequence[int]) -> Ends:
    """Each rank, and the peer that its message names."""
    peer, _, name = node.args[-3:]
    axes = custom_ops.group_axes(name)
    return [(r, mesh.group(r, axes)[peer]) for r in ranks]


def shared(
    node: fx.Node,
    env: Env,
    mesh: Mesh,
    ranks: Sequence[int],
    post: Post,
) -> Generator[None, None, Ranks]:
    """What one member of each group has, on all of them."""
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
    op, dim = args[0][2], args[0][3]
    total = reduced([x @ w for x, w, *_ in args], op)
    return [part.contiguous() for part in total.chunk(len(args), dim)]


def _combined(a: Any, b: Any, op: str) -> Any:
    if op in ("sum", "avg"):
        return a + b
    if op == "product":
        return a * b
    return torch.maximum(a, b) if op == "max" else torch.minimum(a, b)


def reduced(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of values, the first ones first."""
    total = functools.reduce(lambda a, b: _combined(a, b, op), values)
    return total / len(values) if op == "avg" else total


def all_reduce(members: Ranks, op: str, *_: Any) -> Ranks:
    """The reduction, for each."""
    return [reduced(members, op)] * len(members)


def reduce_scatter(members: Ranks, op: str, *_: Any) -> Ranks:
    """A part of the reduction, for each."""
    total = reduced(members, op)
    return list(total.tensor_split(len(members)))


def all_gather(members: Ranks, *_: Any) -> Ranks:
    """All values joined along dim 0, for each."""
    return [torch.cat(members)] * len(members)


def all_to_all(members: Ranks, out_sizes: Any, in_sizes: Any, *_: Any) -> Ranks:
    """A block of every value, for each."""
    cut = [x.split(in_sizes) for x in members]
    return [torch.cat([blocks[i] for blocks in cut]) for i in range(len(members))]


def permute(members: Ranks, sources: Sequence[int], *_: Any) -> Ranks:
    """The value of the member that each names."""
    return [members[i] for i in sources]


def coalesced(run: Callable[..., Ranks]) -> Callable[..., Ranks]:
    """The same collective on a list of tensors."""

    def each(members: Ranks, *args: Any) -> Ranks:
        results = [run(list(xs), *args) for xs in zip(*members, strict=True)]
        return [list(rank) for rank in zip(*results, strict=True)]

    return each


# Products with their collective: (arguments of each member) -> results.
PRODUCTS: dict[Any, Callable[[Ranks], Ranks]] = {
    torch.ops.fxpar.gather_matmul.default: _gather_matmul,
    torch.ops.fxpar.matmul_scatter.default: _matmul_scatter,
}


def _gather_on(members: Ranks, dims: Sequence[int], op: str) -> Ranks:
    return [torch.cat(members, dims[0])] * len(members)


def _scatter_on(members: Ranks, dims: Sequence[int], op: str) -> Ranks:
    total = reduced(members, op)
    return [part.contiguous() for part in total.chunk(len(members), dims[0])]


def _exchange_on(members: Ranks, dims: Sequence[int], op: str) -> Ranks:
    source, target = dims
    cut = [x.chunk(len(members), target) for x in members]
    return [torch.cat([x[i] for x in cut], source) for i in range(len(members))]


# The collectives of manual regions, by kind: on any dim.
ON_DIMS: dict[str, Callable[..., Ranks]] = {
    "all_reduce": lambda members, dims, op: all_reduce(members, op),
    "reduce_scatter": _scatter_on,
    "all_gather": _gather_on,
    "all_to_all": _exchange_on,
    "permute": lambda members, dims, op: permute(members, dims),
}
