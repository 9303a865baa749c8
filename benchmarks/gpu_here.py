"""Where a part of ``one_gpu.py`` runs, and what differs there: a GPU; a try-out on the
CPU with small sizes, where Triton interprets; or ahead of time with the real sizes,
where kernels are compiled and nothing is computed (``gpu_ahead``).

In: a mode. Out: tensors, streams, times and rows of results, with one code for all
modes. A row is a dict: ``check`` rows have ``ok``, ``value`` rows a figure that
``one_gpu.TARGETS`` judges. It measures nothing of its own accord.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROUNDS, WARM, BLOCKS = 50, 10, 3
# Milliseconds of a part's measurement of one case, at most; rounds are cut to fit.
LONGEST = 4000.0
# GPU cycles in which the host gets ahead of what is timed: about 0.2 ms.
GATE = 400_000
CACHE = 240 << 20  # bytes of inputs that no cache holds


@dataclass(frozen=True)
class Here:
    """``mode``: "gpu", "try" or "ahead". ``rank`` of ``ranks``: among the processes of
    this part. ``port``: where they meet. ``out``: the file that rows go to."""

    mode: str
    device: torch.device
    rank: int = 0
    ranks: int = 1
    port: int = 0
    out: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.mode == "gpu"

    def pick(self, real: Any, small: Any) -> Any:
        """The real size, or that of a try-out."""
        return small if self.mode == "try" else real

    @property
    def programs(self) -> int:
        """Programs of a kernel that run at a time, one to a multiprocessor."""
        if self.is_gpu:
            return torch.cuda.get_device_properties(self.device).multi_processor_count
        return self.pick(132, 4)

    def sync(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def tell(self, **row: Any) -> None:
        """Hand a row to who reads results: at once, since a part may be killed."""
        if self.out:
            with Path(self.out).open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def check(
        self, name: str, ok: Any, worst: float | None = None, **more: Any
    ) -> None:
        """A row of something that must hold."""
        self.tell(check=name, ok=bool(ok), worst=worst, **more)

    def value(
        self, name: str, value: float, case: str, *, predicted: float | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        """A row with a figure of one case."""
        more |= {"predicted": predicted}
        self.tell(value=name, measured=value, case=case, **more)


def fill(
    here: Here, shape: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Random normal numbers, the same for a seed in every process."""
    if here.mode == "ahead":
        return torch.empty(shape, dtype=dtype, device=here.device)
    draw = torch.Generator(here.device).manual_seed(seed)
    wide = torch.float32 if dtype is torch.float64 else dtype
    x = torch.randn(list(shape), generator=draw, dtype=wide, device=here.device)
    return x.to(dtype)


def poisoned(
    shape: Sequence[int], stride: Sequence[int], dtype: Any, device: Any
) -> Any:
    """Memory that shows what was not written; for ``launch.empty``."""
    x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return x.fill_(float("nan") if dtype.is_floating_point else 1)


def round_as_devices() -> None:
    """Let Triton's interpreter round to bfloat16, where it cuts off (3.7)."""
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar.name != "fp32" or to.scalar.name != "bf16":
            return cast(self, x, to)
        wide = torch.from_numpy(numpy.array(x.data, dtype=numpy.float32))
        bits = wide.to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)
        return TensorHandle(bits, to.scalar)

    InterpreterBuilder.cast_impl = rounding


# Streams.


class NoStream:
    """Stands in for a stream where there are none: all is done in order."""

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass


def streams(here: Here, count: int) -> list[Any]:
    """Streams of their own, all different up to 32."""
    if not here.is_gpu:
        return [NoStream() for _ in range(count)]
    return [torch.cuda.Stream(here.device) for _ in range(count)]


def current(here: Here) -> Any:
    return torch.cuda.current_stream(here.device) if here.is_gpu else NoStream()


def on(here: Here, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, what is launched goes to a stream."""
    return torch.cuda.stream(stream) if here.is_gpu else contextlib.nullcontext()


def fork(here: Here, all_streams: Sequence[Any]) -> None:
    """What these streams do next comes after what this one did."""
    for stream in all_streams:
        stream.wait_stream(current(here))


def meet(here: Here, all_streams: Sequence[Any]) -> None:
    """What this stream does next comes after all of these."""
    for stream in all_streams:
        current(here).wait_stream(stream)


# Compilers.


def compiled(here: Here, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` by Inductor; in a try-out captured only, and ahead of time as it is."""
    if here.mode == "ahead":
        return fn
    torch._dynamo.config.recompile_limit = 64  # shapes are few, but each counts
    backend = "inductor" if here.is_gpu else "aot_eager"
    return torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)


def load(here: Here, function: Any, args: Sequence[Any], grid: int, **more: Any) -> Any:
    """Compile and load a kernel without running it: a load behind a kernel that waits
    could wait for it. Gives the binary, None where there is no GPU."""
    if not here.is_gpu:
        return None
    made = function.warmup(*args, grid=(grid,), **more)
    made._init_handles()
    return made


# Times.


@dataclass(frozen=True)
class Side:
    """One of the things compared: ``run(i)`` is timed, ``before(i)`` is not. ``i``
    counts calls, so that inputs can rotate."""

    run: Callable[[int], Any]
    before: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Times:
    """Milliseconds: ``blocks`` are medians of ``rounds`` calls each."""

    blocks: tuple[float, ...]
    rounds: int

    @property
    def ms(self) -> float:
        return statistics.median(self.blocks)

    @property
    def spread(self) -> float:
        """Of the blocks, relative."""
        return (max(self.blocks) - min(self.blocks)) / self.ms

    def figures(self) -> dict[str, Any]:
        return {"ms": self.ms, "blocks": self.blocks, "rounds": self.rounds}


def figures_of(times: Mapping[str, Times]) -> dict[str, Any]:
    """Times of all sides, as data."""
    return {name: each.figures() for name, each in times.items()}


def measure(
    here: Here,
    sides: Mapping[str, Side],
    *,
    longest: float = LONGEST,
    gate: int = GATE,
) -> dict[str, Times]:
    """Times of all sides, called in turn (A B A B), in three blocks. ``gate``: cycles
    that the device sleeps before each call, in which the host launches all of it."""
    if here.mode == "ahead":
        for side in sides.values():
            _called(side, 0)
        return {name: Times((1.0,), 1) for name in sides}
    warm, rounds, blocks = (WARM, ROUNDS, BLOCKS) if here.is_gpu else (0, 1, 1)
    for side in sides.values():
        _called(side, 0)
    here.sync()
    for i in range(warm):
        for side in sides.values():
            _called(side, i)
    here.sync()
    if here.is_gpu:
        begun = time.perf_counter()
        for side in sides.values():
            _called(side, 0)
        here.sync()
        pilot = (time.perf_counter() - begun) * 1e3
        rounds = int(max(8, min(rounds, longest / BLOCKS / max(pilot, 1e-3))))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(blocks):
        for name, times in _block(here, sides, rounds, block * rounds, gate).items():
            found[name].append(statistics.median(times))
    return {name: Times(tuple(blocks), rounds) for name, blocks in found.items()}


def _called(side: Side, i: int) -> None:
    if side.before is not None:
        side.before(i)
    side.run(i)


def _block(
    here: Here, sides: Mapping[str, Side], rounds: int, first: int, gate: int
) -> dict[str, list[float]]:
    """Milliseconds of every call of one block."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in sides}
    for i in range(first, first + rounds):
        for name, side in sides.items():
            if side.before is not None:
                side.before(i)
            start, end = mark(here), mark(here)
            if here.is_gpu:
                torch.cuda._sleep(gate)
            start.record()
            side.run(i)
            end.record()
            marks[name].append((start, end))
    here.sync()
    return {
        name: [start.elapsed_time(end) for start, end in pairs]
        for name, pairs in marks.items()
    }


class _Clock:
    """Stands in for an event of a stream."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Clock) -> float:
        return max((end.at - self.at) * 1e3, 1e-6)


def mark(here: Here) -> Any:
    """A point in time of a stream."""
    return torch.cuda.Event(enable_timing=True) if here.is_gpu else _Clock()


def over(a: Times, b: Times) -> float:
    """How often ``b``'s time ``a`` takes: the median of ratios of blocks."""
    return statistics.median(x / y for x, y in zip(a.blocks, b.blocks, strict=True))


def rate(nbytes: float, times: Times) -> float:
    """Units of ``nbytes`` a second."""
    return nbytes / (times.ms * 1e-3)


def sets_of(here: Here, nbytes: int) -> int:
    """How many sets of inputs of ``nbytes`` each no cache holds."""
    many = max(4, -(-CACHE // nbytes)) if nbytes < CACHE else 2
    return here.pick(many, 2)


# Ceilings, measured in the same process as what is compared with them.


def copy_rate(here: Here) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    count = here.pick(1 << 30, 1 << 16)  # bytes of each
    a = fill(here, (count // 2,), torch.bfloat16, 1)
    b = torch.empty_like(a)
    times = measure(here, {"copy": Side(lambda i: b.copy_(a))}, longest=300.0)["copy"]
    return rate(2 * a.nbytes, times)


def matmul_rate(here: Here) -> float:
    """Flops a second of a large bfloat16 product by torch."""
    n = here.pick(8192, 64)
    a, b = (fill(here, (n, n), torch.bfloat16, s) for s in (1, 2))
    c = torch.empty_like(a)
    side = Side(lambda i: torch.mm(a, b, out=c))
    times = measure(here, {"mm": side}, longest=300.0)["mm"]
    return rate(2.0 * n**3, times)


# Comparing.


def apart(here: Here, got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to the largest number; infinite where NaNs are
    not in the same places, and for whole numbers unless all are equal."""
    if here.mode == "ahead":
        assert got.shape == want.shape, (got.shape, want.shape)
        return 0.0
    if got.shape != want.shape:
        return float("inf")
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    a, b = got.double(), want.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    if not b.numel():
        return 0.0
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def same(here: Here, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit (NaNs are not equal)."""
    return here.mode == "ahead" or torch.equal(a, b)
