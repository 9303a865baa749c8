"""Some elements of a tensor that stand for all, and which calls compare them."""

from __future__ import annotations

import functools

import torch

# Elements at most, in so many runs over the tensor.
_ELEMENTS, _RUNS = 1024, 16

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Calls between two of which elements are summed, which costs some tens of microseconds
# (or several launches): by no whole number, so that of graphs that are called in turn
# each has its part. The first calls all have sums on the CPU.
_APART, _FIRST = (11 + 5**0.5) / 2, 32


def sample_turn(number: int, *, on_cpu: bool) -> int | None:
    """How many calls before the one of this number had sums; None if it has none."""
    if on_cpu and number < _FIRST:
        return number
    turn = int(number / _APART)
    return turn + _FIRST if turn > int((number - 1) / _APART) else None


def sample(x: torch.Tensor, turn: int) -> torch.Tensor:
    """Some elements as a view, other ones at each turn, so that turns come to all; none
    of a tensor that is not dense in memory."""
    for dim, stride in enumerate(x.stride()):
        x = x if stride else x.narrow(dim, 0, min(x.shape[dim], 1))  # was expanded
    if x.is_conj() or x.is_neg() or not _is_dense(x):
        return x.new_empty(0)
    count = x.numel()
    if count <= _ELEMENTS:
        return x
    run, apart = _ELEMENTS // _RUNS, count // _RUNS
    last = count - (_RUNS - 1) * apart - run
    begin = min(turn % (-(-last // run) + 1) * run, last)
    return x.as_strided((_RUNS, run), (apart, 1), x.storage_offset() + begin)


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """The sum of elements read as whole numbers, each weighted by its place."""
    x = torch.view_as_real(x) if x.is_complex() else x
    bits = x.view(_WORDS[x.element_size()]).reshape(-1)
    return (bits * _weights(x.device)[: len(bits)]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 4 * _ELEMENTS, 2, device=device)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the elements, in any order, fill a piece of memory once."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# Relative difference of values that are equal but for rounding.
ALLOWED = 1e-3


def sketch(x: torch.Tensor) -> tuple[float, float]:
    """The norm of a tensor and its sum weighted by a wave, by which tensors are
    compared up to rounding."""
    flat = x.detach().to_dense().flatten().to(torch.float64)
    waves = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype).sin()
    return flat.norm().item(), flat.dot(waves).item()
