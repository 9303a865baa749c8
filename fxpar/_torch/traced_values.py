"""Makes and reads tensors that stand for nodes while a graph is traced.

A value is a fake tensor, or functionalization's tensor around one where ops are made
functional; it may be the part of a DTensor. Its node is that of the fake tensor. In:
values and nodes. Out: values and nodes. Never: computes on real data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxpar._torch.fake import new_fake


def alias_of(x: Any) -> Any:
    """Return a fake tensor of the same memory."""
    return fake_on(x.untyped_storage(), x)


def fake_on(storage: Any, x: Any) -> Any:
    """Return a fake tensor like ``x`` on some memory."""
    meta = torch.empty(0, dtype=x.dtype, device="meta")
    meta.set_(storage, x.storage_offset(), x.shape, x.stride())
    return new_fake(x.fake_mode, meta, x.fake_device)


def fake_like(x: Any) -> tuple[Any, Any]:
    """Return a fake tensor like ``x`` on memory of its own, as large, and the
    memory."""
    shape, stride, size = x.shape, x.stride(), x.untyped_storage().nbytes()
    meta = torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")
    own = meta.untyped_storage()
    if own.nbytes() != size or x.storage_offset():
        own = torch.UntypedStorage(size, device="meta")
        return fake_on(own, x), own
    return new_fake(x.fake_mode, meta, x.fake_device), own


def is_plain(x: Any) -> bool:
    """Return whether a value is no tensor, or a strided one of known sizes and
    strides."""
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided or x.is_complex() or x.is_quantized:
            return False
        return all(type(n) is int for n in (*x.shape, *x.stride(), x.storage_offset()))
    return x is None or isinstance(x, (int, float, bool))


@contextlib.contextmanager
def untraced() -> Iterator[Any]:
    """Trace nothing that is done to tensors inside; yield the function that makes a
    fake tensor a value."""
    from torch._subclasses.functional_tensor import PythonFunctionalizeAPI
    from torch.utils._python_dispatch import _disable_current_modes

    mode = functional_mode()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield (
            (lambda x: x) if mode is None else PythonFunctionalizeAPI(mode).wrap_tensors
        )


def functional_mode() -> Any:
    """Return the mode that makes ops functional; None where there is none."""
    from torch.utils._python_dispatch import _detect_infra_mode

    return _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def modes() -> tuple[Any, ...]:
    """Return what the meaning of ops depends on in addition to their operands; first
    whether autograd records."""
    sdp = torch.backends.cuda
    autocast = (
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_cache_enabled(),
        *autocast,
        *(sdp.flash_sdp_enabled(), sdp.math_sdp_enabled()),
        *(sdp.mem_efficient_sdp_enabled(), sdp.cudnn_sdp_enabled()),
    )


def tokens() -> dict[Any, Any]:
    """Return the tokens of the effects that were kept in order so far."""
    mode = functional_mode()
    return {} if mode is None else dict(mode._tokens)


def tracer() -> Any:
    """Return the tracer that makes nodes of ops; None where there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def is_value(x: Any) -> bool:
    """Return whether ``x`` is a fake tensor, functional where functionalization is
    on."""
    from torch._subclasses.fake_tensor import FakeTensor

    if functional_mode() is not None:
        return is_functional(x)
    return type(x) is FakeTensor


def is_functional(x: Any) -> bool:
    """Return whether ``x`` is a tensor of functionalization."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return type(x) is FunctionalTensor


def part_of(x: Any) -> Any:
    """Return the one tensor that a DTensor holds; another value as it is."""
    from torch.distributed.tensor import DTensor

    return x._local_tensor if isinstance(x, DTensor) else x


def layout_of(x: Any) -> Any:
    """Return the placements and the mesh of a DTensor; None for another value."""
    return None if part_of(x) is x else (x.placements, x.device_mesh)


def around(part: Any, like: Any) -> Any:
    """Return a DTensor that is laid out as ``like`` and holds ``part``; ``part`` itself
    if ``like`` is none."""
    if part is None or part_of(like) is like:
        return part
    names, context = like.__tensor_flatten__()
    inner = {name: getattr(like, name) for name in names} | {"_local_tensor": part}
    with untraced():
        return type(like).__tensor_unflatten__(
            inner, context, like.shape, like.stride()
        )


def fake_of(x: Any) -> Any:
    """Return the fake tensor that stands for a value now."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.from_functional(x) if is_functional(x) else x


def writes_to(x: Any) -> int:
    """Return how often a value, or one that shares its memory, was written to."""
    if is_functional(x):
        return torch._functionalize_mutation_counter(x.elem)
    return x._version


def form_of(x: Any) -> Any:
    """Return what of a value, except its elements, an op may change: storage, shape,
    strides and whether it requires grad."""
    moves = 0
    if is_functional(x):
        moves = torch._functionalize_storage_changed_counter(x.elem)
    return moves, tuple(x.shape), x.stride(), x.requires_grad


def write(x: Any, fake: Any) -> None:
    """Let a functional tensor stand for another fake tensor, as if an op had written
    that to it."""
    x.replace_(fake)
    x.commit_update()
    x.sync()


def node_of(x: Any, tracer: Any) -> fx.Node | None:
    """Return the node that a value stands for; None for a constant."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    slot = get_proxy_slot(fake_of(x), tracer, None)
    return None if slot is None else slot.proxy.node


def fake_for(node: fx.Node, tracer: Any) -> Any:
    """Return a fake tensor that stands for a node."""
    from torch.fx.experimental.proxy_tensor import _ProxyTensor, set_proxy_slot

    fake = alias_of(node.meta["val"])
    set_proxy_slot(fake, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))
    return fake


def value_of(node: fx.Node | None, tracer: Any) -> Any:
    """Return a value that stands for a node."""
    if node is None:
        return None
    with untraced() as value:
        return value(fake_for(node, tracer))


def last_number() -> int:
    """Return autograd's number of the last node so far."""
    from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

    return int(_get_sequence_nr()) - 1


def skip_numbers(count: int) -> None:
    """Let autograd number its next node as if it had numbered ``count`` more."""
    with untraced(), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = torch.empty(0).requires_grad_()
        for _ in range(count):
            x.view_as(x)
