"""DTensor: placements, and what its ops do to shards."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

__all__ = ["Partial", "Replicate", "Shard"]


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement for a dim that more major axes of later mesh dims split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def brings_mesh(x: Any) -> bool:
    """Whether code that was compiled for ``x`` uses no mesh but the one that comes with
    its operands: not so of DTensors where (2.11) the mesh is kept with the code, whose
    process groups are those of the process that compiled it."""
    from torch.distributed.tensor import DTensor

    return not isinstance(x, DTensor) or "device_mesh" in x.__tensor_flatten__()[0]


@contextlib.contextmanager
def _left_to_dtensor(handlers: dict[Any, Any], op: Any) -> Iterator[None]:
    """Let DTensor's own handling of an op run inside, not the handler set for it."""
    handler = handlers.pop(op)
    try:
        yield
    finally:
        handlers[op] = handler


def on_random_op(draw: Callable[..., Any]) -> None:
    """Let ``draw(op, args, kwargs, shape, start)`` run random ops on DTensors on CPU.

    ``args[0]``: this rank's part, which begins at ``start`` of the global ``shape``.
    """
    from torch.distributed.tensor import _random
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.utils._python_dispatch import TorchDispatchMode

    class Draw(TorchDispatchMode):
        def __init__(self, more: dict[str, Any], *where: Any) -> None:
            super().__init__()
            self.more, self.where = more, where

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return draw(func, args, {**(kwargs or {}), **self.more}, *self.where)

    class Tracker(_random.OffsetBasedRNGTracker):
        def __init__(self) -> None:
            self._use_distribute_region = True
            if torch.cuda.is_available():
                self._device = torch.device("cuda", torch.cuda.current_device())
                self._device_handle = torch.cuda

        @contextlib.contextmanager
        def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[Any]:
            if spec.mesh.device_type != "cpu":
                with super()._distribute_region(spec, generator):
                    yield
                return
            _, start = compute_local_shape_and_global_offset(
                spec.shape, spec.mesh, spec.placements
            )
            with Draw({"generator": generator} if generator else {}, spec.shape, start):
                yield

    _random._rng_tracker = Tracker()


def reduce_before_item() -> None:
    """Let ``item()`` and ``bool()`` of a partial DTensor give the reduced value, where
    torch 2.13 gives this rank's summand (pytorch issue 166638): loops that end when no
    element is left, as in ``trunc_normal_``, must take as many rounds on every rank."""
    from torch.distributed.tensor import DTensor

    def item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        partial = any(placement.is_partial() for placement in x.placements)
        return op(x.full_tensor() if partial else x.to_local())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = item


def keep_nan_in_extremes() -> None:
    """Let a maximum or minimum of a DTensor be NaN where one of its elements is, as
    torch has it: of a NaN and a number from two ranks, backends take either, by which
    of them comes first."""

    def keeping_nan(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(reduce)
        def reduced(self: Any, x: torch.Tensor, *where: Any) -> torch.Tensor:
            value = reduce(self, x, *where)
            if self.reduce_op not in ("max", "min") or not x.is_floating_point():
                return value
            beyond = x.isnan().to(x.dtype) * (1 if self.reduce_op == "max" else -1)
            return value.masked_fill(reduce(self, beyond, *where) != 0, math.nan)

        return reduced

    partial: Any = Partial
    partial._reduce_value = keeping_nan(partial._reduce_value)
    partial._reduce_shard_value = keeping_nan(partial._reduce_shard_value)


def combine_with_plain_numbers() -> None:
    """Let a number that is a plain tensor with a gradient be added to a DTensor, or
    scale one, as a loss and a penalty on weights: its gradient is plain again. DTensor
    (2.13) gives a DTensor as gradient of both, which ops behind the number refuse."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def plain(gradient: Any) -> torch.Tensor:
        is_plain = not isinstance(gradient, DTensor)
        return gradient if is_plain else gradient.full_tensor()

    def combine(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args:
            is_plain = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
            if is_plain and x.dim() == 0 and x.requires_grad and x.grad_fn is not None:
                x.register_hook(plain)
        with _left_to_dtensor(handlers, op):
            return op(*args, **kwargs)

    aten = torch.ops.aten
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        handlers[op] = combine


def reduce_norms(norm: Callable[..., Any]) -> None:
    """Let ``norm(x, order, dims, keepdim, dtype)`` compute norms of DTensors; of lists
    of them those of infinite order, which ``_foreach_norm`` (2.13) refuses of empty
    shards on the ranks that have one, while others wait for these."""
    from torch.distributed.tensor import DTensor

    def vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        defaults = (2.0, None, False)
        x, order, dims, keepdim = (*args, *defaults[len(args) - 1 :])[:4]
        return norm(x, order, dims, keepdim, kwargs.get("dtype"))

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.linalg_vector_norm.default] = vector_norm

    def norms_of_list(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, order = (*args, 2.0)[:2]
        dtype = (*args, None, None)[2] or kwargs.get("dtype")
        if math.isinf(order):
            return [norm(x, order, None, False, dtype) for x in tensors]
        with _left_to_dtensor(handlers, op):
            return op(*args, **kwargs)

    handlers[torch.ops.aten._foreach_norm.Scalar] = norms_of_list


def put_by_masks() -> None:
    """Let ``x[mask] = number`` of DTensors that lie alike write to each rank's part, as
    Rprop does; DTensor (2.13) has it for whole tensors alone. Of a tensor without dims
    torch makes a plain index of the mask, the same on each rank."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def index_put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, (mask, *others), number, *accumulate = args
        if not others and number.numel() == 1 and _is_mask_of(mask, x):
            number = number.full_tensor() if isinstance(number, DTensor) else number
            mask = mask._local_tensor if isinstance(mask, DTensor) else mask
            op(x._local_tensor, [mask], number, *accumulate, **kwargs)
            return x
        with _left_to_dtensor(handlers, op):
            return op(*args, **kwargs)

    handlers[torch.ops.aten.index_put_.default] = index_put


def _is_mask_of(mask: Any, x: Any) -> bool:
    """Whether two DTensors are the elements of one and which of them are chosen, with
    the same part on each rank; or whether a plain index is of one that all ranks have
    whole."""
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        return False
    if not isinstance(mask, DTensor):
        return all(p.is_replicate() for p in x.placements)
    if mask.dtype != torch.bool or any(p.is_partial() for p in x.placements):
        return False
    lies, mask_lies = ((t.shape, t.device_mesh, t.placements) for t in (x, mask))
    return lies == mask_lies


def on_set_data(part_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Let ``x.data = y`` of a DTensor set that of its local tensor, ``part_of(x, y)``,
    where torch (2.13) sets that of the wrapper, which nothing reads."""
    from torch.distributed.tensor import DTensor

    inherited: Any = torch.Tensor.data

    def read(x: Any) -> torch.Tensor:
        data: torch.Tensor = inherited.__get__(x)
        return data

    def write(x: Any, y: torch.Tensor) -> None:
        x._local_tensor.data = part_of(x, y)

    DTensor.data = property(read, write)  # type: ignore[assignment]


def record_overflow(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    overflow: torch.Tensor,
) -> None:
    """Tell a scaler whether gradients were not finite, 1.0 or 0.0, for ``update()``."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {overflow.device: overflow}


def newton_schulz() -> Callable[..., Any]:
    """``iterate(gradient, *settings)``, by which ``torch.optim.Muon`` makes a matrix
    orthogonal."""
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz


def replace_newton_schulz(iterate: Callable[..., Any]) -> None:
    """Let ``torch.optim.Muon`` call this."""
    from torch.optim import _muon

    _muon._zeropower_via_newtonschulz = iterate
