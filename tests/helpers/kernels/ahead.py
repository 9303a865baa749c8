"""Kernels compiled for a GPU that is not there: Triton's compiler, and NVIDIA's tools
in its wheel, need none."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fxpar.fusion.kernels.emit import Kernel, kernel_of
from fxpar.fusion.kernels.region_program import Tensor
from fxpar.fusion.kernels.run_kernels import function_of
from tests.helpers.kernels import samples
from tests.helpers.kernels.compare_kernels import outlined, traced

TYPES = {"float32": "fp32", "bfloat16": "bf16", "bool": "i1", "float64": "fp64"}
TYPES |= {"int64": "i64", "float16": "fp16"}
RANDOM = "triton_4"


@dataclass(frozen=True)
class Compiled:
    """``loads``: of memory; ``wide_loads``: those of 128 bits. ``registers``, and bytes
    ``spilled``: of a thread; ``shared``: bytes of a block."""

    target: str
    loads: int
    wide_loads: int
    registers: int
    spilled: int
    shared: int


def compile_ahead(kernel: Kernel) -> Compiled:
    """A kernel for sm_90a."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(function_of(kernel), *_signature(kernel))
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": kernel.warps}
    made: Any = triton.compile(source, target=target, options=options)
    ptx = made.asm["ptx"]
    usage = _usage(made.asm["cubin"])
    return Compiled(
        re.search(r"\.target (\S+)", ptx)[1],
        len(re.findall(r"ld\.global\S*", ptx)),
        len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        int(re.search(r"REG:(\d+)", usage)[1]),
        int(re.search(r"STACK:(\d+)", usage)[1]),
        made.metadata.shared,
    )


def _signature(kernel: Kernel) -> tuple[dict[str, str], dict[str, int], Any]:
    """Types of parameters, constants, and that pointers are aligned."""

    def pointer(t: Tensor) -> str:
        return "*" + ("fp32" if t.name in kernel.sums else TYPES[t.dtype])

    shared = ("buffers_ptr", "signals_ptr")
    types = {name: "*i64" for name in shared if f"{name}," in kernel.text}
    types |= {f"{t.name}_ptr": pointer(t) for t in (*kernel.reads, *kernel.writes)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    types |= {f"{name}_value": "fp32" for name in kernel.alone}
    types |= {f"n{i}": "i32" for i in kernel.numbers}
    # A template's rank is one more number.
    rank = re.search(r"rank = (n\d+)", kernel.text)
    types |= {rank[1]: "i32"} if rank else {}
    return types | {"PROGRAMS": "constexpr"}, {"PROGRAMS": kernel.programs}, aligned


def _usage(cubin: bytes) -> str:
    """What cuobjdump says of a binary's resources."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True).stdout


LARGE = {"x": (2, 32, 4096), "col": (4096,), "row": (2, 32, 1)}


def large(piece: str, dtype: torch.dtype) -> Kernel:
    """A named piece on rows as of a real model."""
    fn, names = samples.PIECES[piece]
    batch, length, width = LARGE["x"]
    with mock.patch.multiple(samples, BATCH=batch, LENGTH=length, WIDTH=width):
        graph = traced(fn, [_large(name, dtype) for name in names])
    return kernel_of(outlined(graph)[0].program, random=RANDOM)


def _large(name: str, dtype: torch.dtype) -> torch.Tensor:
    if name == "seed":
        return torch.tensor(1)
    if name in ("double", "number"):
        return torch.tensor(0.5, dtype=torch.float64 if name == "double" else dtype)
    alike = (
        "x" if name in ("y", "z", "positive") or name not in samples.SHAPES else name
    )
    return torch.empty(LARGE[alike], dtype=dtype)
