"""Gives rules to ops that make tensors: constants, ranges and random numbers.

Every dim of a constant is a separate factor, free for its readers. A range counts by
position and a random op draws in order, so both are whole (a reader slices them, which
costs nothing), except where the random op counts by global index itself.
In: calls of these ops. Out: their rules.
Never: lets ranks draw other numbers than one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fxpar.sharding.factors import Rule
from fxpar.sharding.op_table import keeping, make, rows, words_of
from fxpar.sharding.ops.pointwise import broadcast, broadcast_two

Shape = Sequence[int]


def filled(shape: Shape, *_: Any, **__: Any) -> Rule:
    """Return the rule of one constant everywhere."""
    return make([], [words_of(shape)])


def fresh(x: torch.Tensor, shape: Shape, *_: Any, **__: Any) -> Rule:
    """Return the rule of a new tensor with the dtype and device of ``x``. Dims that
    both have are factors of both, so that ``x`` may have any layout."""
    result = words_of(shape)
    shared = dict(enumerate(zip(shape, result, strict=True)))
    shared = shared if x.ndim == len(shape) else {}
    operand = [
        shared[i][1] if i in shared and shared[i][0] == n else f"x{i}!"
        for i, n in enumerate(x.shape)
    ]
    return make([operand], [result])


def drawn(place: int, *args: Any, **_: Any) -> Rule:
    """Return the rule of random numbers drawn in order; argument ``place`` is the
    shape."""
    return make([], [words_of(args[place], range(len(args[place])))])


def drawn_like(x: torch.Tensor, *more: Any, **_: Any) -> Rule:
    """Return the rule of random numbers drawn in order, one per element of the
    operands."""
    tensors = [t for t in (x, *more) if isinstance(t, torch.Tensor)]
    operands = [words_of(t, range(t.ndim), f"x{i}") for i, t in enumerate(tensors)]
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    return make(operands, [words_of(shape, range(len(shape)))])


def multinomial(x: torch.Tensor, *_: Any, **__: Any) -> Rule:
    """Return the rule of categories drawn in order, from one distribution per row."""
    words = words_of(x, range(x.ndim))
    return make([words], [[*words[:-1], "_"]])


def dropout(x: torch.Tensor, p: float, train: bool | None) -> Rule:
    """Return the rule; nothing is drawn where nothing is dropped."""
    if train is False or p == 0:
        return broadcast_two(x)
    return keeping(x, range(x.ndim), 2)


def indexed(place: int, *args: Any, **_: Any) -> Rule:
    """Return the rule of random numbers that Inductor counts by index, from a seed that
    is a tensor; argument ``place`` is the shape."""
    return make([["_"] * args[place + 1].ndim], [words_of(args[place])])


# A result without dims; one whose dim counts.
_SCALAR, _RANGE = "->", "-> n!"

ROWS = {
    **rows(
        "full zeros empty.memory_format empty_strided prims::full prims::empty "
        "prims::empty_permuted prims::empty_strided",
        filled,
        shape=0,
        constant="filled",
    ),
    **rows(
        "full_like prims::full_like",
        broadcast,
        constant="filled",
    ),
    **rows("prims::fill", broadcast),
    **rows(
        "new_empty_strided",
        fresh,
        shape=1,
        constant="filled",
    ),
    **rows("scalar_tensor prims::scalar_tensor", _SCALAR, constant="filled"),
    **rows(
        "arange arange.start arange.start_step fft_fftfreq fft_rfftfreq prims::iota",
        _RANGE,
        constant="counted",
    ),
    **rows("randperm prims::inductor_seeds prims::inductor_rand_eager_offset", _RANGE),
    **rows(
        "rand rand.generator randn randn.generator prims::normal prims::uniform",
        partial(drawn, 0),
    ),
    **rows("randint randint.generator", partial(drawn, 1), work="draw"),
    **rows("randint.low randint.low_generator", partial(drawn, 2), work="draw"),
    **rows("normal.float_float", partial(drawn, 2)),
    **rows(
        "rand_like randn_like randint_like randint_like.low_dtype bernoulli "
        "bernoulli.p normal.Tensor_float poisson normal.Tensor_Tensor "
        "normal_functional exponential uniform cauchy geometric log_normal",
        drawn_like,
    ),
    **rows("random random.from random.to", drawn_like, work="draw"),
    **rows("normal.float_Tensor", lambda mean, std, **_: drawn_like(std)),
    **rows("multinomial", multinomial),
    **rows("native_dropout", dropout),
    **rows("prims::inductor_seed", _SCALAR),
    **rows("prims::inductor_lookup_seed", "n! ->", facts="random"),
    **rows(
        "prims::inductor_random",
        partial(indexed, 0),
        shape=0,
        work="draw",
        facts="random",
    ),
    **rows("prims::inductor_randint", partial(indexed, 2), shape=2, facts="random"),
    **rows("prims::inductor_rand_eager_offsets", "-> n! _"),
}
