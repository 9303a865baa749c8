"""Messages between ranks that are simulated in this process, for ``lockstep``.

In: sends and receives (functional isend, irecv) as nodes, with the values of the ranks
that run them. Out: what is received, in the order in which it was sent, as NCCL does
it. Never waits: whether a message is there is asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.passes import custom_ops
from fxpar.sharding.mesh import Mesh

Ends = Sequence[tuple[int, int]]  # (sender, receiver) of each rank's message
Env = dict[fx.Node, list[Any]]  # one value per rank


def ends_of(node: fx.Node, mesh: Mesh, ranks: Sequence[int]) -> Ends:
    """Each rank, and the peer that a message names."""
    axes, peer = custom_ops.group_axes(node.args[3]), node.args[1]
    return [(r, mesh.group(r, axes)[peer]) for r in ranks]


class Post:
    """Messages on their way, by (sender, receiver): tag and value."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        self.sent = 0

    def send(self, node: fx.Node, env: Env, ends: Ends) -> list[Any]:
        value, tag = env[node.args[0]], node.args[2]
        for i, box in enumerate(ends):
            self.boxes.setdefault(box, []).append((tag, value[i]))
        self.sent += 1
        return [value[0].new_empty(0)] * len(ends)

    def is_there(self, ends: Ends) -> bool:
        return all(self.boxes.get(box) for box in ends)

    def receive(self, node: fx.Node, env: Env, ends: Ends) -> list[Any]:
        got = [self.boxes[box].pop(0) for box in ends]
        for buffer, (tag, value) in zip(env[node.args[0]], got, strict=True):
            if (tag, value.shape) != (node.args[2], buffer.shape):
                raise PlanError(
                    f"{node.name} receives {list(value.shape)} with tag {tag}"
                )
        return [value for _, value in got]
