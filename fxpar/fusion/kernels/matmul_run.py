"""Runs matmuls with their collectives: the kernel with signals, and the copies of
chunks.

In: a provider of memory that ranks share, this rank's tensors. Out: new tensors. There
are two streams: kernels compute on the current one, the provider's second one copies (a
copy engine), raises or awaits flags (``matmul_signals``) and meets the other ranks. On
CPU, for tests, a thread is the second stream; since Triton's interpreter runs one
kernel at a time, ranks then meet before or after the matmul.

    gather    own chunk to the workspace; meet; others' chunks to A, a flag for each,
              overlapping with the matmul that waits for them
    scatter   matmul; overlapping with it, as flags rise, chunks to their owners'
              workspaces; meet; sum of the received chunks

Anything a kernel waits for is launched before it, and kernels are loaded and memory is
allocated before the first: the host waits for nothing, and no running kernel waits for
the host. Kernels take no more programs than the provider has, which leaves
multiprocessors (``symmetric_memory.FREE``) to the meeting and to NCCL. Only the meeting
waits for other ranks; it has a deadline (``device_functions.barrier``) and goes on
after it, and so does all that waits for it. Never decides whether it pays
(``kernel_worth``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fxpar import _torch
from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.matmul_kernel import (
    ALIGNED,
    Epilogue,
    Gemm,
    KernelLaunch,
    call_of,
    gemm,
)
from fxpar.fusion.kernels.symmetric_memory import Provider, Workspace, region_number

# An epilogue, and for each weight the tensors of its parameters.
Bound = tuple[Epilogue, Sequence[Sequence[torch.Tensor]]]

_BLOCK = 1024  # elements of a sum to a program


def gather_matmul(
    provider: Provider,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    epilogue: Bound | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return all ranks' rows [ranks * rows, k], and their products with weights [k, n].

    ``x``: [rows, k], of equal shape on all ranks, float32 or bfloat16, as are weights.
    The product with the weight of most columns overlaps with the copies, the others
    come after it. ``epilogue``: of every product. Raises CannotEmit; Unshared, on all
    ranks, where memory has no room; FxparError where an earlier call missed a rank.
    """
    return prepared_gather(provider, x, weights, epilogue)()


def matmul_scatter(
    provider: Provider, x: torch.Tensor, w: torch.Tensor, *, mean: bool = False
) -> torch.Tensor:
    """Return this rank's rows [m / ranks, n] of the sum over ranks of [m, k] times [k,
    n]; ``mean``: divided by the number of ranks. Products are rounded to their dtype,
    their sum is in float32, in the order of ranks, and rounded once. Raises as
    ``gather_matmul``."""
    return prepared_scatter(provider, x, w, mean=mean)()


def prepared_gather(
    provider: Provider,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    epilogue: Bound | None = None,
) -> Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]:
    """Prepare ``gather_matmul`` as far as it needs no other rank's kernel. Return a
    function that runs it. For one process that plays several ranks."""
    rank, ranks = provider.rank, provider.ranks
    x, weights = _aligned(x), [_aligned(w, keep=True) for w in weights]
    rows, k = x.shape
    whole = _empty(x, ranks * rows, k)
    products = [_empty(x, ranks * rows, w.shape[1]) for w in weights]
    first = max(range(len(weights)), key=lambda i: weights[i].shape[1])
    head, epilogue_operands = epilogue or (Epilogue(), [()] * len(weights))
    flags, counts = _signals(provider)

    def by_kernel(i: int, signals: bool) -> KernelLaunch:
        kernel = _kernel("gather", whole, weights[i], provider, head, signals)
        operands = x, whole, weights[i], products[i], *epilogue_operands[i]
        return call_of(kernel, operands, flags, counts, rank)

    def by_library(i: int) -> Callable[[], Any]:
        return lambda: torch.mm(whole, weights[i], out=products[i])

    multiply = by_kernel(first, True)
    further = [i for i in range(len(weights)) if i != first]
    later = [by_kernel(i, False) if epilogue else by_library(i) for i in further]
    space = provider.workspace(x.nbytes)
    meet = _meeting(provider, space, f"a gather to {[*whole.shape]} with its matmul")
    loaded = [call for call in later if isinstance(call, KernelLaunch)]
    _load(provider, meet, _flag("raise_flag", flags, 0), multiply, *loaded)
    peers = [_rows(t, x, rows) for t in provider.tensors(space)]

    def fetch(up: Callable[[int], None], _: Callable[[int], None]) -> None:
        chunks = whole.chunk(ranks)
        for other in _ring(rank, ranks):
            chunks[other].copy_(peers[other], non_blocking=True)
            up(other)
        chunks[rank].copy_(x, non_blocking=True)

    def start() -> tuple[torch.Tensor, list[torch.Tensor]]:
        peers[rank].copy_(x)
        _overlap_copies(provider, meet, fetch, multiply, flags, waits=True)
        for run in later:
            run()
        return whole, products

    return start


def prepared_scatter(
    provider: Provider, x: torch.Tensor, w: torch.Tensor, *, mean: bool = False
) -> Callable[[], torch.Tensor]:
    """Prepare ``matmul_scatter``, as ``prepared_gather`` does."""
    rank, ranks = provider.rank, provider.ranks
    x, w = _aligned(x), _aligned(w, keep=True)
    rows, n = x.shape[0] // ranks, w.shape[1]
    kernel = _kernel("scatter", x, w, provider, Epilogue(), True)
    c, part = _empty(x, ranks * rows, n), _empty(x, rows, n)
    flags, counts = _signals(provider)
    multiply = call_of(kernel, (x, w, c), flags, counts, rank)
    space = provider.workspace(c.nbytes)
    title = f"the scatter of a matmul's {[*c.shape]}"
    meet = _meeting(provider, space, title)
    slots = [_rows(t, c, ranks * rows).chunk(ranks) for t in provider.tensors(space)]
    chunks = c.chunk(ranks)
    total = _call(
        "add_up",
        -(-part.numel() // _BLOCK),
        (slots[rank][0], chunks[rank], part, rank),
        COUNT=part.numel(),
        RANKS=ranks,
        DIVISOR=ranks if mean else 1,
        BLOCK=_BLOCK,
    )
    _load(provider, meet, _flag("await_flag", flags, 0), multiply, total)

    def send(_: Callable[[int], None], wait: Callable[[int], None]) -> None:
        for other in _back(rank, ranks):
            wait(other)
            slots[other][rank].copy_(chunks[other], non_blocking=True)

    def start() -> torch.Tensor:
        _overlap_copies(provider, meet, send, multiply, flags, waits=False)
        total()
        return part

    return start


def _ring(rank: int, ranks: int) -> list[int]:
    """Return the others in the order in which the matmul of a gather needs their
    chunks."""
    return [(rank + i) % ranks for i in range(1, ranks)]


def _back(rank: int, ranks: int) -> list[int]:
    """Return the others in the order in which the matmul of a scatter makes their
    chunks."""
    return [(rank - i) % ranks for i in range(1, ranks)]


# Tensors and kernels.


def _signals(provider: Provider) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flags and counts of one call, as ``signals_of``: new ones, since a call
    that failed leaves its own as they were."""
    pair = torch.zeros(2, provider.ranks, dtype=torch.int32, device=provider.device)
    return pair[0], pair[1]


def _empty(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return run_kernels.empty((rows, columns), (columns, 1), like.dtype, like.device)


def _aligned(x: torch.Tensor, keep: bool = False) -> torch.Tensor:
    """Return ``x`` at a multiple of 16 bytes, and row by row unless it is to ``keep``
    its strides."""
    x = x if keep else x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x


def _rows(space: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the start of a workspace as ``rows`` rows of the width and dtype of
    ``like``."""
    size = rows * like.shape[1] * like.element_size()
    return space[:size].view(like.dtype).view(rows, like.shape[1])


def _kernel(
    kind: str,
    a: torch.Tensor,
    w: torch.Tensor,
    provider: Provider,
    epilogue: Epilogue,
    signals: bool,
) -> Gemm:
    """Return the kernel for ``a``, the rows of all chunks, and a weight."""
    return _cached_gemm(
        kind,
        *(a.shape[0], w.shape[1], a.shape[1], provider.ranks),
        str(a.dtype).removeprefix("torch."),
        programs=provider.programs,
        b_stride=(w.stride(0), w.stride(1)),
        epilogue=epilogue,
        signals=signals,
    )


_cached_gemm = cache(gemm)


def _call(
    name: str, programs: int, args: tuple[Any, ...], **constants: Any
) -> KernelLaunch:
    """Return a launch of a kernel of ``matmul_signals``."""
    from fxpar.fusion.kernels import matmul_signals

    return KernelLaunch(getattr(matmul_signals, name), programs, args, constants)


def _flag(name: str, flags: torch.Tensor, chunk: int) -> KernelLaunch:
    return _call(name, 1, (flags, chunk), num_warps=1)


def _meeting(provider: Provider, space: Workspace, title: str) -> KernelLaunch:
    """Return a launch by which all ranks' second streams wait for each other: one
    program on each."""
    number = region_number(hashlib.sha256(title.encode()).hexdigest(), title)
    args = space.signals, provider.rank
    how = {"RANKS": provider.ranks, "REGION": number, "num_warps": 1}
    return _call("meet", 1, args, **how)


_LOADED: set[Any] = set()


def _load(provider: Provider, *calls: KernelLaunch) -> None:
    """Compile and load kernels: a load after a kernel that waits would wait for it."""
    if provider.device.type == "cpu":
        return
    for call in calls:
        tensors = [x for x in call.args if isinstance(x, torch.Tensor)]
        kinds = tuple((x.dtype, x.data_ptr() % ALIGNED == 0) for x in tensors)
        constants = tuple(call.constants.items())
        key = call.function, constants, kinds, provider.device
        if key not in _LOADED:
            binary = call.function.warmup(
                *call.args, grid=(call.programs,), **call.constants
            )
            _torch.objects.load_kernel(binary)
            _LOADED.add(key)


# Both streams.

# Copies chunks; takes a function that raises a chunk's flag, and one that waits for it.
Copies = Callable[[Callable[[int], None], Callable[[int], None]], None]


def _overlap_copies(
    provider: Provider,
    meet: KernelLaunch,
    copies: Copies,
    multiply: KernelLaunch,
    flags: torch.Tensor,
    *,
    waits: bool,
) -> None:
    """Run a matmul overlapping with copies, until both are done. ``waits``: the matmul
    waits for the copies, and ranks meet before these; else the copies wait for the
    matmul, and ranks meet after them."""
    on = provider.overlap or _on_streams
    on(provider, meet, copies, multiply, flags, waits)


def _on_streams(
    provider: Provider,
    meet: KernelLaunch,
    copies: Copies,
    multiply: KernelLaunch,
    flags: torch.Tensor,
    waits: bool,
) -> None:
    """Run both on streams; the stream that waits is filled last. All tensors belong to
    the current stream, which the second one has joined when this returns: none needs to
    be recorded."""
    current, second = torch.cuda.current_stream(provider.device), provider.second()
    second.wait_stream(current)

    def up(chunk: int) -> None:
        if not _torch.distributed.write_on_stream(flags, chunk):
            _flag("raise_flag", flags, chunk)()

    def wait(chunk: int) -> None:
        _flag("await_flag", flags, chunk)()

    try:
        if not waits:
            multiply()
        with torch.cuda.stream(second):
            if waits:
                meet()
            copies(up, wait)
            if not waits:
                meet()
        if waits:
            multiply()
    finally:
        current.wait_stream(second)
