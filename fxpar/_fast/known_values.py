"""Remembers fake values of ops by the forms of their operands.

In: an op, its arguments and a fake mode. Out: the fake value that torch would give.
Layers that repeat ask for the same value again and again. torch caches values as well,
but asking it takes ten times as long as making a tensor of known form. A form is all
that is known of a value on static shapes, so a result is a function of the forms of the
operands, of the other arguments, and of torch's own settings: these are the key. Never:
remembers a value that depends on more (open sizes, ops of the user's, which may look at
anything, results that share memory in a way that operands do not show): torch is asked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fxpar._fast.switch import is_on, shortcut
from fxpar._torch.fake import new_fake
from fxpar._torch.objects import is_mutable, memory_of

aten = torch.ops.aten

# Namespaces of ops whose values depend on their arguments alone; _OTHERS are
# exceptions: they read tables of programs.
_NAMESPACES = ("aten", "prims", "_c10d_functional", "fxpar")
_OTHERS = ("fxpar::region", "fxpar::region_")

# Types of arguments that are part of a key; equal ones of two types differ.
_CONSTANTS = frozenset(
    (
        *(bool, int, float, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)

# Views whose offset from their operand does not depend on the operand's offset.
_RELATIVE = frozenset(
    (
        *(aten.slice.Tensor, aten.reshape.default, aten.view.default),
        *(aten.permute.default, aten.transpose.int, aten.t.default),
        *(aten.unsqueeze.default, aten.expand.default, aten.alias.default),
        *(aten.select.int, aten.squeeze.dim),
    )
)

# The context for a tensor that is made where no mode is on.
_ALONE: Any = contextlib.nullcontext()

# The number of keys that are kept; when it is reached, all are dropped.
MOST = 1 << 16


class _NotKnown(Exception):
    """Says that a value is of no form that is kept."""


@dataclass(frozen=True)
class _Form:
    """Is the form of a tensor on static shapes, without its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # strides of the dims, in elements
    offset: int  # in elements, from its operand's offset, or in its own memory
    device: torch.device  # the device that a fake value reports
    operand: int | None  # the operand whose memory it has; None: memory of its own


# Key -> the result of an op: a form, constants, or several of them in a tuple or list;
# None where torch is asked.
_KNOWN: dict[tuple[Any, ...], Any] = {}


def result(
    mode: Any,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return ``target(*args, **kwargs)`` on the fake values of a mode
    (``fake.mode_of``)."""

    def ask() -> Any:
        with mode:
            return target(*args, **kwargs)

    if not is_on():
        return ask()
    return _known(mode, target, args, kwargs, ask, is_inside=False)


@shortcut
@contextlib.contextmanager
def values_known() -> Iterator[None]:
    """Take known values inside for fake tensors of every mode, whoever asks for them.
    Does nothing if torch logs the ops that its modes run."""
    from torch._subclasses import fake_tensor as fakes

    kind = fakes.FakeTensorMode
    dispatch: Any = kind.dispatch
    if fakes.log.isEnabledFor(logging.DEBUG):
        yield
        return

    def known(
        self: Any, target: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}

        def ask() -> Any:
            return dispatch(self, target, types, args, kwargs)

        return _known(self, target, args, kwargs, ask, is_inside=True)

    with mock.patch.object(kind, "dispatch", known):
        yield


def _known(
    mode: Any,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ask: Callable[[], Any],
    *,
    is_inside: bool,
) -> Any:
    """Return the result of ``ask()``. ``is_inside``: called by the mode, where
    autograd has no part in it any more."""
    tensors: list[torch.Tensor] = []
    try:
        key = *_key(mode, target, args, kwargs, tensors), is_inside
    except _NotKnown:
        return ask()
    if key not in _KNOWN:
        value = ask()
        _keep(key, value, mode, tensors)
        return value
    form = _KNOWN[key]
    return ask() if form is None else _rebuilt(form, mode, tensors)


def _keep(key: Any, value: Any, mode: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Remember a value that torch gave."""
    if len(_KNOWN) >= MOST:
        _KNOWN.clear()
    try:
        _KNOWN[key] = _form(value, mode, tensors)
    except _NotKnown:
        _KNOWN[key] = None


def is_function(target: Any) -> bool:
    """Return whether values of an op depend on its arguments alone, and it changes
    none."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in _NAMESPACES or target.name() in _OTHERS:
        return False
    return not is_mutable(target)


def _key(
    mode: Any,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: list[torch.Tensor],
) -> tuple[Any, ...]:
    """Return a key that is equal for calls that give values of one form. ``tensors``:
    operands are added. Raises _NotKnown."""
    if not is_function(target):
        raise _NotKnown
    is_alone = mode is None or isinstance(mode, contextlib.nullcontext)
    parts: list[Any] = [target, is_alone, *_settings()]
    for arg in args:
        _add(arg, mode, parts, tensors)
    for name, arg in kwargs.items():
        parts.append(name)
        _add(arg, mode, parts, tensors)
    if target not in _RELATIVE:
        parts += [x.storage_offset() for x in tensors]
    return tuple(parts)


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that results of ops depend on."""
    return (
        torch.get_default_dtype(),
        torch._C._get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        # Whether Python kernels of ops come first, where there are some (as with open
        # sizes).
        torch._C._dispatch_tls_is_dispatch_key_included(
            torch._C.DispatchKey.PythonDispatcher
        ),
    )


def _add(arg: Any, mode: Any, parts: list[Any], tensors: list[torch.Tensor]) -> None:
    """Add the parts of a key for an argument. Raises _NotKnown."""
    if isinstance(arg, torch.Tensor):
        _check(arg, mode)
        tensors.append(arg)
        parts += (
            arg.dtype,
            arg.shape,
            arg.stride(),
            _device_of(arg),
            arg.requires_grad,
            torch._C._dispatch_keys(arg).raw_repr(),
        )
    elif isinstance(arg, (list, tuple)):
        parts.append((type(arg), len(arg)))
        for each in arg:
            _add(each, mode, parts, tensors)
    elif type(arg) in _CONSTANTS:
        parts += (type(arg), arg)
    else:
        raise _NotKnown


def _check(x: Any, mode: Any) -> None:
    """Raise _NotKnown unless a tensor is a plain value of a mode on static shapes."""
    if type(x) is fake_tensor():
        plain = x.fake_mode is mode and x.constant is None and x.real_tensor is None
    else:
        plain = type(x) is torch.Tensor and x.is_meta
        plain = plain and isinstance(mode, contextlib.nullcontext)
    if not plain or x._has_symbolic_sizes_strides or x.layout is not torch.strided:
        raise _NotKnown


@functools.cache
def fake_tensor() -> Any:
    """Return the class FakeTensor, which is imported late."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def _form(value: Any, mode: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the form of an op's result. Raises _NotKnown."""
    several: Any = value if type(value) in (list, tuple) else (value,)
    results = [x for x in several if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided for x in results):
        raise _NotKnown
    memory = [memory_of(x) for x in results]
    places = [memory_of(x) for x in tensors]
    own = [place for place in memory if place not in places]
    if len(set(own)) < len(own):
        raise _NotKnown
    forms = [_form_of(x, mode, tensors) for x in several]
    for x, form in zip(several, forms, strict=True):
        if isinstance(form, _Form) and not _is_same(x, _tensor(form, mode, tensors)):
            raise _NotKnown
    if several is not value:
        return forms[0]
    return forms if isinstance(value, list) else tuple(forms)


def _form_of(x: Any, mode: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the form of one value; ``tensors``: the operands. Raises _NotKnown."""
    if type(x) in (int, type(None)):
        return x
    if not isinstance(x, torch.Tensor):
        raise _NotKnown
    _check(x, mode)
    place, places = memory_of(x), [memory_of(y) for y in tensors]
    if places.count(place) > 1:
        raise _NotKnown  # forms do not say of which of them
    operand = places.index(place) if place in places else None
    shape, stride, offset = tuple(x.shape), x.stride(), int(x.storage_offset())
    if operand is not None:
        offset -= int(tensors[operand].storage_offset())
    return _Form(x.dtype, shape, stride, offset, _device_of(x), operand)


def _device_of(x: Any) -> torch.device:
    """Return the device of a tensor; of a fake one, which would ask its mode, the one
    it reports."""
    device: torch.device = x.device if type(x) is torch.Tensor else x.fake_device
    return device


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether a tensor that was made equals the one that torch gave, but for
    data."""
    return (
        torch._C._dispatch_keys(x) == torch._C._dispatch_keys(y)
        and x.requires_grad == y.requires_grad
        and x.storage_offset() == y.storage_offset()
        and x.untyped_storage().nbytes() == y.untyped_storage().nbytes()
        and x.is_conj() == y.is_conj()
        and x.is_neg() == y.is_neg()
    )


def _rebuilt(form: Any, mode: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return new values of known forms."""
    if isinstance(form, _Form):
        return _tensor(form, mode, tensors)
    if isinstance(form, (list, tuple)):
        return type(form)(_rebuilt(each, mode, tensors) for each in form)
    return form


def _tensor(form: _Form, mode: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new value of a form."""
    is_fake = not isinstance(mode, contextlib.nullcontext)
    is_inside = is_fake and torch._C._len_torch_dispatch_stack() > 0
    on_meta = torch._C._DisableTorchDispatch() if is_inside else _ALONE
    with on_meta:
        x = torch.empty_strided(
            form.shape, form.stride, dtype=form.dtype, device="meta"
        )
        if form.operand is not None:
            operand = tensors[form.operand]
            offset = int(operand.storage_offset()) + form.offset
            x.set_(operand.untyped_storage(), offset, form.shape, form.stride)
    return new_fake(mode, x, form.device) if is_fake else x
