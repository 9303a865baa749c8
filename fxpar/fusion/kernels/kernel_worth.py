"""Predicts what generated kernels save: a region as one kernel, a matmul with signals.

In: a region and its graph. Out: bytes through memory in one kernel and in those that
Inductor would make (``passes.simulate.launches``), and the results that a kernel may
write where an input of the graph is. One kernel for all reads its inputs and writes its
outputs. Bytes that a collective moves through buffers of its own are left out on both
sides. A value that others could have computed in the same kernel as the region must now
be written for them and read again. A training step leaves ``copy_(input, new)`` for
each parameter and state. Where a region makes ``new`` for nothing else, it may write it
there. Kernels write in place where that is safe (``run_kernels``), elsewhere a copy is
made when they are done: a number never depends on it. Never changes the graph.

In: sizes, the group's ranks and the hardware (``sharding.cost``). Out: a ``Verdict`` on
three forms of a matmul with its collective: one and then the other; chunk by chunk, as
PyTorch's fused ops (``symm_mem::fused_all_gather_matmul``,
``symm_mem::fused_matmul_reduce_scatter``); and one kernel with signals
(``matmul_kernel``). Never asks a device, a rank or a clock, so that all ranks decide
the same. Nothing of it was measured with these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from fxpar.fusion.kernels.implementations import BARRIER
from fxpar.fusion.kernels.matmul_kernel import TILES, check, tiles_of
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.region_program import dtype_of
from fxpar.fusion.kernels.select_region import SelectedRegion, is_heavy
from fxpar.passes.simulate.launches import launches_among
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.hardware_table import Hardware, ProductDims
from fxpar.sharding.cost.op import is_light, is_view, nbytes_of
from fxpar.sharding.mesh import Link, Mesh
from fxpar.sharding.op_facts import op_facts_of

_WRITE = torch.ops.aten.copy_.default


def writes_of(
    members: Collection[fx.Node], outputs: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the results that only a write to an input of the graph reads, with that
    write. Other readers of the input come before the region, since it depends on
    them."""
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
    """Return the nodes that a region depends on; also those that change a value before
    it is read, as the wait of a gather does."""
    ancestors: set[fx.Node] = set()
    pending = list(members)
    while pending:
        node = pending.pop()
        for read in node.all_input_nodes:
            changed = {
                u for u in read.users if op_facts_of(u.target).mutates and u < node
            }
            added = ({read} | changed) - ancestors - set(members)
            ancestors |= added
            pending += added
    return ancestors


def _is_free(
    value: fx.Node, allowed: Collection[fx.Node], before: Collection[fx.Node]
) -> bool:
    """Return whether all readers of an input, or of a view of it, are allowed or come
    before."""
    return all(
        user in allowed
        or (_is_free(user, allowed, before) if is_view(user) else user in before)
        for user in value.users
    )


def bytes_of(region: SelectedRegion) -> tuple[int, int]:
    """Return (bytes of several kernels, bytes of one)."""
    unfused = launches_among(region.members, region.outputs)
    before = sum(launch.moved for launch in unfused.launches)
    after = sum(tensor.nbytes for tensor in region.outline.program.inputs)
    in_memory = {buffer for launch in unfused.launches for buffer in launch.reads}
    in_memory |= {b for launch in unfused.launches if launch.axes for b in launch.makes}
    writes = writes_of(region.members, region.outputs)
    for node, buffers in zip(region.outputs, unfused.outputs, strict=True):
        # Inductor writes in place, too.
        stored, read_again = (True, False) if node in writes else _readers(region, node)
        if not stored:
            before -= sum(b.nbytes for b in buffers if b not in in_memory)
        after += nbytes_of(node.meta["val"]) * (1 + read_again)
    return before, after


def _readers(region: SelectedRegion, node: fx.Node) -> tuple[bool, bool]:
    """Return, for a result, whether it is in memory in any case, and whether it has
    readers that could have been in a kernel with it."""
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
            elif _can_join(region, user):
                read_again = True
            else:
                stored = True
    return stored, read_again


def _can_join(region: SelectedRegion, user: fx.Node) -> bool:
    """Return whether Inductor could compute a reader in the kernel of its operand: it
    is light, and waits for nothing else that takes time."""
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


# Assumed, not measured: the share of the library's speed that this kernel reaches, and
# by how much it must win.
SHARE = 0.9
MARGIN = 1.05
# Rows below which launches and tiles that do not fill cost more than is hidden: torch's
# own fused matmuls begin there, too (_fused_all_gather_matmul_native).
LEAST_ROWS = 2048
# Seconds until a launched matmul fills the device, as those of the library take by
# their ``Peak``, and of a copy between devices, in addition to its bytes. Estimates.
LAUNCH = 3e-6
COPY = 3e-6


@dataclass(frozen=True)
class Verdict:
    """Says whether a kernel with signals pays, with predicted seconds of the collective
    and the matmul together."""

    pays: bool  # it is the fastest by ``MARGIN``
    why: str
    serial: float  # one after the other
    overlapped: float  # in the kernel with signals
    chunked: float = math.inf  # chunk by chunk


@dataclass(frozen=True)
class _Work:
    """Is a matmul with its collective: [ranks * rows, k] times [k, n]."""

    ranks: int  # equal to the number of chunks
    rows: int  # rows of a chunk
    n: int  # columns of the product, without further weights
    k: int  # size of the contraction
    dtype: str  # dtype of the operands, without ``torch.``
    speed: float  # flops/s of the library on one multiprocessor
    units: int  # multiprocessors of the device
    moving: float  # seconds to move all chunks but the own
    summing: float  # seconds to add up the received chunks; 0 for a gather
    further: int = 0  # columns of further weights, with matmuls that come later


def profitable(
    kind: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    hardware: Hardware,
    *,
    dtype: str = "bfloat16",
    programs: int = 132,
    units: int = 0,
    further: int = 0,
) -> Verdict:
    """Judge whether a matmul is worth joining with its collective: [m, k] times [k, n]
    as one rank computes it, m over all chunks. ``units``: multiprocessors, as many as
    ``programs`` if 0; ``further``: columns of further weights of a gather, which a
    kernel with signals leaves for later.

    One after the other they take the seconds of ``sharding.cost``. Chunks move (ranks -
    1) / ranks of A's or the product's bytes over the link. Programs go in waves of
    tiles, and a wave of a gather waits for the last chunk it reads; a scatter is the
    same backwards in time. All is hidden from n (gather) or k (scatter) of peak * bytes
    of an element / (2 * link) on, for many ranks. Chunk by chunk, each chunk's tiles
    fill the device or do not.
    """
    size = dtype_of(dtype).itemsize
    whole = m * (k if kind == "gather" else n) * size
    link, peak = _link(hardware, ranks), hardware.peak(dtype).rate(math.inf)
    step, nbytes = _STEPS[kind], whole / ranks if kind == "gather" else whole
    collective = collectives.seconds(step, [ranks], [link], nbytes)
    flops, dims = 2.0 * m * (n + further) * k, ProductDims(m, n + further, k)
    matmul = hardware.arithmetic(flops, dims, dtype)
    serial = collective + matmul
    why = never(kind, m, n, k, ranks, dtype)
    if why:
        return Verdict(False, why, serial, serial)
    units = units or programs
    moving = (ranks - 1) * (whole / ranks / link.bandwidth + COPY)
    summed = 0.0 if kind == "gather" else (1 + 1 / ranks) * whole
    summing = hardware.streaming(summed)
    work = _Work(
        ranks, m // ranks, n, k, dtype, peak / units, units, moving, summing, further
    )
    overlapped, chunked = _signals(work, programs), _chunked(work, kind)
    name, free = ("n", n) if kind == "gather" else ("k", k)
    least = math.ceil(peak * size * (ranks - 1) / ranks / (2 * link.bandwidth))
    why = (
        f"{serial / overlapped:.2f} times as fast as one after the other, "
        f"{chunked / overlapped:.2f} as chunk by chunk: "
        f"{collective * 1e6:.0f} us to communicate and "
        f"{matmul * 1e6:.0f} us to compute; {name} = {free}, all is hidden "
        f"from {least}"
    )
    pays = min(serial, chunked) >= MARGIN * overlapped
    return Verdict(pays, why, serial, overlapped, chunked)


# The steps that a kernel with signals replaces.
_STEPS = {"gather": "all_gather", "scatter": "reduce_scatter"}


def _link(hardware: Hardware, ranks: int) -> Link:
    """Return the link that joins ``ranks`` ranks, if there are no others."""
    (link,) = hardware.links(Mesh((("ranks", ranks),)))
    return link


def never(kind: str, m: int, n: int, k: int, ranks: int, dtype: str) -> str:
    """Return why it does not pay on any device and link; "" if it may."""
    if ranks < 2:
        return "one rank has nothing to move"
    try:
        check(kind, m, n, k, ranks, dtype)
    except CannotEmit as error:
        return str(error)
    if m < LEAST_ROWS:
        return f"{m} rows: below {LEAST_ROWS} tiles and launches cost what is hidden"
    return ""


def _signals(work: _Work, programs: int) -> float:
    """Return the seconds of the kernel with signals: its programs go in waves of tiles.
    Chunks but the own arrive one by one, evenly."""
    m = work.rows * work.ranks
    tiles = tiles_of(m, work.n, work.k, work.ranks, work.dtype, programs)
    each = tiles.count(work.rows, work.n)
    turn = 2.0 * tiles.rows * tiles.columns * work.k / (work.speed * SHARE)
    now, count = 0.0, each * work.ranks
    grid = min(count, programs)
    for first in range(0, count, grid):
        chunk = (min(first + grid, count) - 1) // each
        now = max(now, chunk * work.moving / (work.ranks - 1)) + turn
    later = 2.0 * m * work.further * work.k / (work.speed * work.units)
    return BARRIER + LAUNCH + now + later + work.summing


def _chunked(work: _Work, kind: str) -> float:
    """Return the seconds of PyTorch's ops: on two streams in turn, a gather copies a
    chunk and multiplies it, a scatter multiplies and copies one. Copies go one at a
    time, and so do matmuls. The own chunk is the first to be multiplied, or the
    last."""
    compute = LAUNCH + _filled(work, work.n)
    if work.further:
        compute += LAUNCH + _filled(work, work.further)
    copy = work.moving / (work.ranks - 1)
    streams, engine, device = [0.0, 0.0], 0.0, 0.0
    if kind == "gather":
        device = streams[0] = compute
        for step in range(1, work.ranks):
            at = step % 2
            engine = max(engine, streams[at]) + copy
            device = streams[at] = max(device, engine) + compute
        return BARRIER + device
    for step in range(1, work.ranks):
        at = step % 2
        device = max(device, streams[at]) + compute
        engine = streams[at] = max(engine, device + BARRIER) + copy
    return max(max(device, streams[0]) + compute, engine) + BARRIER + work.summing


def _filled(work: _Work, columns: int) -> float:
    """Return the seconds of the library's matmul of one chunk: full waves of the better
    of the two largest tiles; smaller ones do not reach its speed."""
    return min(
        math.ceil(tiles.count(work.rows, columns) / work.units)
        * (2.0 * tiles.rows * tiles.columns * work.k / work.speed)
        for tiles in TILES[work.dtype][:2]
    )
