"""Results of a region that belong where an input of the graph is.

A training step leaves ``copy_(input, new)`` for each parameter and state. Where a
region makes ``new`` for nothing else, it may write it there. In: a region, in its graph
of values and such copies. Out: for each of its results the copy that falls away. The
graph is only read. Kernels write in place where that is safe (``launch.target``),
elsewhere a copy is made when they are done: a number never depends on it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fxpar.sharding.cost.op import is_view
from fxpar.sharding.rules.op_facts import op_facts_of

_WRITE = torch.ops.aten.copy_.default


def writes_of(
    members: Collection[fx.Node], outputs: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Results that only a write to an input of the graph reads, with that write. What
    else reads the input is done before the region begins, since it is needed for it."""
    inside = set(members)
    found: dict[fx.Node, fx.Node] = {}
    for node in outputs:
        users = [user for user in node.users if user not in inside]
        if len(users) == 1 and _is_write(users[0], node):
            found[node] = users[0]
    if not found:
        return {}
    before = _needed_for(inside)
    return {
        node: write
        for node, write in found.items()
        if _is_free(write.args[0], inside | {write}, before)
    }


def _is_write(user: fx.Node, value: fx.Node) -> bool:
    if user.target is not _WRITE or user.users or user.args[1] is not value:
        return False
    target = user.args[0]
    assert isinstance(target, fx.Node)
    ours, theirs = value.meta["val"], target.meta["val"]
    return target.op == "placeholder" and all(
        getattr(ours, key) == getattr(theirs, key)
        for key in ("shape", "dtype", "device")
    )


def _needed_for(members: Collection[fx.Node]) -> set[fx.Node]:
    """What a region depends on; also what changes a value it depends on before that is
    read, as the wait of a gather does."""
    found: set[fx.Node] = set()
    rest = list(members)
    while rest:
        node = rest.pop()
        for read in node.all_input_nodes:
            changed = {
                u for u in read.users if op_facts_of(u.target).mutates and u < node
            }
            new = ({read} | changed) - found - set(members)
            found |= new
            rest += new
    return found


def _is_free(
    value: fx.Node, allowed: Collection[fx.Node], before: Collection[fx.Node]
) -> bool:
    """Whether all that reads an input, or a view of it, may or is done before."""
    return all(
        user in allowed
        or (_is_free(user, allowed, before) if is_view(user) else user in before)
        for user in value.users
    )
