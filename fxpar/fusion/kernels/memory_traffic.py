"""Bytes through memory of a region, in one kernel and in those Inductor would make.

In: a region and its graph, which is only read. Out: two numbers, and the results that a
kernel may write where an input of the graph is. What Inductor would make of it says
``passes.simulate.launches``. One kernel for all reads its inputs and writes its
outputs. What a collective moves through buffers of its own is left out on both sides.
What others could have computed in the same kernel as the region must now be written for
them and read again.

A training step leaves ``copy_(input, new)`` for each parameter and state. Where a
region makes ``new`` for nothing else, it may write it there. Kernels write in place
where that is safe (``run_kernels``), elsewhere a copy is made when they are
done: a number never depends on it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fxpar.fusion.kernels.select_region import SelectedRegion, is_heavy
from fxpar.passes.simulate.launches import launches_among
from fxpar.sharding.cost.op import is_light, is_view, nbytes_of
from fxpar.sharding.rules.op_facts import op_facts_of

_WRITE = torch.ops.aten.copy_.default


def writes_of(
    members: Collection[fx.Node], outputs: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Results that only a write to an input of the graph reads, with that write. What
    else reads the input is done before the region begins, since it is needed for it."""
    inside = set(members)
    writes: dict[fx.Node, fx.Node] = {}
    for node in outputs:
        users = [user for user in node.users if user not in inside]
        if len(users) == 1 and _is_write(users[0], node):
            writes[node] = users[0]
    if not writes:
        return {}
    before = _needed_for(inside)
    return {
        node: write
        for node, write in writes.items()
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
    needed: set[fx.Node] = set()
    pending = list(members)
    while pending:
        node = pending.pop()
        for read in node.all_input_nodes:
            changed = {
                u for u in read.users if op_facts_of(u.target).mutates and u < node
            }
            added = ({read} | changed) - needed - set(members)
            needed |= added
            pending += added
    return needed


def _is_free(
    value: fx.Node, allowed: Collection[fx.Node], before: Collection[fx.Node]
) -> bool:
    """Whether all that reads an input, or a view of it, may or is done before."""
    return all(
        user in allowed
        or (_is_free(user, allowed, before) if is_view(user) else user in before)
        for user in value.users
    )


def bytes_of(region: SelectedRegion) -> tuple[int, int]:
    """(bytes of several kernels, bytes of one)."""
    apart = launches_among(region.members, region.outputs)
    before = sum(launch.moved for launch in apart.launches)
    after = sum(tensor.nbytes for tensor in region.outline.program.inputs)
    in_memory = {buffer for launch in apart.launches for buffer in launch.reads}
    in_memory |= {b for launch in apart.launches if launch.axes for b in launch.makes}
    writes = writes_of(region.members, region.outputs)
    for node, buffers in zip(region.outputs, apart.outputs, strict=True):
        # In place is what Inductor writes, too.
        stored, read_again = (True, False) if node in writes else _readers(region, node)
        if not stored:
            before -= sum(b.nbytes for b in buffers if b not in in_memory)
        after += nbytes_of(node.meta["val"]) * (1 + read_again)
    return before, after


def _readers(region: SelectedRegion, node: fx.Node) -> tuple[bool, bool]:
    """Of a result: whether it is in memory in any case, and whether some read it that
    could have been in a kernel with it."""
    inside = set(region.members)
    stored = read_again = False
    pending, seen = [node], set()
    while pending:
        at = pending.pop()
        for user in at.users:
            if user in inside and not is_view(user) or user in seen:
                continue
            seen.add(user)
            if is_view(user):
                pending.append(user)
            elif _could_join(region, user):
                read_again = True
            else:
                stored = True
    return stored, read_again


def _could_join(region: SelectedRegion, user: fx.Node) -> bool:
    """Whether Inductor could compute a reader in the kernel that makes what it reads:
    it is light, and waits for nothing else that takes time."""
    if op_facts_of(user.target).mutates:
        return True  # written to in place
    if user.op == "output" or is_heavy(user) or not is_light(user.target):
        return False
    first = region.members[0]
    inside = set(region.members)
    pending, seen = [user], {user}
    while pending:
        at = pending.pop()
        if at in inside or at.op == "placeholder" or at < first:
            continue
        if is_heavy(at):
            return False
        for read in at.all_input_nodes:
            if read not in seen:
                seen.add(read)
                pending.append(read)
    return True
