"""A small Mixtral with its experts on ranks, beside what a user would write today.

    python benchmarks/bench_mixtures.py [--short] [--ranks 2|4] [--json FILE]

- ``fsdp2``: fully_shard on every layer and the root, every layer compiled; experts are
  gathered at each use.
- ``hand``: experts by hand: each rank holds its part of them, tokens are exchanged by
  all-to-alls of exact sizes and back, the rest is replicated and its gradients reduced;
  not compiled, since sizes depend on data.
- ``fxpar``: the unchanged model, ``fxpar.shard``, ``torch.compile``, mesh ``ep``.

A step asks the model for its loss alone: logits, which fxpar would give every rank
whole, no other side sends.

All sides live in the same processes and see the same model, data and optimizer. A step
is forward, backward and AdamW; its time is that of the slowest rank, and steps of the
sides alternate. ``state``: bytes of parameters and optimizer state that a rank holds;
``experts``: its part of the experts. What a step sends and its peak beyond that state
come from the profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import conditions, on_ranks, write
from _traffic import watched
from bench_memory import local, state_bytes

LAYERS, BATCH, LENGTH, WORDS, EXPERTS = 2, 8, 64, 2048, 8
SIDES = ("fsdp2", "hand", "fxpar")
WARMUP = 3
AGREE = 1e-3

# (model, its loss, what of a batch a rank is given, what comes behind a backward)
Side = tuple[Any, Callable[[Any], Any], Callable[[Any], Any], Callable[[], None]]


def mixtral() -> Any:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def own_part(ids: Any) -> Any:
    import torch.distributed as dist

    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any) -> Callable[[Any], Any]:
    return lambda ids: model(input_ids=ids, labels=ids).loss


def nothing() -> None:
    pass


def fsdp2(count: int) -> Side:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mixtral()
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, loss_of(model), own_part, nothing


def fxpar_side(count: int) -> Side:
    import torch

    import fxpar

    mesh = f"ep={count}"
    model = fxpar.shard(mixtral(), mesh=mesh)
    options = {"mesh": mesh, "plan": "propagate"}
    loss = torch.compile(
        lambda ids: model(input_ids=ids, labels=ids).loss,
        backend="fxpar",
        dynamic=False,
        options=options,
    )
    return model, loss, lambda ids: ids, nothing


def by_hand(count: int) -> Side:
    """Mixtral whose experts are a rank's own, reached by all-to-alls."""
    import torch
    import torch.distributed as dist

    model = mixtral()
    for layer in model.model.layers:
        layer.mlp.experts = _own_experts(layer.mlp.experts, count)
    shared = [p for n, p in model.named_parameters() if "experts" not in n]
    own = [p for n, p in model.named_parameters() if "experts" in n]

    def reduce() -> None:
        flat = torch.cat([p.grad.flatten() for p in shared])
        dist.all_reduce(flat)
        flat /= count
        for p, grad in zip(
            shared, flat.split([p.numel() for p in shared]), strict=True
        ):
            p.grad.copy_(grad.view_as(p))
        for p in own:
            p.grad /= count

    return model, loss_of(model), own_part, reduce


def _own_experts(whole: Any, count: int) -> Any:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    class OwnExperts(nn.Module):
        """This rank's experts; rows of others' are sent to them and come back."""

        def __init__(self) -> None:
            super().__init__()
            rank = dist.get_rank()
            up, down = (
                p.detach().chunk(count)[rank].clone()
                for p in (whole.gate_up_proj, whole.down_proj)
            )
            self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)
            self.act = whole.act_fn

        def forward(self, x: Any, ids: Any, weights: Any) -> Any:
            group, k, mine = dist.group.WORLD, ids.shape[1], len(self.down_proj)
            order = ids.flatten().argsort(stable=True)
            counts = ids.flatten().bincount(minlength=mine * count)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sent = counts.view(count, mine).sum(1).tolist()
            got = theirs.view(count, mine).sum(1).tolist()
            rows = all_to_all_single_autograd(x[order // k], got, sent, group)
            expert = torch.arange(mine).repeat(count).repeat_interleave(theirs)
            back = expert.argsort(stable=True)
            parts = rows[back].split(expert.bincount(minlength=mine).tolist())
            made = torch.cat([self._one(i, part) for i, part in enumerate(parts)])
            made = torch.empty_like(made).index_copy(0, back, made)
            made = all_to_all_single_autograd(made, sent, got, group)
            made = made * weights.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, order // k, made)

        def _one(self, i: int, rows: Any) -> Any:
            gate, up = (rows @ self.gate_up_proj[i].T).chunk(2, -1)
            return (self.act(gate) * up) @ self.down_proj[i].T

    return OwnExperts()


BUILD = {"fsdp2": fsdp2, "hand": by_hand, "fxpar": fxpar_side}


def worker(pairs: int, out: str) -> None:
    """What each rank runs: all sides warm up, then alternate."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count = dist.get_world_size()
    whole = sum(p.numel() for n, p in mixtral().named_parameters() if "experts" in n)
    steps: dict[str, Callable[[int], float]] = {}
    figures: dict[str, dict[str, Any]] = {}
    losses: dict[str, float] = {}
    for name, build in BUILD.items():
        model, called, part, behind = build(count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

        def step(
            index: int,
            name: str = name,
            called: Any = called,
            part: Any = part,
            behind: Any = behind,
            optimizer: Any = optimizer,
        ) -> float:
            generator = torch.Generator().manual_seed(index)
            ids = part(torch.randint(WORDS, (BATCH, LENGTH), generator=generator))
            dist.barrier()
            begun = time.perf_counter()
            loss = called(ids)
            loss.backward()
            behind()
            optimizer.step()
            optimizer.zero_grad()
            taken = time.perf_counter() - begun
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[name] = float(mean) / count
            return taken

        for index in range(WARMUP):
            step(index)
        seen = watched(lambda: step(WARMUP))
        held = [local(p) for n, p in model.named_parameters() if "experts" in n]
        figures[name] = {
            "loss": losses[name],
            "state": state_bytes(model, optimizer),
            "experts": sum(p.numel() for p in held) / whole,
            "sent": seen.figures(),
            "peak": seen.peak,
        }
        steps[name] = step
    first = figures["fsdp2"]["loss"]
    worst = max(abs(1 - each["loss"] / first) for each in figures.values())
    if worst > AGREE:
        raise SystemExit(f"losses differ by {worst:.1e} relative: no comparison")
    times = torch.zeros(pairs, len(SIDES), dtype=torch.float64)
    for k in range(pairs):
        order = list(enumerate(steps.values()))
        for i, step_of in order if k % 2 == 0 else reversed(order):
            times[k, i] = step_of(WARMUP + 1 + k)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    for i, name in enumerate(steps):
        figures[name]["seconds"] = times[:, i].tolist()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    pairs = 5 if args.short else 30
    if args.worker:
        worker(pairs, args.worker)
        return
    before = conditions()
    figures = on_ranks(__file__, args.ranks, *["--short"] * args.short)
    for name, each in figures.items():
        sent = each["sent"]["moved"]
        print(
            f"ep={args.ranks}  {name:6} {statistics.median(each['seconds']):.3f} s a "
            f"step  sends {sent / 2**20:6.1f} MiB  state {each['state'] / 2**20:6.1f} "
            f"MiB  experts {each['experts']:.2f}  peak {each['peak'] / 2**20:6.1f} MiB"
        )
    for name in ("fsdp2", "hand"):
        pairs_of = zip(
            figures["fxpar"]["seconds"], figures[name]["seconds"], strict=True
        )
        print(f"fxpar/{name} {statistics.median(a / b for a, b in pairs_of):.2f}")
    write(args.json, "bench_mixtures", {"conditions": before, "figures": figures})


if __name__ == "__main__":
    main()
