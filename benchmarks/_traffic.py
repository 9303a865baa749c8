"""What a step sends and holds, counted alike for every library: by the profiler.

``watched(run)`` gives calls of the process group and their bytes by kind, and the most
that was held at one time beyond what was there before. Bytes are those of the larger of
a call's tensors, each rank's: what the plan calls ``Collective.bytes``.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Calls of a process group, as the profiler names them.
KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "permute",
    "recv_": "permute",
}

_SIZES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "int": 4,
    "long": 8,
    "long int": 8,
    "unsigned char": 1,
    "bool": 1,
}

# Up to so many bytes a call is a scalar's or a checksum's; listed apart.
SMALL = 4096


@dataclass(frozen=True)
class Watched:
    """``calls``: (kind, bytes) in order; ``peak``: bytes."""

    calls: tuple[tuple[str, int], ...]
    peak: int

    def figures(self) -> dict[str, Any]:
        large = [n for _, n in self.calls if n > SMALL]
        small = [n for _, n in self.calls if n <= SMALL]
        kinds = sorted({kind for kind, _ in self.calls})
        return {
            "collectives": len(large),
            "bytes": sum(large),
            "moved": sum(_SHARE[kind] * n for kind, n in self.calls),
            "small_collectives": len(small),
            "small_bytes": sum(small),
            "by_kind": {
                kind: [
                    sum(k == kind for k, _ in self.calls),
                    sum(n for k, n in self.calls if k == kind),
                ]
                for kind in kinds
            },
            "peak": self.peak,
        }


# A ring sends each byte of an all-reduce twice: reduced and gathered.
_SHARE = dict.fromkeys(KINDS.values(), 1) | {"all_reduce": 2}


def watched(run: Callable[[], Any]) -> Watched:
    """Of one call of ``run``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as profiled:
        run()
    memory = profiled.profiler.kineto_results.events()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return Watched(tuple(_calls(events)), _peak(memory))


def _peak(events: Any) -> int:
    """By the running sum of the allocator's own events, so that neither compiling nor
    Python counts."""
    allocated = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = most = 0
    for _, size in sorted(allocated, key=lambda event: event[0]):
        held += size
        most = max(most, held)
    return most


def _calls(events: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    operand = ""  # dtype of a functional collective's, which calls the group's
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        namespace, _, name = event.get("name", "").partition("::")
        if namespace == "_c10d_functional" and event["args"].get("Input type"):
            operand = event["args"]["Input type"][0]
        elif namespace == "c10d" and name in KINDS:
            sizes = list(_tensors(event["args"], operand))
            if sizes:
                yield KINDS[name], max(sizes)


def _tensors(call: dict[str, Any], operand: str) -> Iterator[int]:
    """Bytes of each tensor among the arguments. Lists do not tell their dtype."""
    for kind, dims in zip(call["Input type"], call["Input Dims"], strict=True):
        if kind == "TensorList":
            size = _SIZES.get(operand, 4)
            yield sum(math.prod(shape) for shape in dims if shape) * size
        elif kind in _SIZES:
            yield math.prod(dims) * _SIZES[kind]
