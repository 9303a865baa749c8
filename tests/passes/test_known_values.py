"""Fake values of ops that are made of what was known, beside those that torch gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fxpar._fast import known_values
from fxpar._fast.known_values import result
from fxpar._torch.objects import memory_of
from fxpar.graph import custom_ops  # noqa: F401  (registers ops)
from tests.helpers.patched import needs_patches

pytestmark = needs_patches

aten, prims = torch.ops.aten, torch.ops.prims

Make = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    with mock.patch.dict(known_values._KNOWN, clear=True):
        yield


def maker(mode: Any) -> Make:
    """New values of a mode."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        device = "meta" if isinstance(mode, contextlib.nullcontext) else "cpu"
        with mode:
            return torch.empty(shape, dtype=dtype, device=device)

    return make


# Each gives a target, its arguments and keywords.
CALLS: dict[str, Callable[[Make], tuple[Any, ...]]] = {
    "pointwise": lambda new: (aten.mul.Tensor, (new(4, 6), new(6))),
    "dtypes": lambda new: (aten.add.Tensor, (new(4), new(4, dtype=torch.bfloat16))),
    "comparison": lambda new: (aten.gt.Scalar, (new(4, 6), 0)),
    "product": lambda new: (aten.mm.default, (new(4, 6), new(6, 8))),
    "view": lambda new: (aten.view.default, (new(4, 6), [2, 12])),
    "transposed": lambda new: (aten.t.default, (new(4, 6),)),
    "strided": lambda new: (aten.mm.default, (new(6, 4).t(), new(6, 8))),
    "expanded": lambda new: (aten.expand.default, (new(4, 1), [4, 6])),
    "slice": lambda new: (aten.slice.Tensor, (new(4, 6), 1, 2, 5)),
    "slice of a slice": lambda new: (aten.slice.Tensor, (new(4, 6)[:, 1:], 0, 1, 3)),
    "reshape": lambda new: (aten.reshape.default, (new(4, 6), [24])),
    "reshape that copies": lambda new: (aten.reshape.default, (new(4, 6).t(), [24])),
    "several": lambda new: (aten.split.Tensor, (new(4, 6), 2, 1)),
    "tuple": lambda new: (aten.var_mean.correction, (new(4, 6), [1])),
    "norm": lambda new: (
        aten.native_layer_norm.default,
        (new(4, 6), [6], new(6), None, 1e-5),
    ),
    "list": lambda new: (aten.cat.default, ([new(4, 6), new(4, 3)], 1)),
    "indices": lambda new: (
        aten.embedding.default,
        (new(8, 4), new(2, 3, dtype=torch.int64)),
    ),
    "kept layout": lambda new: (
        aten.clone.default,
        (new(4, 6).t(),),
        {"memory_format": torch.contiguous_format},
    ),
    "cast": lambda new: (
        prims.convert_element_type.default,
        (new(4, 6), torch.float64),
    ),
    "ours": lambda new: (
        torch.ops.fxpar.dot.default,
        (new(2, 3, 4), new(4, 5), "a b c, c d -> a b d"),
    ),
    "gather": lambda new: (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        (new(4, 6), 2, "group"),
    ),
}

MODES = {"fake": FakeTensorMode, "meta": contextlib.nullcontext}


def facts(x: Any) -> Any:
    """All that is to be alike."""
    if isinstance(x, (list, tuple)):
        return type(x), [facts(each) for each in x]
    assert isinstance(x, torch.Tensor)
    return (
        *(type(x), x.dtype, tuple(x.shape), x.stride(), x.storage_offset()),
        *(x.device, x.layout, x.requires_grad, x.is_conj(), x.is_neg()),
        *(x.untyped_storage().nbytes(), str(torch._C._dispatch_keys(x))),
    )


def memories(value: Any, args: Any) -> list[int | None]:
    """Of each result, the place of the operand whose memory it has."""
    several = value if isinstance(value, (list, tuple)) else [value]
    flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    places = [memory_of(x) for x in flat if isinstance(x, torch.Tensor)]
    ids = [memory_of(x) for x in several]
    return [places.index(i) if i in places else None for i in ids]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_a_known_value_is_as_torch_gives_it(call: str, mode: str) -> None:
    """On other operands of the same forms: theirs is the memory that views show."""
    on = MODES[mode]()
    target, args, kwargs = (*CALLS[call](maker(on)), {})[:3]
    with torch.no_grad():
        first = result(on, target, args, kwargs)
        target, args, kwargs = (*CALLS[call](maker(on)), {})[:3]
        known = result(on, target, args, kwargs)
        with on:
            want = target(*args, **kwargs)
    assert known is not first
    assert facts(known) == facts(want)
    assert memories(known, args) == memories(want, args)


def test_a_mode_that_is_on_gets_no_values_of_another() -> None:
    one, other = FakeTensorMode(), FakeTensorMode()
    x = maker(one)(4)
    result(one, aten.sin.default, (x,), {})
    y = maker(other)(4)
    with one:
        value = result(other, aten.sin.default, (y,), {})
    assert value.fake_mode is other


def test_slices_of_one_width_differ_by_where_they_begin() -> None:
    """So does what is made of them, and a view that says where it is."""
    mode = FakeTensorMode()
    row = maker(mode)(2, 40)
    with mode:
        row = row[:, 4:]
    for begin in range(36):
        args = row, 1, begin, min(begin + 6, 36)
        piece = result(mode, aten.slice.Tensor, args, {})
        with mode:
            assert facts(piece) == facts(aten.slice.Tensor(*args))
        assert memory_of(piece) == memory_of(row)
        again = result(mode, aten.slice.Tensor, args, {})
        line = result(mode, aten.select.int, (piece, 0, 0), {})
        shaped = result(mode, aten.unsqueeze.default, (piece, 0), {})
        with mode:
            assert facts(shaped) == facts(piece.unsqueeze(0))
            assert facts(line) == facts(piece[0])
        assert facts(again) == facts(piece)
    strided = aten.as_strided.default
    for begin in (1, 2):
        piece = result(mode, aten.slice.Tensor, (row, 1, begin, begin + 6), {})
        value = result(mode, strided, (piece, [2], [1], 3), {})
        assert value.storage_offset() == 3


@pytest.mark.parametrize("shape", [[2, 3], [6], [1, 6], [2, 1, 3], [2, -1]])
def test_pieces_of_rows_of_any_length(shape: list[int]) -> None:
    """A reshape of one may be known of a shorter row."""
    mode = FakeTensorMode()
    for length in (40, 60, 80):
        row = maker(mode)(1, length)
        piece = result(mode, aten.slice.Tensor, (row, 1, 6, 12), {})
        value = result(mode, aten.reshape.default, (piece, shape), {})
        with mode:
            assert facts(value) == facts(aten.reshape.default(piece, shape))
        assert memory_of(value) == memory_of(row)


def test_what_is_unlike_is_asked_for() -> None:
    """Equal numbers of two types, other defaults, and other shapes."""
    mode = FakeTensorMode()
    x = maker(mode)(4, dtype=torch.int64)
    assert result(mode, aten.mul.Tensor, (x, 2), {}).dtype == torch.int64
    assert result(mode, aten.mul.Tensor, (x, 2.0), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert result(mode, aten.mul.Tensor, (x, 2.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert result(mode, aten.neg.default, (maker(mode)(5),), {}).shape == (5,)


def test_gradients_are_asked_for() -> None:
    """A value with a history is not made of what one without has."""
    mode = FakeTensorMode()
    x = maker(mode)(4)
    result(mode, aten.sin.default, (x,), {})
    grown = maker(mode)(4).requires_grad_()
    for _ in range(2):
        assert result(mode, aten.sin.default, (grown,), {}).requires_grad


def test_memory_that_operands_do_not_tell_is_asked_for() -> None:
    """Of two operands in one memory, a form does not say whose a result has."""
    mode = FakeTensorMode()
    x = maker(mode)(4)
    with mode:
        other = x.view(4)
    view_as = aten.view_as.default
    for _ in range(2):
        value = result(mode, view_as, (x, other), {})
        assert memory_of(value) == memory_of(x)


def test_writes_are_asked_for() -> None:
    mode = FakeTensorMode()
    for _ in range(2):
        x = maker(mode)(4)
        assert result(mode, aten.add_.Tensor, (x, 1), {}) is x


def test_open_sizes_are_asked_for() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(4, 6))
    assert x._has_symbolic_sizes_strides
    for _ in range(2):
        assert result(mode, aten.sin.default, (x,), {}).shape == x.shape


def test_ops_of_users_are_asked_for() -> None:
    """Their fakes may look at anything."""
    sizes = iter((3, 5))
    with torch.library._scoped_library("known_values", "FRAGMENT") as library:
        library.define("grow(Tensor x) -> Tensor")
        name = "known_values::grow"
        fake = torch.library.register_fake(name, lib=library)
        fake(lambda x: x.new_empty(next(sizes)))
        mode = FakeTensorMode()
        x = maker(mode)(4)
        target = torch.ops.known_values.grow.default
        values = [result(mode, target, (x,), {}) for _ in range(2)]
    assert [len(value) for value in values] == [3, 5]


def test_what_is_known_does_not_grow_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_values, "MOST", 8)
    mode = FakeTensorMode()
    for n in range(20):
        result(mode, aten.sin.default, (maker(mode)(n + 1),), {})
    assert len(known_values._KNOWN) <= 8


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_every_mode_knows_its_values(call: str, grad: bool) -> None:
    """Whoever asks, with gradients or without."""
    mode = FakeTensorMode()

    def operands() -> tuple[Any, Any, Any]:
        target, args, kwargs = (*CALLS[call](maker(mode)), {})[:3]
        flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
        for x in flat:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf:
                x.requires_grad_(grad)
        return target, args, kwargs

    target, args, kwargs = operands()
    with mode:
        want = target(*args, **kwargs)
    homes = memories(want, args)
    with known_values.values_known(), known_values.values_known():
        target, args, kwargs = operands()
        with mode:
            target(*args, **kwargs)
        target, args, kwargs = operands()
        with mode:
            known = target(*args, **kwargs)
    assert facts(known) == facts(want)
    assert memories(known, args) == homes
    assert not hasattr(FakeTensorMode.dispatch, "fxpar")


def test_what_a_mode_knows_has_no_gradient_outside_of_it() -> None:
    """Where autograd has no part in an op any more, its result asks for none."""
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 6).requires_grad_()
    with known_values.values_known(), mode:
        assert aten.mul.Tensor(x, x).requires_grad
        assert result(mode, aten.mul.Tensor, (x, x), {}).requires_grad
        assert aten.mul.Tensor(x, x).requires_grad
