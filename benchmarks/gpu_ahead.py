"""Parts of ``one_gpu.py`` ahead of time: their own code with the sizes of a real run on
tensors that are not there, every kernel compiled for sm_90a instead of run.

In: names of parts. Out: each kernel's registers, spills and shared memory. What torch
does to shapes and dtypes is done, nothing is computed. On a machine with a GPU the same
fills Triton's cache on disk before kernels are asked for: compiling goes the way it
goes in a launch, with a target in place of a device.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_here import Here
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.region_program import RegionProgram, stages_of
from fxpar.fusion.kernels.symmetric_memory import Provider

# Of parts of several processes, or with a group: what of them launches kernels.
INSTEAD = {"symmetric": "gpu_ranks:templates", "alone": "gpu_ranks:decomposed"}
SHARED, REGISTERS = 227 << 10, 1 << 16  # of a multiprocessor
TARGET = GPUTarget("cuda", 90, 32)


class _Driver:
    """What Triton asks of a device to compile for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@contextlib.contextmanager
def pretending(done: Callable[[Any], None], here: Here) -> Iterator[None]:
    """Inside, tensors are fake, and a launch compiles: every ``ranks``-th kernel, from
    the ``rank``-th on; ``done`` gets the binary."""
    compile_it, seen = JITFunction.run, set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = [_as_mock(x) for x in args]
        key = self.fn.__name__, hash(self.src), str(kwargs), str(list(map(_kind, args)))
        if key in seen:
            return None
        seen.add(key)
        if len(seen) % here.ranks == here.rank:
            done(compile_it(self, *given, grid=grid, warmup=True, **kwargs))
        return None

    place = iter(range(1 << 12, 1 << 62, 1 << 12))

    def address(self: Any) -> int:
        # The start of a storage of its own, as far as is asked.
        if not hasattr(self, "_address"):
            self._address = next(place)
        return int(self._address)

    def copied(self: Any, source: Any, non_blocking: bool = False) -> Any:
        # The real one asks for a device's stream.
        torch.broadcast_shapes(self.shape, source.shape)
        return self

    def part(self: Any, index: Any) -> Any:
        if isinstance(index, int):
            return self.select(0, index)
        assert isinstance(index, slice) and index.step is None, index
        first, last, _ = index.indices(len(self))
        return self.narrow(0, first, last - first)

    driver.set_active(_Driver())
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(FakeTensor, "data_ptr", address),
        mock.patch.object(FakeTensor, "copy_", copied),
        mock.patch.object(FakeTensor, "__getitem__", part),
        # A number on the CPU: which one, no compiled kernel depends on.
        mock.patch.object(FakeTensor, "item", lambda self: 0.5, create=True),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        # There is no stream to follow, nothing that kernels have said.
        mock.patch.object(Provider, "_follow", lambda self: None, create=True),
        mock.patch.object(Provider, "_look", lambda self: None, create=True),
        mock.patch.object(Provider, "check", lambda self: None),
        mock.patch.object(run_kernels, "own", lambda x, stride, owned: x),
        FakeTensorMode(),
    ):
        yield


def _as_mock(x: Any) -> Any:
    return MockTensor(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x


def _kind(x: Any) -> Any:
    return x.dtype if isinstance(x, torch.Tensor) else type(x)


def compile_all(here: Here) -> None:
    """Every kernel of all parts, and of the regions of a try-out's model."""
    import one_gpu

    for name in one_gpu.AHEAD:
        compile_part(here, name)
    # As the part of two processes left them.
    folder = Path(here.out).parent
    found = sorted(folder.glob("program_*.json"))
    texts = [path.read_text() for path in found]
    compile_parts_of(here, [RegionProgram.parse(text) for text in texts])


def compile_part(here: Here, name: str) -> None:
    """Every kernel of a part; a row for each that would not run, one for all."""
    import one_gpu

    binaries: list[Any] = []
    module, function = INSTEAD.get(name, one_gpu.PARTS[name].run).split(":")
    run = getattr(importlib.import_module(module), function)
    quiet = Here(here.mode, here.device, here.rank, here.ranks)  # tells nobody
    kept = run_kernels.empty
    try:
        with pretending(binaries.append, here):
            run(quiet)
    finally:
        run_kernels.empty = kept
    _say(here, name, binaries)


def compile_parts_of(here: Here, programs: list[RegionProgram]) -> None:
    """Kernels of programs as regions run them: by a template, and between
    collectives."""
    from fxpar.fusion.kernels.emit import kernel_of
    from fxpar.fusion.kernels.implementations import GroupFacts, TunedWay, choose
    from fxpar.fusion.kernels.region_op import planned

    binaries: list[Any] = []
    with pretending(binaries.append, here):
        for program in programs:
            rung = choose(program, GroupFacts(program.ranks, kernels=True, shared=True))
            template = planned(program, TunedWay(rung.name, here.programs), "cuda")
            assert template is not None, f"region {program.hash} is not one kernel"
            compile_kernel(here, template.kernel, shared=True)
            for step in stages_of(program):
                if isinstance(step, RegionProgram):
                    random = run_kernels.random_of("cuda")
                    kernel = kernel_of(step, random=random)
                    compile_kernel(here, kernel, shared=False)
    _say(here, f"regions of models ({len(programs)})", binaries)


def compile_kernel(here: Here, kernel: Any, shared: bool) -> None:
    """As it is launched."""
    from fxpar.fusion.kernels.region_program import dtype_of

    reads = [
        torch.empty(t.shape, dtype=dtype_of(t.dtype), device=here.device)
        for t in kernel.reads
    ]
    writes = [run_kernels.place(kernel, t, here.device) for t in kernel.writes]
    addresses = [torch.empty(8, dtype=torch.int64, device=here.device)] * 2
    numbers = [1 for _ in kernel.numbers]
    given = [*(addresses if shared else ()), *reads, *writes, *numbers]
    run_kernels.function_of(kernel)[(kernel.programs,)](
        *given,
        *((0,) if shared else ()),
        PROGRAMS=kernel.programs,
        num_warps=kernel.warps,
    )


def _say(here: Here, name: str, binaries: list[Any]) -> None:
    """Kernels that no multiprocessor holds are wrong; spills are told."""
    figures = [_usage(binary) for binary in binaries]
    bad = [
        x
        for x in figures
        if x["shared"] > SHARED
        or x["registers"] * x["threads"] > REGISTERS
        or x["target"] != "sm_90a"
    ]
    most = max((x["registers"] for x in figures), default=0)
    spill = sum(x["spilled"] > 0 for x in figures)
    note = f"{len(figures)} kernels, at most {most} registers, {spill} spill"
    here.check(f"sm_90a: {name}", not bad, wrong=bad, note=note, kernels=figures)


def _usage(binary: Any) -> dict[str, Any]:
    """Of a compiled kernel, as NVIDIA's tool in Triton's wheel sees it."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    target = re.search(r"\.target (\S+)", binary.asm["ptx"])
    assert registers and stack and target, said
    return {
        "name": binary.metadata.name,
        "registers": int(registers[1]),
        "spilled": int(stack[1]),
        "shared": int(binary.metadata.shared),
        "threads": 32 * int(binary.metadata.num_warps),
        "target": target[1],
    }
