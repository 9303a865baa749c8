"""What generated kernels do on one GPU, checked and measured in one run of minutes.

    python benchmarks/one_gpu.py --json FILE [--only PART ...] [--limit SECONDS] [--try]

For one NVIDIA GPU of compute capability 9.0, torch from 2.11 on for CUDA, and the
Triton that belongs to it. A part that needs another package which is not installed says
so, and is skipped. Each part is a process of its own (some are two), which is
ended when its time is over; parts that no time is left for are skipped, and checks come
before measurements. FILE is written after every part. Last comes a table: what was
checked and measured, what a count of bytes and flops predicts, the target, a verdict.
The exit status is 0 if no check failed.

Ratios are of things measured in turn in one process, by events of the device, inputs
rotating so that no cache holds them; predictions use the rates of a copy and a matmul
of the same run. What a link between GPUs does can not be seen on one of them.

``--try`` needs no GPU: parts run on the CPU with small sizes, kernels in Triton's
interpreter, two processes by gloo; and every kernel of a real run is compiled for
sm_90a at its real size.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu_parts
from gpu_parts import Outcome, Running, add_arguments, write_json
from gpu_table import Target, facts_of, rows_of, show

sys.path.insert(0, str(gpu_parts.ROOT))

from tests.helpers.shared_gpu import NCCL, OVERLAPPING  # noqa: E402

LIMIT, TRY_LIMIT = 540.0, 3000.0
SPARE = 8.0  # seconds kept for the end
SLOWER = 8.0  # a try-out's limits are so many times those of a GPU

# A kernel that is loaded behind one that waits for others could wait for it.
WAITS = {"CUDA_MODULE_LOADING": "EAGER"}
LOCAL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **OVERLAPPING}


@dataclass(frozen=True)
class Part:
    """``run``: module and function. ``limit``, ``least``: seconds it may take, and
    without which it is not begun. ``checks``: whether its failure is one of the run."""

    run: str
    limit: float
    least: float = 15.0
    ranks: int = 1
    checks: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ("gpu", "try")


# In order: kernels with ever more around them, then measurements, the surest first.
PARTS: dict[str, Part] = {
    "facts": Part("gpu_host:facts", 50.0, checks=False),
    "epilogues": Part("gpu_correct:epilogues", 90.0),
    "virtual": Part("gpu_correct:virtual_ranks", 90.0, env=WAITS),
    "symmetric": Part("gpu_ranks:symmetric", 60.0, ranks=2, env=OVERLAPPING),
    "alone": Part("gpu_models:alone", 80.0, env=LOCAL),
    "nccl": Part(
        "gpu_models:shared_device", 110.0, ranks=2, env={**NCCL, **OVERLAPPING}
    ),
    "b1": Part("gpu_memory:epilogues", 60.0, checks=False),
    "b5": Part("gpu_memory:updates", 40.0, checks=False),
    "b7": Part("gpu_host:calls", 45.0, checks=False, env=LOCAL),
    "b8": Part("gpu_host:compiling", 30.0, checks=False),
    "b9": Part("gpu_steps:steps", 150.0, checks=False, env=LOCAL),
    "shares": Part("gpu_steps:shares", 60.0, checks=False, env=LOCAL),
    "b2": Part("gpu_memory:all_reduces", 110.0, checks=False, env=WAITS),
    "ahead": Part("gpu_ahead:compile_all", 250.0, modes=("try",)),
    # To try the script itself; only when asked for.
    "hangs": Part("one_gpu:hangs", 15.0, 0.0, modes=()),
    "wrong": Part("one_gpu:wrong", 60.0, 0.0, modes=()),
    "lost": Part("one_gpu:lost", 60.0, 0.0, ranks=2, modes=()),
    "fine": Part("one_gpu:fine", 60.0, 0.0, modes=()),
    "long": Part("one_gpu:fine", 60.0, 3600.0, modes=()),
}

# Of a run on a GPU: how many processes compile a part's kernels ahead of it.
AHEAD = {"epilogues": 2, "virtual": 4, "b2": 2} | dict.fromkeys(
    ("symmetric", "alone", "b1", "b5"), 1
)


TARGETS: dict[str, Target] = {
    "copy": Target("copy on the device, TB/s"),
    "matmul": Target("matmul of torch, bfloat16, TFLOP/s"),
    "b1 ceiling": Target("epilogue: bytes over time, of a copy's", ">=", 0.85),
    "b1 inductor": Target("epilogue: time over Inductor's", "<=", 1.05),
    "b1 eager": Target("epilogue: eager's time over it", ">=", 2.5),
    "b2 parts": Target("all-reduce in a kernel: time over kernels'", "<=", 0.80),
    "b2 ceiling": Target("all-reduce: bytes over time, of a copy's", ">=", 0.75),
    "b2 more": Target("two programs to a multiprocessor: time over one's"),
    "b5 ceiling": Target("sum and AdamW: bytes over time, of a copy's", ">=", 0.85),
    "b5 torch": Target("sum and AdamW: time over torch's fused", "<=", 1.05),
    "b7 host": Target("region: host time over all_reduce + epilogue's", "<=", 1.0),
    "b7 graph": Target("the same in CUDA graphs, by NCCL both", "<=", 1.0),
    "b8 cold": Target("seconds to compile a region's kernel, cold"),
    "b8 cached": Target("seconds, from the cache on disk"),
    "b8 text": Target("seconds to write its text"),
    "b9 fxpar": Target("step of Llama: time over torch.compile's", "<=", 1.05),
    "b9 train_step": Target("the same by train_step", "<=", 1.05),
    "b9 ms": Target("forward and backward of fxpar, ms", near=0.15),
    "b9 first": Target("seconds to the end of the first step"),
}


# The run.


def run(args: argparse.Namespace) -> int:
    """All parts, one after the other; the exit status."""
    begun = time.monotonic()
    mode = "try" if args.try_out else "gpu"
    limit = args.limit or (TRY_LIMIT if args.try_out else LIMIT)
    names = args.only or [n for n, part in PARTS.items() if mode in part.modes]
    with tempfile.TemporaryDirectory(
        prefix="one_gpu_", ignore_cleanup_errors=True
    ) as word:
        queue = _Queue(mode, Path(word), names)
        try:
            for name in names:
                left = limit - (time.monotonic() - begun) - SPARE
                outcome = queue.next(left)
                end = "\n" if len(queue.done) % 5 == 0 else "; "
                print(f"{name} {outcome.status}, {outcome.seconds:.0f} s", end=end)
                sys.stdout.flush()
                write(args, queue.done, time.monotonic() - begun)
        finally:
            queue.end()
    rows = rows_of(queue.done, TARGETS, judged=not args.try_out)
    print("\n", facts_of(queue.done), sep="\n")
    show(rows)
    failed = [row for row in rows if row["verdict"] == "FAILED"]
    failed = [row for row in failed if PARTS[row["part"]].checks]
    wall = time.monotonic() - begun
    print(f"{wall:.0f} s; {len(failed)} checks failed; figures in {args.json}")
    return 1 if failed else 0


class _Queue:
    """Parts that are done, that run or are ready to, and that are to come; and, beside
    checks on a GPU, processes that compile kernels for them."""

    def __init__(self, mode: str, folder: Path, names: Sequence[str]) -> None:
        self.mode, self.folder, self.names = mode, folder, list(names)
        self.done: dict[str, Outcome] = {}
        self.ready: dict[str, Running] = {}
        self.ahead: list[Running] = []
        if mode == "gpu":
            self._compile()

    def next(self, left: float) -> Outcome:
        """Run the next part, in at most so many seconds."""
        name, *rest = self.names
        self.names = rest
        part = PARTS[name]
        if not part.checks and name != "facts":
            self._end_ahead()  # nothing runs beside what is measured
        if left < part.least:
            self.done[name] = Outcome("skipped", 0.0)
            return self.done[name]
        if name not in self.ready:
            self.ready[name] = self._begin(name)
        if self.mode == "gpu" and rest:
            # It imports what it needs meanwhile.
            self.ready[rest[0]] = self._begin(rest[0])
        slower = SLOWER if self.mode == "try" and part.modes else 1.0
        found = gpu_parts.finish(self.ready[name], min(part.limit * slower, left))
        self.ready.pop(name)
        self.done[name] = found
        return found

    def end(self) -> None:
        """Leave nothing running."""
        self._end_ahead()
        for running in self.ready.values():
            gpu_parts.end(running)

    def _begin(self, name: str) -> Running:
        part, mode = PARTS[name], "ahead" if name == "ahead" else self.mode
        return gpu_parts.start(
            Path(__file__), name, mode, part.ranks, self.folder, part.env
        )

    def _compile(self) -> None:
        """Start compiling what will be launched, each kernel once."""
        for name in self.names:
            count = AHEAD.get(name, 0)
            if count:
                more = self.folder / "ahead"
                more.mkdir(exist_ok=True)
                running = gpu_parts.start(
                    Path(__file__), name, "ahead", count, self.folder, {}, more
                )
                gpu_parts.go(running)
                self.ahead.append(running)

    def _end_ahead(self) -> None:
        for running in self.ahead:
            gpu_parts.end(running)
        self.ahead = []


def write(
    args: argparse.Namespace, outcomes: Mapping[str, Outcome], wall: float
) -> None:
    """Write what there is so far, in one step."""
    data = {
        "command": " ".join(["python", "benchmarks/one_gpu.py", *sys.argv[1:]]),
        "mode": "try" if args.try_out else "gpu",
        "seconds": wall,
        "targets": {name: asdict(target) for name, target in TARGETS.items()},
        "table": rows_of(outcomes, TARGETS, judged=not args.try_out),
        "parts": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    write_json(Path(args.json), data)


# A part's process.


def _function(name: str, mode: str) -> Callable[[Any], None]:
    """What a part's process calls."""
    if mode == "try" and PARTS[name].modes:
        from gpu_here import round_as_devices

        round_as_devices()
    if mode == "ahead" and name != "ahead":
        os.nice(10)
        from gpu_ahead import compile_part

        return functools.partial(compile_part, name=name)
    module, function = PARTS[name].run.split(":")
    found: Callable[[Any], None] = getattr(importlib.import_module(module), function)
    return found


def hangs(here: Any) -> None:
    here.check("before it hangs", True, process=os.getpid())
    time.sleep(1e6)


def wrong(here: Any) -> None:
    here.check("wrong on purpose", False, 2.0, process=os.getpid())


def fine(here: Any) -> None:
    here.check("fine", True, process=os.getpid())


def lost(here: Any) -> None:
    """Rank 0 waits for a rank that fails."""
    if here.rank:
        time.sleep(1.0)
        raise RuntimeError("lost on purpose")
    here.tell(process=os.getpid())
    time.sleep(1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=".benchmarks/one_gpu.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--limit", type=float, help=f"seconds in all ({LIMIT:.0f})")
    parser.add_argument("--try", dest="try_out", action="store_true", help="no GPU")
    add_arguments(parser)
    args = parser.parse_args()
    if args.part:
        gpu_parts.work(args, lambda: _function(args.part, args.mode))
    raise SystemExit(run(args))


if __name__ == "__main__":
    main()
