"""Global values as one part per rank, and back: in one process, without communication.

A spec says which part a rank holds. Ranks that hold the same part share the object.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fxpar.passes.simulate.emulate_collectives import (
    reduced,
)
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.reshard.steps import MASKED
from fxpar.sharding.spec import Spec


def scatter(x: torch.Tensor, spec: Spec, mesh: Mesh) -> list[torch.Tensor]:
    """Each rank's part of a global value. Ranks with the same part share the object.

    Along a partial axis the first rank has the value and the others the identity of the
    reduction; for avg, max and min all have the value.
    """
    masking = [(axis, op) for axis, op in spec.partial if op in MASKED]
    parts_by_key: dict[Any, torch.Tensor] = {}
    out = []
    for rank in range(mesh.size):
        shard = tuple(mesh.index(rank, axes) for axes in spec.dims)
        masked = next((op for axis, op in masking if mesh.index(rank, [axis])), "")
        key = shard, masked
        if key not in parts_by_key:
            slices = spec.slices(mesh, x.shape, rank)
            part = x[slices]
            part = x if part.shape == x.shape else part.clone()
            if masked:
                part = torch.full_like(part, int(masked == "product"))
            parts_by_key[key] = part
        out.append(parts_by_key[key])
    return out


def gather(parts: Sequence[Any], spec: Spec, mesh: Mesh) -> Any:
    """The global value of one part per rank, partial ones reduced.

    Raises AssertionError unless ranks that hold the same shard agree exactly (NaN
    equals NaN).
    """
    if not isinstance(parts[0], torch.Tensor):
        if any(part != parts[0] for part in parts):
            raise AssertionError(f"ranks disagree: {list(parts)}")
        return parts[0]
    owners: dict[Any, tuple[int, torch.Tensor]] = {}
    shards: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for rank, part in enumerate(parts):
        shard = tuple(mesh.index(rank, axes) for axes in spec.dims)
        summand = tuple(mesh.index(rank, [axis]) for axis in spec.partial_axes)
        first, expected = owners.setdefault((shard, summand), (rank, part))
        if not _same(expected, part):
            raise AssertionError(
                f"ranks {first} and {rank} hold the same shard {shard} of {spec} on "
                f"mesh {mesh}, but differ: {_difference(expected, part)}"
            )
        shards.setdefault(shard, {})[summand] = expected
    reduced_shards = {
        shard: _reduced(summands, spec) for shard, summands in shards.items()
    }
    if len(reduced_shards) == 1:
        return next(iter(reduced_shards.values()))
    return _joined(reduced_shards)


def _joined(shards: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """Shards by their places, put together; ranks may hold more or less of a dim."""
    sample = next(iter(shards.values()))
    slices: list[list[slice]] = []
    for d in range(sample.dim()):
        sizes = {place[d]: part.shape[d] for place, part in shards.items()}
        ends = list(itertools.accumulate(sizes[i] for i in sorted(sizes)))
        starts = zip([0, *ends], ends, strict=False)
        slices.append([slice(start, end) for start, end in starts])
    out = sample.new_empty([cuts[-1].stop for cuts in slices])
    for place, part in shards.items():
        out[tuple(cuts[i] for i, cuts in zip(place, slices, strict=True))] = part
    return out


def _reduced(summands: dict[tuple[int, ...], torch.Tensor], spec: Spec) -> torch.Tensor:
    """Reduce over partial axes, the last first. Keys: position along each."""
    for _, op in reversed(spec.partial):
        lines: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key in sorted(summands):
            lines.setdefault(key[:-1], []).append(summands[key])
        summands = {key: reduced(values, op) for key, values in lines.items()}
    return summands[()]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
