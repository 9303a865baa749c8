"""Collectives on CPU that start late and finish late, to make races show.

Inside ``late_collectives()`` the functional collectives of compiled programs run other
kernels. What a collective gives holds NaN (or the least integer) until it is waited
for. The wait runs it: some collectives read their operand only then, some read it when
they start and write their result only then, as a seed says. So a program that reads a
result early, writes or reuses an operand early, or writes to a result that is under
way computes other numbers, each time. Operands that nobody else holds at the wait are
``freed``: memory that an allocator may have given away.

Ranks run collectives in the order in which they started them, as process groups do.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

c10d = torch.ops._c10d_functional

# (tensor to read, tensor to write, group): does the collective.
Run = Callable[[torch.Tensor, torch.Tensor, Any], None]


@dataclass(eq=False)
class _Pending:
    """``early``: what was read at the start; None if it is read at the wait."""

    name: str
    run: Run
    operand: torch.Tensor
    result: torch.Tensor
    group: str
    early: torch.Tensor | None
    in_place: bool


@dataclass
class Late:
    """What happened: ``started`` collectives, and ``faults`` seen at their waits."""

    seed: int
    pending: list[_Pending] = field(default_factory=list)
    started: int = 0
    faults: list[str] = field(default_factory=list)

    def launch(
        self,
        name: str,
        run: Run,
        operand: torch.Tensor,
        result: torch.Tensor,
        group: str,
    ) -> torch.Tensor:
        in_place = _place(operand) == _place(result)
        self.started += 1
        # The same on every rank, other for each collective.
        at_once = in_place or random.Random(self.seed + self.started).random() < 0.5
        early = operand.clone() if at_once else None
        result.fill_(_poison(result.dtype))
        # Of its own: whether anybody else still holds the operand can be told then.
        held = operand.detach()
        made = _Pending(name, run, held, result, group, early, in_place)
        self.pending.append(made)
        return result

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        found = [p for p in self.pending if _place(p.result) == _place(x)]
        if found:
            until = self.pending.index(found[-1])
            for pending in self.pending[: until + 1]:
                if pending.group == found[-1].group:
                    self._finish(pending)
                    self.pending.remove(pending)
        return x

    def _finish(self, pending: _Pending) -> None:
        result, operand = pending.result, pending.operand
        if not _is_poison(result):
            self.faults.append(f"{pending.name}: its result was written meanwhile")
        if not pending.in_place and _owners(operand) <= 1:
            self.faults.append(f"{pending.name}: its operand was freed meanwhile")
        read = operand if pending.early is None else pending.early
        group = distributed_c10d._resolve_process_group(pending.group)
        pending.run(read.contiguous(), result, group)


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _owners(x: torch.Tensor) -> int:
    """Tensors that hold the memory of ``x``, which is one of them."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


def _is_poison(x: torch.Tensor) -> bool:
    value = _poison(x.dtype)
    return bool((x != x).all()) if value != value else bool((x == value).all())


_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _reduce(op: str, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
    out.copy_(x.view_as(out))
    dist.all_reduce(out, _REDUCE[op], group=group)
    if op == "avg":
        out.div_(group.size())


def _gather(x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(out.view(-1), x.reshape(-1), group=group)


def _scatter(op: str, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
    whole = torch.empty_like(x)
    _reduce(op, x, whole, group)
    out.copy_(whole.chunk(group.size(), 0)[group.rank()])


def _exchange(
    receive: list[int], send: list[int], x: torch.Tensor, out: torch.Tensor, group: Any
) -> None:
    dist.all_to_all_single(out, x, receive, send, group=group)


def _broadcast(src: int, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
    out.copy_(x)
    dist.broadcast(out, dist.get_global_rank(group, src), group=group)


def _kernels(late: Late) -> dict[str, Callable[..., torch.Tensor]]:
    def rows(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.new_empty([n, *x.shape[1:]])

    def all_reduce(x, op, group):
        run = functools.partial(_reduce, op)
        return late.launch("all_reduce", run, x, empty(x), group)

    def all_reduce_(x, op, group):
        return late.launch("all_reduce_", functools.partial(_reduce, op), x, x, group)

    def all_gather_into_tensor(x, count, group):
        out = rows(x, (x.shape[0] if x.dim() else 1) * count)
        return late.launch("all_gather_into_tensor", _gather, x, out, group)

    def all_gather_into_tensor_out(x, count, group, *, out):
        return late.launch("all_gather_into_tensor_out", _gather, x, out, group)

    def reduce_scatter_tensor(x, op, count, group):
        run = functools.partial(_scatter, op)
        out = rows(x, x.shape[0] // count)
        return late.launch("reduce_scatter_tensor", run, x, out, group)

    def all_to_all_single(x, receive, send, group):
        run = functools.partial(_exchange, receive, send)
        return late.launch("all_to_all_single", run, x, rows(x, sum(receive)), group)

    def broadcast(x, src, group):
        run = functools.partial(_broadcast, src)
        return late.launch("broadcast", run, x, empty(x), group)

    def broadcast_(x, src, group):
        return late.launch(
            "broadcast_", functools.partial(_broadcast, src), x, x, group
        )

    def empty(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    made = (
        all_reduce,
        all_reduce_,
        all_gather_into_tensor,
        all_gather_into_tensor_out,
        reduce_scatter_tensor,
        all_to_all_single,
        broadcast,
        broadcast_,
    )
    return {fn.__name__: fn for fn in made} | {"wait_tensor": late.wait}


@contextlib.contextmanager
def late_collectives(seed: int = 0) -> Iterator[Late]:
    """Inside, functional collectives on CPU tensors start late and finish late."""
    late = Late(seed)
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in _kernels(late).items():
        library.impl(name, kernel, "CPU")
    try:
        yield late
    finally:
        library._destroy()
    late.faults += [f"{p.name}: nothing waited for it" for p in late.pending]
