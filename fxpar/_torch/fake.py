"""Makes and reads fake tensors, and trees of tensors.

In: tensors, real or fake, or a tree. Out: fake tensors, modes, leaves. Never: reads the
data of a tensor.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from fxpar._torch.symbols import hint_shape

tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten


def is_data_dependent(x: Any) -> bool:
    """Return whether the shape of a fake tensor, or a symbolic number, is known only
    once it is computed."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(x, torch.Tensor):
        return bool(free_unbacked_symbols(x))
    if not x._has_symbolic_sizes_strides:
        return False
    return any(map(free_unbacked_symbols, (*x.shape, *x.stride())))


def has_open_offset(x: torch.Tensor) -> bool:
    """Return whether the offset of a fake tensor in its memory is known only once
    computed."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(x.storage_offset()))


def fake_mode_of(values: Any) -> Any:
    """Return the FakeTensorMode of some fake values, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def mode_of(values: Any) -> Any:
    """Return the mode in which ops on the values of a graph are traced: their
    FakeTensorMode, or None; for values on the meta device, on which ops compute shapes
    without a mode, a context that does nothing."""
    if any(type(value) is torch.Tensor and value.is_meta for value in values):
        return contextlib.nullcontext()
    return fake_mode_of(values)


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Keep torch from logging an op that fails on fake tensors, 30 lines before the
    error that is raised anyway. It logs that if the user asks for logs."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    is_debugged = os.environ.get("FXPAR_DEBUG", "0") != "0"
    if is_debugged or os.environ.get("TORCH_LOGS") or log.isEnabledFor(logging.INFO):
        yield
        return

    def keeps(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    log.addFilter(keeps)
    try:
        yield
    finally:
        log.removeFilter(keeps)


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Let ops on values of the meta device give such values, whatever mode is on."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        yield


def new_fake_mode(*, symbols: bool = False, scalars: bool = False) -> Any:
    """Return a FakeTensorMode for tracing with static shapes. ``symbols``: it can make
    symbols, which ``while_loop`` (2.13) asks for; ``scalars``: also for values in a
    tensor, as Inductor needs to lower loops. All inputs must then be fakes already."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not symbols:
        return FakeTensorMode(allow_non_fake_inputs=True)
    shape_env = ShapeEnv(
        allow_scalar_outputs=scalars, allow_dynamic_output_shape_ops=False
    )
    return FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True
    )


def as_fake(x: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return a detached fake of ``x`` in ``mode``; a fake of that mode stays itself.

    A tensor on the meta device is traced as on the CPU: for a cross entropy there the
    joint graph (2.13) has no gradients.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    x = x.detach()
    if x.device.type == "meta":
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, FakeTensor) and x.fake_mode is mode:
        return x
    with mode:
        return mode.from_tensor(x)


def fake_like(x: torch.Tensor, shape: tuple[int, ...], mode: Any) -> torch.Tensor:
    """Return a fake tensor like ``x`` in another shape, contiguous."""
    with mode:
        empty = torch.empty(shape, dtype=x.dtype, device=x.device)
    return empty.requires_grad_(x.requires_grad)


def can_have_symbols(mode: Any) -> bool:
    """Return whether sizes of fake tensors of a mode may be symbols."""
    return getattr(mode, "shape_env", None) is not None


def resized(value: torch.Tensor, shape: Sequence[int], mode: Any) -> Any:
    """Return a fake tensor of another shape, with the dim order of ``value``."""
    if tuple(value.shape) == tuple(shape):
        return value
    strides = hint_shape(value.stride())
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    stride = [0] * value.dim()
    step = 1
    for d in reversed(order):
        stride[d] = step
        step *= torch.sym_max(shape[d], 1)
    with mode:
        local = torch.empty_strided(
            shape, stride, dtype=value.dtype, device=value.device
        )
    return local.requires_grad_(value.requires_grad) if value.requires_grad else local


def new_fake(mode: Any, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``FakeTensor(mode, meta, device)`` in a sixth of its time: the constructor
    sets twenty attributes, each through a descriptor, that are the same for all
    tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    attributes = _ATTRIBUTES.get(device)
    if attributes is None or meta.requires_grad:
        fake = FakeTensor(mode, meta, device)
        if fake.fake_device == device and device.type != "meta":
            _ATTRIBUTES[device] = dict(vars(fake), fake_mode=None)
        return fake
    fake = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    for name, value in attributes.items():
        object.__setattr__(fake, name, value)  # a dict of its own would be larger
    fake.fake_mode = mode
    return fake


# The attributes of new fake tensors, by device; without their mode.
_ATTRIBUTES: dict[torch.device, dict[str, Any]] = {}
