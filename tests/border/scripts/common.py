"""What the scripts share: how they are started and what they say at the end.

``--parallel none`` is one device; ``global`` the same script on N ranks with fxpar;
``ddp`` and ``local`` give each rank its part of every batch.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", default="none")
    parser.add_argument("--codegen", default="eager")
    return parser.parse_args()


def start(args: argparse.Namespace) -> tuple[int, int]:
    """(rank, number of parts that a batch is in)."""
    if args.parallel == "none":
        return 0, 1
    dist.init_process_group("gloo")
    splits = args.parallel in ("ddp", "local")
    return dist.get_rank(), dist.get_world_size() if splits else 1


def parallel(model: nn.Module, args: argparse.Namespace) -> Any:
    """The one line."""
    if args.parallel == "none":
        return model
    if args.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    options = {"inputs": args.parallel, "codegen": args.codegen}
    return torch.compile(model, backend="fxpar", options=options)


def part(x: torch.Tensor, rank: int, parts: int) -> torch.Tensor:
    """This rank's rows of a batch."""
    return x.chunk(parts)[rank] if parts > 1 else x


def mean(x: float, args: argparse.Namespace) -> float:
    """Over the ranks, as scripts do for their logs."""
    if args.parallel == "none":
        return x
    total = torch.tensor(x)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def finish(args: argparse.Namespace, **numbers: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT " + json.dumps(numbers), flush=True)
    if args.parallel != "none":
        dist.barrier()
        dist.destroy_process_group()


def norm(*models: nn.Module) -> float:
    with torch.no_grad():
        squares = [p.double().square().sum() for m in models for p in m.parameters()]
        return float(torch.stack(squares).sum().sqrt())
