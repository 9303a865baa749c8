"""What it saves to run work beside the halos of convolutions, by prediction.

    python benchmarks/halo_overlap.py [--pixels 224 1024] [--hardware h100 cpu]

A ResNet-50 of one image, its height over two ranks: a training step in float32 and a
forward in bfloat16, planned without devices. Columns: seconds that permutes take, and
of a step with no work put beside collectives (``FXPAR_DISABLE=delay``), with the
weights' gradients apart, and with the schedule that ``auto`` chooses.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import torch
from bench_uneven import resnet50

import fxpar

COLUMNS = ("permutes", "halo first", "gradients apart", "auto")


def seconds(pixels: int, hardware: str, *, training: bool) -> tuple[float, ...]:
    """Of each column."""
    dtype = torch.float32 if training else torch.bfloat16
    torch.set_default_dtype(dtype)
    model = resnet50().train(training)
    x = torch.randn(1, 3, pixels, pixels)
    options: dict[str, Any] = {"mesh": "h=2", "mode": "propagate", "grad": training}
    options["hints"] = {"x": ("_", "_", "h", "_")}
    plans = []
    for disable, schedule in (("delay", "none"), ("", "none"), ("", "auto")):
        settings = {"FXPAR_HARDWARE": hardware, "FXPAR_DISABLE": disable}
        with mock.patch.dict("os.environ", settings):
            plan = fxpar.plan(model, x, schedule=schedule, **options)
            plans.append((plan.predicted.seconds, plan.timeline))
    permutes = (e.duration for e in plans[0][1].events if e.kind == "permute")
    return (sum(permutes), *(taken for taken, _ in plans))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", type=int, nargs="+", default=[224, 1024])
    parser.add_argument("--hardware", nargs="+", default=["h100", "cpu"])
    args = parser.parse_args()
    print("| hardware, pixels, step |", " | ".join(f"{c}, ms" for c in COLUMNS), "|")
    for hardware in args.hardware:
        for pixels in args.pixels:
            for training in (True, False):
                row = seconds(pixels, hardware, training=training)
                what = "training, float32" if training else "forward, bfloat16"
                cells = " | ".join(f"{1e3 * taken:.4g}" for taken in row)
                print(f"| {hardware}, {pixels}, {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
