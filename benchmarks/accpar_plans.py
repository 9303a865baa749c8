"""AccPar's networks on unlike devices (Song et al., HPCA 2020) by plans of the whole
system, where ``accpar.py`` drives the solver alone.

    python benchmarks/accpar_plans.py [--only NAME ...] [--json FILE]

A training step of each network, batch 512, is planned for a group of TPU v3 and one of
TPU v2, ``x=2{1.0,0.43}`` by their data sheets: data parallelism with equal shards, the
same with shards by speed, and the plan that a search finds. Seconds of a step are
predicted (``plan.predicted``), not measured; ``gain`` is that of equal shards over the
search's, as AccPar counts its speed-up over data parallelism.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from _common import conditions, write

BATCH, PIXELS, CLASSES, SPEEDS = 512, 224, 1000, "{1.0,0.43}"


def plain(widths: Sequence[Sequence[int]], kernels: Sequence[int], inner: int) -> Any:
    """Convolutions, a pool behind each group of them, three products."""
    from torch import nn

    layers: list[Any] = []
    before, stem = 3, True
    for group in widths:
        for width in group:
            kernel = kernels[0] if stem else kernels[1]
            stride = 4 if stem and kernel == 11 else 1
            padding = 2 if stride == 4 else kernel // 2
            layers += [nn.Conv2d(before, width, kernel, stride, padding), nn.ReLU()]
            before, stem = width, False
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.Flatten(), nn.Linear(inner, 4096), nn.ReLU()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers)


def resnet(depths: list[int], kind: str) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    config = ResNetConfig(depths=depths, layer_type=kind, hidden_sizes=widths)
    config.num_labels = CLASSES
    return ResNetForImageClassification(config)


VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG16 = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
NETWORKS: dict[str, Callable[[], Any]] = {
    "alexnet": lambda: plain(((64,), (192,), (384, 256, 256)), (11, 3), 256 * 6 * 6),
    "vgg11": lambda: plain(VGG11, (3, 3), 512 * 7 * 7),
    "vgg16": lambda: plain(VGG16, (3, 3), 512 * 7 * 7),
    "resnet18": lambda: resnet([2, 2, 2, 2], "basic"),
    "resnet50": lambda: resnet([3, 4, 6, 3], "bottleneck"),
}
# Mesh and mode of each way.
WAYS = {
    "equal": (f"dp=2{SPEEDS}[1,1]", "propagate"),
    "shares": (f"dp=2{SPEEDS}", "propagate"),
    "search": (f"x=2{SPEEDS}", "search"),
}


def row(name: str) -> dict[str, Any]:
    """Predicted seconds of a step in each way, and the shares that a search chose."""
    import torch
    import torch.nn.functional as F

    import fxpar

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = NETWORKS[name]()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.network(x)
            return F.cross_entropy(getattr(logits, "logits", logits), labels)

    model, figures = Loss(), dict[str, Any]()
    x, labels = torch.empty(BATCH, 3, PIXELS, PIXELS), torch.zeros(BATCH).long()
    for way, (mesh, mode) in WAYS.items():
        begun = time.perf_counter()
        plan = fxpar.plan(model, x, labels, mesh=mesh, mode=mode, grad=True)
        figures[way] = plan.predicted.seconds
        figures[f"planned in, {way}"] = time.perf_counter() - begun
    notes = [note for note in plan.notes if note.startswith("shares")]
    return {**figures, "notes": notes, "gain": figures["equal"] / figures["search"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(NETWORKS))
    parser.add_argument("--json")
    args = parser.parse_args()
    before = conditions()
    os.environ |= {"FXPAR_HARDWARE": "tpu-v3", "FXPAR_SCHEDULE": "none"}
    warnings.simplefilter("ignore")
    rows = {}
    for name in args.only or NETWORKS:
        rows[name] = row(name)
        equal, shares, search = (rows[name][way] * 1e3 for way in WAYS)
        print(
            f"{name:9} equal shards {equal:7.1f} ms, by speed {shares:7.1f}, searched "
            f"{search:7.1f}: {rows[name]['gain']:.2f} of equal; "
            f"{'; '.join(rows[name]['notes'])}",
            flush=True,
        )
        write(args.json, "accpar_plans", {"conditions": before, "rows": rows})


if __name__ == "__main__":
    main()
