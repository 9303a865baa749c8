"""What it costs that ranks meet at every call of a compiled graph and compare inputs.

    python benchmarks/bench_calls.py [--json FILE] [--rounds N] [--part steps|own]

Two gloo ranks train a small Llama (hidden 256, 2 layers, 4 x 64 tokens). In turns,
steps run as they are and with the meeting left out; the ratio is of pairs, with
quartiles. ``alone``: one meeting by itself, through memory and through the store in
turns, what a call takes besides the compiled program (``ours``), and one sum of inputs,
in microseconds.

``own``: what a call takes besides the compiled program and the meeting, in
microseconds, of a model with 20 parameters, with sizes fixed and left open: ``again``,
on sizes that were there before, ``new``, on a length in the range that was not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import conditions

RANKS = 2


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(q, 4) for q in statistics.quantiles(values, n=4)]


def laps_us(fn: Any, count: int = 200) -> list[float]:
    laps = []
    for _ in range(count):
        begin = time.perf_counter()
        fn()
        laps.append((time.perf_counter() - begin) * 1e6)
    return laps


def median_us(fn: Any, count: int = 200) -> float:
    return round(statistics.median(laps_us(fn, count)), 1)


def both_ways(fn: Any, rounds: int = 10) -> dict[str, list[float]]:
    """Quartiles with words in memory that ranks share, and through the store alone."""
    from fxpar.runtime.ranks import meeting

    channel = meeting.current()
    boxes, laps = channel.boxes, {"memory": [], "store": []}
    for _ in range(rounds):
        for way, each in (("memory", boxes), ("store", None)):
            channel.boxes = each
            dist.barrier()
            laps[way] += laps_us(fn, 50)
    channel.boxes = boxes
    return {way: quartiles(each) for way, each in laps.items()}


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(64, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(9))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        logits = self.scale * h @ self.embed.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def own_main(rank: int, port: int, inputs: str, rounds: int, out: str) -> None:
    """``own`` of one way to feed."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    result: dict[str, Any] = {"inputs": inputs, "ranks": RANKS, "rounds": rounds}
    result |= _own(inputs, (64, 64), rounds)
    result |= _own(inputs, (64, 48, 80), rounds)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _own(inputs: str, lengths: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """``own`` behind calls of these lengths, which stay open if they differ."""
    from fxpar.runtime.calls import call_variants
    from fxpar.runtime.calls.call_variants import Calls
    from fxpar.runtime.calls.compiled_graph import Compiled
    from fxpar.runtime.ranks import meeting

    torch._dynamo.reset()
    is_open, graphs, seen = len(set(lengths)) > 1, [], []
    run_graph, call = Compiled.__call__, Calls.__call__
    # What runs in the program's place is the same however it was compiled.
    options = {"mesh": "dp=2", "plan": "propagate", "inputs": inputs}
    options |= {"codegen": "eager", "schedule": "none"}
    run = torch.compile(Layers(), backend="fxpar", options=options, dynamic=is_open)

    def noted_graph(self: Any, *args: Any) -> Any:
        graphs.append((self, run_graph(self, *args)))
        return graphs[-1][1]

    def noted_call(self: Any, *args: Any) -> Any:
        seen.append((self, args))
        return call(self, *args)

    with (
        mock.patch.object(Compiled, "__call__", noted_graph),
        mock.patch.object(Calls, "__call__", noted_call),
    ):
        for length in lengths:
            ids = torch.ones(4, length, dtype=torch.int64)
            run(ids, ids.clone())
    (graph, outputs), (calls, args) = graphs[-1], seen[-1]
    graph.compiled = lambda *_: outputs
    channel = meeting.current()
    assert channel is not None

    def meet(place: str, word: str, what: str) -> list[str]:
        channel.meetings += 1
        return [word] * RANKS

    channel.meetings += 100  # the first calls compare more
    with mock.patch.object(call_variants, "meet", meet):
        laps = [median_us(lambda: calls(*args)) for _ in range(rounds)]
        if not is_open:
            return {"fixed_again_us": quartiles(laps)}
        new = [_new_length_us(calls, args, 80 + i) for i in range(1, rounds)]
    return {"open_again_us": quartiles(laps), "open_new_us": quartiles(new)}


def _new_length_us(calls: Any, args: Sequence[Any], length: int) -> float:
    """Of one call with sequences of this length."""
    args = [
        x.new_ones(4, length)
        if isinstance(x, torch.Tensor) and x.dtype == torch.int64
        else length
        if isinstance(x, int)
        else x
        for x in args
    ]
    begin = time.perf_counter()
    calls(*args)
    return (time.perf_counter() - begin) * 1e6


def rank_main(rank: int, port: int, inputs: str, rounds: int, out: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from fxpar.runtime.calls import call_variants
    from fxpar.runtime.calls.call_variants import Calls
    from fxpar.runtime.ranks.check_inputs import quick_sum

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
    )
    model = LlamaForCausalLM(config)
    options = {"mesh": "dp=2", "plan": "propagate", "inputs": inputs}
    run = torch.compile(model, backend="fxpar", options=options)
    ids = torch.randint(0, 1024, (4, 64))
    ids = ids if inputs == "global" else ids.chunk(RANKS)[rank].clone()
    meet, last = call_variants.meet, [[""]]

    def met(place: str, word: str, what: str) -> list[str]:
        last[0] = meet(place, word, what)
        return last[0]

    def step(meets: bool) -> float:
        call_variants.meet = met if meets else lambda *_: last[0]
        dist.barrier()
        begin = time.perf_counter()
        run(input_ids=ids, labels=ids).loss.backward()
        dist.barrier()
        seconds = time.perf_counter() - begin
        model.zero_grad()
        return seconds

    call, seen = Calls.__call__, []

    def noted(self: Any, *args: Any) -> Any:
        seen.append((self, args))
        return call(self, *args)

    for _ in range(3):
        step(True)
    pairs = []
    for i in range(rounds):
        order = (True, False) if i % 2 else (False, True)
        laps = {meets: step(meets) for meets in order}
        pairs.append((laps[True], laps[False]))
    image = torch.randn(32, 3, 224, 224)
    call_variants.meet = meet
    with mock.patch.object(Calls, "__call__", noted):
        run(input_ids=ids, labels=ids)
    calls, args = seen[-1]
    (program,) = calls.ready.values()
    program.compiled = lambda *_: ()
    result = {
        "inputs": inputs,
        "ranks": RANKS,
        "rounds": rounds,
        "step_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 2),
        "ratio": quartiles([a / b for a, b in pairs]),
        "alone": {
            "meeting_us": both_ways(lambda: meet("nothing", "x" * 200)),
            "ours_us": both_ways(lambda: calls(*args)),
            "sum_of_ids_us": median_us(lambda: quick_sum(ids)),
            "sum_of_19_MB_us": median_us(lambda: quick_sum(image), 20),
        },
    }
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


PARTS = {"steps": rank_main, "own": own_main}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--part", choices=PARTS)
    args = parser.parse_args()
    results, before = [], conditions()
    for part in (args.part,) if args.part else PARTS:
        for inputs in ("global", "local"):
            # As torchrun does: the store is in a process of its own.
            store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
            with tempfile.TemporaryDirectory() as folder:
                out = f"{folder}/result.json"
                given = store.port, inputs, args.rounds, out
                mp.spawn(PARTS[part], given, nprocs=RANKS)
                results.append({"part": part} | json.loads(Path(out).read_text()))
            print(json.dumps(results[-1]))
    if args.json:
        data = {"conditions": before, "rows": results}
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
