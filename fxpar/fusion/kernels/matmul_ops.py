"""``fxpar::gather_matmul`` and ``fxpar::matmul_scatter`` by kernels with signals.

In: what the ops are given (``passes.ops``). Out: their results, or None where other
ways run them: PyTorch's fused ops on GPUs that share memory, else the two parts. What
is decided follows from shapes, dtype, the group, and figures of its devices on which
all ranks agree, so that ranks decide alike. On CPU it takes a provider that was
installed for the group (``run_fused.install``) and Triton as an interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxpar import _torch
from fxpar.errors import DeviceError
from fxpar.fusion.kernels import matmul_run, run_fused, run_kernels
from fxpar.fusion.kernels.implementations import Rung
from fxpar.fusion.kernels.matmul_cost import never, profitable
from fxpar.fusion.kernels.matmul_kernel import check
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.symmetric_memory import FREE, Meeting, Provider, Unshared
from fxpar.passes.custom_ops import JOINED
from fxpar.sharding.cost import hardware_table

log = logging.getLogger("fxpar")

# The one whose products have matrix units: of others nothing says how fast ours are.
_DTYPE = "bfloat16"


def gather(
    x: torch.Tensor, ws: Sequence[torch.Tensor], dim: int, count: int, group: str
) -> list[torch.Tensor] | None:
    """``fxpar::gather_matmul``."""
    columns = sorted(w.shape[1] for w in ws)
    k = x.shape[-1]
    m = count * (x.numel() // max(k, 1))
    problem = "gather", m, columns[-1], k, count, sum(columns[:-1])
    provider = _provider(x, ws, problem, group)
    if provider is None:
        return None
    rows = x.movedim(dim, 0).contiguous()
    try:
        whole, products = matmul_run.gather_matmul(provider, rows.view(-1, k), ws)
    except Unshared as error:
        log.debug("a gather and its matmul run otherwise: %s", error)
        return None
    shape = [count * rows.shape[0], *rows.shape[1:-1]]
    return [_back(y, shape, dim) for y in (whole, *products)]


def scatter(
    x: torch.Tensor, w: torch.Tensor, op: str, dim: int, count: int, group: str
) -> torch.Tensor | None:
    """``fxpar::matmul_scatter``."""
    k = x.shape[-1]
    problem = "scatter", x.numel() // max(k, 1), w.shape[1], k, count, 0
    provider = _provider(x, [w], problem, group)
    if provider is None:
        return None
    rows = x.movedim(dim, 0).contiguous()
    mean = op == "avg"
    try:
        part = matmul_run.matmul_scatter(provider, rows.view(-1, k), w, mean=mean)
    except Unshared as error:
        log.debug("a matmul and its reduce-scatter run otherwise: %s", error)
        return None
    return _back(part, [rows.shape[0] // count, *rows.shape[1:-1]], dim)


JOINED.update(gather=gather, scatter=scatter)


def _back(rows: torch.Tensor, shape: Sequence[int], dim: int) -> torch.Tensor:
    return rows.view(*shape, rows.shape[-1]).movedim(0, dim).contiguous()


def _provider(
    x: torch.Tensor,
    ws: Sequence[torch.Tensor],
    problem: tuple[str, int, int, int, int, int],
    group: str,
) -> Provider | None:
    """What memory kernels with signals share, if they run this. ``problem``: the kind,
    m, n, k, ranks, and columns of further weights."""
    device, dtype = x.device, str(x.dtype).removeprefix("torch.")
    if not run_kernels.has_kernels(device) or any(w.dtype != x.dtype for w in ws):
        return None
    is_gpu = device.type == "cuda"
    if is_gpu and (dtype != _DTYPE or torch.cuda.is_current_stream_capturing()):
        return None  # a graph that is replayed would use the same half twice in a row
    if is_gpu and never(*problem[:-1], dtype):
        return None
    provider = run_fused.provider_of(group, device)
    if provider is None or provider.ranks != problem[4]:
        return None
    if is_gpu:
        name = _hardware_of(group)
        rung = rung_of(*problem, dtype, provider.programs, name) if name else None
        return provider if rung and rung.name == "signals" else None
    try:
        check(*problem[:-1], dtype)
    except CannotEmit:
        return None
    return provider


@cache
def rung_of(
    kind: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    further: int,
    dtype: str,
    programs: int,
    name: str,
) -> Rung:
    """How GPUs that share memory run a matmul [m, k] times [k, n] with its collective:
    "signals", or "chunks", PyTorch's fused ops. ``further``: columns of further
    weights; ``name``: of the hardware (``lookup``)."""
    hardware = hardware_table.lookup(name)
    top = hardware.peak(dtype)
    verdict = profitable(
        kind, m, n, k, ranks, hardware.levels[0].bandwidth, top.flops * top.efficiency,
        hardware.bandwidth, dtype=dtype, programs=programs, units=programs + FREE,
        further=further,
    )  # fmt: skip
    rung = Rung("signals" if verdict.pays else "chunks", verdict.why)
    text = "%s and matmul [%d, %d] times [%d, %d] on %d ranks: %s: %s"
    log.debug(text, kind, m, k, k, n + further, ranks, rung.name, rung.why)
    return rung


# Of process groups there are: a later one of the same name may have other devices.
_HARDWARE: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _hardware_of(group: str) -> str:
    """The name of what all ranks of a group run on; "" where it is not known, or not
    the same. Asked once, by all ranks."""
    process_group = _torch.distributed.group_named(group)
    if process_group not in _HARDWARE:
        try:
            name = hardware_table.detect().name
        except DeviceError:
            name = "unknown"
        store, rank, ranks = _torch.distributed.group_store(group)
        meeting = Meeting.of(store, rank, ranks, f"fxpar/{group}/hardware")
        one = set(meeting.told(name)) == {name} and name != "unknown"
        _HARDWARE[process_group] = name if one else ""
    return _HARDWARE[process_group]
