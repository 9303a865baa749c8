"""Buffers that code in no graph writes to without a gradient, in local mode.

Where there is a gradient the end of the backward makes buffers those of rank 0
(``runtime.ranks.reduce_gradients``). Without one, as in ``update_bn``, each rank keeps
what its own part of the batch gave, which is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from fxpar._torch.objects import TensorVersion
from fxpar.errors import FxparWarning, compose


def versions_by_name(
    roots: Mapping[str, nn.Module], graph_inputs: Collection[int]
) -> dict[str, TensorVersion]:
    """Buffers as they are, to be compared later. ``graph_inputs``: ids of those that
    graphs take, and so write alike on all ranks."""
    buffers = _buffers_in(roots, graph_inputs)
    return {name: TensorVersion.of(x) for name, x in buffers}


def written_since(
    before: Mapping[str, TensorVersion],
    roots: Mapping[str, nn.Module],
    graph_inputs: Collection[int],
) -> list[str]:
    """Names of buffers that may have been written or replaced since."""
    norms = {  # which (2.13) write unseen by versions
        name
        for name, owner in _modules_in(roots)
        if owner.training and getattr(owner, "track_running_stats", False)
    }
    return [
        name
        for name, x in _buffers_in(roots, graph_inputs)
        if (name in before and not before[name].stands(x))
        or name.rpartition(".")[0] in norms
    ]


def say_written(names: list[str]) -> None:
    """Warn of such buffers, on rank 0."""
    if dist.get_rank() != 0:
        return
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    text = compose(
        f"code in no graph wrote to buffer {names[0]}{more} without a gradient: each "
        "rank has what its own part of the batch gives",
        fix="average it over the ranks (dist.all_reduce), or feed every rank the whole "
        "batch there",
    )
    warnings.warn(text, FxparWarning, stacklevel=2)


def _buffers_in(
    roots: Mapping[str, nn.Module], graph_inputs: Collection[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in _modules_in(roots):
        for name, x in owner.named_buffers(recurse=False):
            counts = x.is_floating_point() and not x.is_inference()
            if counts and id(x) not in graph_inputs:
                yield f"{prefix}.{name}" if prefix else name, x


def _modules_in(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, root in roots.items():
        yield from root.named_modules(prefix=prefix)
