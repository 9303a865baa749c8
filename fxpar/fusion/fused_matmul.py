"""Implements ``overlap(..., fused=1)``: a product and its collective as one op.

In: a gather along a dim that products do not sum over, whose rows they read, with any
shape of the dims before the last; or a product whose rows a reduce-scatter takes in
that way. Out: ``fxpar::gather_matmul`` or ``fxpar::matmul_scatter`` in their place.
Never chosen automatically: the seconds of these ops are not in the cost model.

On GPUs that share memory they are kernels with signals where these are predicted to be
faster, else PyTorch's ops of asynchronous tensor parallelism
(``symm_mem::fused_all_gather_matmul``, ``symm_mem::fused_matmul_reduce_scatter``), and
elsewhere the two ops one after the other. The decision follows from shapes, dtype, the
group, and figures of its devices on which all ranks agree, so that all ranks decide the
same. On CPU it takes a provider that was installed for the group
(``run_fused.install``) and Triton as an interpreter.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import DeviceError
from fxpar.fusion.kernels import matmul_run, run_fused, run_kernels
from fxpar.fusion.kernels.implementations import Rung
from fxpar.fusion.kernels.kernel_worth import never, profitable
from fxpar.fusion.kernels.matmul_kernel import check
from fxpar.fusion.kernels.reductions import CannotEmit
from fxpar.fusion.kernels.symmetric_memory import FREE, Meeting, Provider, Unshared
from fxpar.fusion.node_legality import arrange
from fxpar.fusion.schedule_edit import Edit, refuse
from fxpar.graph import collective_nodes
from fxpar.graph.builder import Builder
from fxpar.graph.custom_ops import JOINED, group_name
from fxpar.sharding.cost import hardware_table
from fxpar.sharding.op_facts import op_facts_of

aten = torch.ops.aten
ours = torch.ops.fxpar

_SUMS = ("sum", "avg")


def gather_first(edit: Edit, gather: fx.Node, ends: tuple[fx.Node, ...]) -> Any:
    """Put a gather and the products ``ends`` into one op. Return the products."""
    args: Any = gather.args
    x, dim = args[0], args[1]
    if dim == x.meta["val"].dim() - 1:
        raise refuse("overlap", gather, "gathers the dim that a product sums over")
    weights = [_weight(end, gather) for end in ends]
    with edit.before(max(ends).next) as build:
        fused = _call(edit, build, gather, ours.gather_matmul.default, x, weights, dim)
        whole = build.call(operator.getitem, fused, 0)
        products = [
            _shaped(build, build.call(operator.getitem, fused, i + 1), end)
            for i, end in enumerate(ends)
        ]
    for end, product in zip(ends, products, strict=True):
        edit.swap(end, product)
    edit.swap(gather, whole)
    arrange(edit.graph)
    return products


def reduce_last(edit: Edit, starts: tuple[fx.Node, ...], reduced: fx.Node) -> Any:
    """Put a product and its reduce-scatter into one op. Return the result of each
    rank."""
    args: Any = reduced.args
    source, dim, op = args[0], args[1], args[2]
    product = _before_reshapes(source)
    shape = list(source.meta["val"].shape)
    if starts != (product,) or product.target is not aten.mm.default:
        why = "does not reduce the rows of a product of two matrices"
        raise refuse("overlap", reduced, why)
    if op not in _SUMS or dim == len(shape) - 1:
        raise refuse("overlap", reduced, f"is a {op} along dim {dim} of {len(shape)}")
    chain, read_too = source, "is read by others too"
    while chain is not product.args[0]:
        if len(chain.users) > 1:
            raise refuse("overlap", chain, read_too)
        if chain is product:
            break
        chain = chain.all_input_nodes[0]
    x, w = product.args
    with edit.before(reduced) as build:
        rows = [*shape[:-1], x.meta["val"].shape[1]]
        x = build.call(aten.reshape.default, x, rows)
        fused = _call(edit, build, reduced, ours.matmul_scatter.default, x, w, op, dim)
    edit.swap(reduced, fused)
    return [fused]


def _call(edit: Edit, build: Builder, node: fx.Node, target: Any, *args: Any) -> Any:
    axes = collective_nodes.axes_of(node)
    if edit.mesh.ordered(axes) != tuple(axes):
        raise refuse("overlap", node, f"has its axes in another order than {edit.mesh}")
    return build.call(target, *args, edit.mesh.count(axes), group_name(edit.mesh, axes))


def _before_reshapes(node: fx.Node) -> Any:
    """Return the value before reshapes that keep the last dim: the same rows, in
    order."""
    while op_facts_of(node.target).reshapes:
        source = node.all_input_nodes[0]
        if node.meta["val"].shape[-1:] != source.meta["val"].shape[-1:]:
            break
        node = source
    return node


def _weight(end: fx.Node, gather: fx.Node) -> Any:
    """Return the matrix that a product multiplies the gathered value with."""
    args: Any = end.args
    if end.target is not aten.mm.default or _before_reshapes(args[0]) is not gather:
        raise refuse(
            "overlap", end, f"is no product of the rows of {gather.name} with a matrix"
        )
    if _is_computed_from(args[1], gather):
        raise refuse("overlap", end, f"has {gather.name} on both sides")
    return args[1]


def _is_computed_from(node: fx.Node, on: fx.Node) -> bool:
    seen, pending = set[fx.Node](), [node]
    while pending:
        at = pending.pop()
        if at is on:
            return True
        if at not in seen and at > on:
            seen.add(at)
            pending += at.all_input_nodes
    return False


def _shaped(build: Builder, product: fx.Node, like: fx.Node) -> fx.Node:
    return build.call(aten.reshape.default, product, list(like.meta["val"].shape))


log = logging.getLogger("fxpar")

# The only dtype for which the speed of our kernels is known: its products have matrix
# units.
_DTYPE = "bfloat16"


def gather(
    x: torch.Tensor, ws: Sequence[torch.Tensor], dim: int, count: int, group: str
) -> list[torch.Tensor] | None:
    """Run ``fxpar::gather_matmul`` as a kernel; None if it must run otherwise."""
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
        log.debug("an all-gather and its matmul are not fused: %s", error)
        return None
    shape = [count * rows.shape[0], *rows.shape[1:-1]]
    return [_back(y, shape, dim) for y in (whole, *products)]


def scatter(
    x: torch.Tensor, w: torch.Tensor, op: str, dim: int, count: int, group: str
) -> torch.Tensor | None:
    """Run ``fxpar::matmul_scatter`` as a kernel; None if it must run otherwise."""
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
        log.debug("a matmul and its reduce-scatter are not fused: %s", error)
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
    """Return the memory that kernels with signals share; None if they do not run this.
    ``problem``: the kind, m, n, k, ranks, and columns of further weights."""
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
    """Return how GPUs that share memory run a matmul [m, k] times [k, n] with its
    collective: "signals", or "chunks", PyTorch's fused ops. ``further``: columns of
    further weights; ``name``: of the hardware (``lookup``)."""
    verdict = profitable(
        kind,
        m,
        n,
        k,
        ranks,
        hardware_table.lookup(name),
        dtype=dtype,
        programs=programs,
        units=programs + FREE,
        further=further,
    )
    rung = Rung("signals" if verdict.pays else "chunks", verdict.why)
    text = "%s and matmul [%d, %d] times [%d, %d] on %d ranks: %s: %s"
    log.debug(text, kind, m, k, k, n + further, ranks, rung.name, rung.why)
    return rung


# Keyed by process group, not by name: a later group of the same name may have other
# devices.
_HARDWARE: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _hardware_of(group: str) -> str:
    """Return the name of the hardware of all ranks of a group; "" where it is not
    known, or differs. All ranks call this once for a group."""
    process_group = _torch.distributed.group_named(group)
    if process_group not in _HARDWARE:
        try:
            name = hardware_table.detect().name
        except DeviceError:
            name = "unknown"
        store, rank, ranks = _torch.distributed.group_store(group)
        meeting = Meeting.of(store, rank, ranks, f"fxpar/{group}/hardware")
        one = set(meeting.words_of_all(name)) == {name} and name != "unknown"
        _HARDWARE[process_group] = name if one else ""
    return _HARDWARE[process_group]
