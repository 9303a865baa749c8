"""CoCoNeT's three programs by fxpar's verbs, predicted on its hardware: 16 DGX-2.

    python benchmarks/coconet.py [--json PATH]

Data parallelism with Adam and LAMB on 256 V100s, a tensor-parallel attention output
and MLP output on 16, and a pipeline of two stages of 16. Each program is one rank's
graph as one would write it first; a schedule of a few lines makes it each of the
paper's variants. Seconds are of ``passes.simulate``, nothing runs. Beside them stand
the paper's figures (arXiv 2105.05720, section 6), which are measured, with CUDA kernels
of its own: what the ratios share is what is divided by what.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _common import conditions
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.schedule import Schedule
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.simulate.simulate_step import simulate
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

HARDWARE = lookup("v100-dgx2")
HALF = torch.float16


@dataclass(frozen=True)
class Input:
    """Spec, and the shape one rank holds."""

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Variant:
    """A schedule, and the paper's speed-up over the first variant, as text."""

    name: str
    schedule: str
    reported: str = ""
    permit: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A program on one mesh; ``variants``: the first is what others are divided by."""

    name: str
    program: Callable[..., Any]
    inputs: tuple[Input, ...]
    mesh: str
    variants: tuple[Variant, ...]


def reduce(x: torch.Tensor, axes: str) -> torch.Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", f"fxpar:{axes}"))


def adam(g: Any, w: Any, m: Any, v: Any) -> Any:
    g = reduce(g, "dp").float()
    m1 = 0.9 * m + 0.1 * g
    v1 = 0.999 * v + 0.001 * (g * g)
    w1 = w - 1e-3 * (m1 / (v1.sqrt() + 1e-8))
    return w1.half(), w1, m1, v1


def lamb(g: Any, w: Any, m: Any, v: Any) -> Any:
    g = reduce(g, "dp").float()
    m1 = 0.9 * m + 0.1 * g
    v1 = 0.999 * v + 0.001 * (g * g)
    u = m1 / (v1.sqrt() + 1e-8) + 0.01 * w
    ratio = (w * w).sum().sqrt() / (u * u).sum().sqrt()
    w1 = w - 1e-3 * (ratio * u)
    return w1.half(), w1, m1, v1


def product(x: Any, w: Any, b: Any, r: Any) -> Any:
    """The output of attention or an MLP: product, all-reduce, bias, dropout, residual,
    as a layer begins with it."""
    y = reduce(x @ w, "tp") + b
    keep = _random(y)
    return ((keep > 0.1) * y * (1 / 0.9) + r,)


def stage(x: Any, b: Any, r: Any) -> Any:
    """The end of a pipeline stage: all-reduce, bias, dropout, residual, send."""
    y = reduce(x, "tp") + b
    keep = _random(y)
    y = (keep > 0.1) * y * (1 / 0.9) + r
    return (torch.ops.fxpar.permute(y, [1, 0], "fxpar:pp"),)


def _random(x: torch.Tensor) -> torch.Tensor:
    seed, size = torch.ops.fxpar.seeds(1, x.device)[0], list(x.shape)
    return torch.ops.fxpar.random(size, seed, "rand", size, [0, 0])


SPLIT = "split(all_reduce) -> rs, ag\n"
ADAM = (
    "[_to_copy, mul, mul_1, add, mul_2, mul_3, mul_4, add_1, sqrt, add_2, div, mul_5,"
    " sub, _to_copy_1]"
)
STATE = "as_slice(w_1, w)\nas_slice(m_1, m)\nas_slice(v_1, v)\n"


def optimizer(name: str, program: Any, ops: str, elements: int, said: str) -> Case:
    """Gradients and gathered weights in half precision, state in single."""
    whole = Input("[_]", (elements,))
    gradient = Input("[_] partial(sum: dp)", (elements,), HALF)
    cut = "cut(w_1, axes=dp) -> ws, agw\n"
    moved = SPLIT + cut + f"reorder({ops}, ag, agw) -> m, v, w, half\n"
    permit = ("w_1", "m_1", "v_1")
    return Case(
        f"{name}, 2^{elements.bit_length() - 1} elements",
        program,
        (gradient, whole, whole, whole),
        "dp=256",
        (
            Variant("AR-C", ""),
            Variant("RS-C-AG, state whole", moved),
            Variant("RS-C-AG, state in slices", moved + STATE, said, permit),
        ),
    )


LAMB = (
    "[_to_copy, mul, mul_1, add, mul_2, mul_3, mul_4, add_1, sqrt, add_2, div, mul_5,"
    " add_3, mul_6, sum_1, sqrt_1, mul_7, sum_2, sqrt_2, div_1, mul_8, mul_9, sub,"
    " _to_copy_1]"
)
AFTER = "[add, random, gt, mul, mul_1, add_1]"


def tensor_parallel(name: str, inner: int, batch: int) -> Case:
    rows, width = batch * 1024, 3072
    inputs = (
        Input("[_, tp]", (rows, inner // 16), HALF),
        Input("[tp, _]", (inner // 16, width), HALF),
        Input("[_]", (width,), HALF),
        Input("[_, _]", (rows, width), HALF),
    )
    moved = SPLIT + f"reorder({AFTER}, ag) -> out\n"
    return Case(
        f"{name}, batch {batch}",
        product,
        inputs,
        "tp=16",
        (
            Variant("MM-AR-C", ""),
            Variant("ol(MM, AR)-C", "overlap(mm, all_reduce, chunks=4)", "up to 1.36"),
            Variant("MM-RS-C-AG", moved, "1.17 to 1.27"),
            Variant(
                "ol(MM, RS)-C-AG", moved + "overlap(mm, rs, chunks=4)", "1.42 to 1.70"
            ),
        ),
    )


def pipeline(batch: int) -> Case:
    rows, width = batch * 2048, 12288
    inputs = (
        Input("[_, _] partial(sum: tp+pp)", (rows, width), HALF),
        Input("[_]", (width,), HALF),
        Input("[_, _]", (rows, width), HALF),
    )
    moved = SPLIT + f"reorder([{AFTER[1:-1]}, permute], ag) -> out\n"
    sent = SPLIT + f"reorder({AFTER}, ag) -> y\nreorder([permute], y) -> out\n"
    return Case(
        f"pipeline border, micro-batch {batch}",
        stage,
        inputs,
        "pp=2,tp=16",
        (
            Variant("AR-C-P2P", ""),
            Variant("RS-C-P2P-AG", moved, "7.06 to 7.26"),
            Variant("RS-C-P2P-AG by two reorders", sent),
            Variant(
                "ol(RS, C-P2P, AG)",
                moved + "overlap(rs, out, chunks=4)",
                "11.75 to 12.21",
            ),
        ),
    )


def cases() -> list[Case]:
    big = [1 << 22, 1 << 26, 1 << 28]
    return [
        *(optimizer("Adam", adam, ADAM, n, "1.2 to 1.7") for n in big),
        *(optimizer("LAMB", lamb, LAMB, n, "1.2 to 1.7") for n in big),
        *(tensor_parallel("attention output", 3072, b) for b in (8, 16)),
        *(tensor_parallel("MLP output", 4 * 3072, b) for b in (8, 16)),
        *(pipeline(b) for b in (1, 8)),
    ]


def run(case: Case) -> list[dict[str, Any]]:
    from fxpar._torch.fake import new_fake_mode

    mesh = Mesh.parse(case.mesh)
    with new_fake_mode():
        local = [torch.empty(i.shape, dtype=i.dtype) for i in case.inputs]
        graph = make_fx(case.program)(*local).graph
    specs = [Spec.parse(i.spec) for i in case.inputs]
    rows, first = [], 0.0
    for variant in case.variants:
        after = apply(
            variant.schedule, graph, mesh, inputs=specs, permit=variant.permit
        )
        line = simulate(as_run(after), HARDWARE.on(mesh), HARDWARE)
        first = first or line.seconds
        rows.append(
            {
                "case": case.name,
                "mesh": case.mesh,
                "variant": variant.name,
                "lines": len(Schedule.parse(variant.schedule).lines),
                "milliseconds": line.seconds * 1e3,
                "speedup": first / line.seconds,
                "reported": variant.reported,
                "sent": dict(line.sent.items()),
                "peak_bytes": line.peak_bytes,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows = [row for case in cases() for row in run(case)]
    print(f"{'case':34} {'variant':28} lines      ms  faster  reported")
    for row in rows:
        print(
            f"{row['case']:34} {row['variant']:28} {row['lines']:5} "
            f"{row['milliseconds']:7.2f} {row['speedup']:7.2f}  {row['reported']}"
        )
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"conditions": conditions(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
