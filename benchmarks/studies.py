"""Writes the pages of ``studies/`` and the tables of the two READMEs from ``results/``.

    python benchmarks/studies.py [--write]

In: the JSON of runs. Out: a page for each row of ``STUDIES``, and the text between the
marks ``<!-- made by studies.py: NAME -->`` and ``<!-- end -->`` of a README; without
``--write`` the names of those that differ, and exit status 1 if there are any. Never: a
figure that is typed by hand, or a benchmark that is run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PAGES = HERE / "results", HERE / "studies"
READMES = (HERE / "README.md", HERE.parent / "README.md")

Row = Sequence[Any]


@dataclass(frozen=True)
class Table:
    """Is a table of one or several JSON files. ``rows`` takes their contents."""

    files: tuple[str, ...]
    # Heads of columns, with " | " between.
    heads: str
    rows: Callable[..., Iterable[Row]]
    # A sentence or two before the table, and after it.
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Study:
    """Is a page of ``studies/``."""

    name: str
    title: str
    about: str
    tables: tuple[Table, ...]


def number(x: Any) -> str:
    """Return a cell: floats with three digits, texts and integers as they are."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return str(x)
    if isinstance(x, int):
        return f"{x:,}"
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 0.1 else 3
    return f"{x:,.{digits}f}"


def ratio(x: dict[str, float]) -> str:
    """Return a median with its quartiles."""
    return f"{x['median']:.2f} [{x['q1']:.2f}, {x['q3']:.2f}]"


def mib(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / 2**20:,.1f}"


def seconds(times: Sequence[float]) -> str:
    """Return the median of measured seconds, and their quartiles if there are any."""
    if len(times) < 4:
        return f"{statistics.median(times):.3f}"
    low, mid, high = statistics.quantiles(times, n=4)
    return f"{mid:.3f} [{low:.3f}, {high:.3f}]"


# A run for each, since against DDP the benchmark of the other run shards parameters.
_STEPS = (
    *("step_ddp_cpu.json", "step_fsdp2_cpu.json"),
    *("step_tp_cpu.json", "step_sp_cpu.json"),
)
# The sides of a step, in the order of columns.
_SIDES = ("peer", "fxpar", "plain", "program")


def _step_cases(*files: Any) -> list[Any]:
    cases = (case for data in files for case in data["cases"])
    return sorted(cases, key=lambda case: case["mesh"].split("=")[1])


def _steps(*files: Any) -> Iterable[Row]:
    for case in _step_cases(*files):
        step, sent = case["step"], case["sent"]
        sides = [sent[side] for side in _SIDES]
        calls = (f"{x['collectives']}+{x['small_collectives']}" for x in sides)
        yield (
            case["peer"],
            case["mesh"],
            *(ratio(step[f"ratio{of}"]) for of in ("", "_program", "_of_update")),
            ratio(step["ratio_as_peer"]) if "ratio_as_peer" in step else "",
            ratio(step["ratio_of_plain"]),
            " / ".join(calls),
            " / ".join(mib(x["moved"]) for x in sides),
            " / ".join(mib(x["peak"]) for x in sides),
        )


def _plans(data: Any) -> Iterable[Row]:
    for run in data["runs"]:
        for case in run["cases"]:
            names = ("ratio", "ratio_sample", "ratio_propagate")
            names += ("ratio_propagate_sample",)
            cells = (ratio(case["step"][name]) for name in names)
            yield case["peer"], case["mesh"], *cells


def _memory(*files: Any) -> Iterable[Row]:
    for data in files:
        model = mib(next(iter(data["cases"].values()))["fxpar"]["whole"] / 4)
        for peer, sides in data["cases"].items():
            for side, held in sides.items():
                two = [(held[of], sides[peer][of]) for of in ("state", "peak")]
                pairs = (*two, map(sum, zip(*two, strict=True)))
                shown = [f"{a / b:.2f}" for a, b in pairs]
                shown = [""] * 3 if side == peer else shown
                yield model, peer, side, mib(held["state"]), mib(held["peak"]), *shown


def _first_steps(*files: Any) -> Iterable[Row]:
    for data in files:
        for case in data["cases"]:
            base = case["runs"]["ddp"]
            for side, runs in case["runs"].items():
                cells: list[Any] = []
                for state in ("cold", "warm"):
                    wall, cpu = (_median_of(runs[state], of) for of in _WALL_AND_CPU)
                    of_ddp = wall / _median_of(base[state], "first")
                    cells += [f"{wall:.1f} ({cpu:.1f})", f"{of_ddp:.2f}"]
                yield case["layers"], case["ranks"], side, *cells


_WALL_AND_CPU = ("first", "cpu")
_FIRST_STEPS = (
    "layers | ranks | side | cold: wall (CPU), s | of DDP | warm: wall (CPU), s | of "
    "DDP"
)


def _median_of(runs: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def _stages_of_a_first_step(*files: Any) -> Iterable[Row]:
    rows = [(data, row) for data in files for row in data["rows"]]
    names = dict.fromkeys(name for _, row in rows for name in row["stages"])
    for name in names:
        yield name, *(row["stages"].get(name, 0.0) for _, row in rows)
    yield "kernels", *(row["kernels"] for _, row in rows)


def _patches(data: Any) -> Iterable[Row]:
    for case in data["cases"]:
        for way, base in case["cpu"]["nothing"].items():
            for name, cpu in case["cpu"].items():
                of = f"{cpu[way] / base:.2f}"
                yield name, case["layers"], way, f"{cpu[way]:.1f}", of


def _mixtures(*files: Any) -> Iterable[Row]:
    for mesh, data in zip(("ep=2", "ep=4"), files, strict=True):
        for side, x in data["figures"].items():
            ours = data["figures"]["fxpar"]["seconds"]
            pairs = [a / b for a, b in zip(ours, x["seconds"], strict=True)]
            over = "" if side == "fxpar" else seconds(pairs)
            yield (
                mesh,
                side,
                seconds(x["seconds"]),
                over,
                *map(mib, (x["sent"]["moved"], x["state"], x["peak"])),
            )


def _uneven(data: Any) -> Iterable[Row]:
    for program, sides in data["figures"].items():
        for side, x in sides.items():
            over = "" if side == "fxpar" else ratio(x["ratio"])
            cells = map(mib, (x["bytes"], x["peak"], x["state"]))
            yield program, side, seconds(x["seconds"]), over, *cells


def _ways(data: Any) -> Iterable[Row]:
    for row in data["rows"]:
        mid, low, high = row["ms"]
        yield (
            *(row[name] for name in ("program", "way", "ops")),
            f"{row['flops of all'] / 1e6:,.1f}",
            row["bytes"],
            row["texts"],
            f"{mid:.1f} [{low:.1f}, {high:.1f}]",
        )


def _unlike(data: Any) -> Iterable[Row]:
    speeds = ", ".join(map(str, data["speeds"]))
    for way, times in data["seconds"].items():
        yield speeds, way, seconds(times), data["predicted"][way]


def _contexts(*files: Any) -> Iterable[Row]:
    for data in files:
        for tokens, sides in data["figures"].items():
            for side, x in sides.items():
                cells = x["seconds"], x["over_torch"], mib(x["peak"]), mib(x["sent"])
                yield data["ranks"], f"{int(tokens):,}", side, *cells


def _contexts_8b(data: Any) -> Iterable[Row]:
    names = ("machine", "tokens", "cp", "schedule", "tokens_per_second")
    for row in data["figures"]:
        yield *(row[name] for name in names), row.get("over_published", "")


def _pipelines(data: Any) -> Iterable[Row]:
    for side, x in data["figures"].items():
        yield side, x["seconds"], mib(x["held"]), mib(x["peak"])


def _found_stages(data: Any) -> Iterable[Row]:
    for row in data["rows"]:
        published = "; ".join(f"{what} {x:g}" for what, x in row["published"])
        for plan in row["plans"]:
            yield (
                row["model"],
                f"{row['ranks']} {row['hardware']}",
                plan["by"],
                plan["mesh"],
                plan.get("parts", ""),
                plan["seconds"],
                plan["tokens_per_device"],
                plan["tflops_per_device"],
                f"{plan['gap']:.2%}" if plan.get("gap") is not None else "",
                plan["took"] if plan.get("took") is not None else "",
                published,
            )


def _of_keys(keys: str) -> Callable[[Any], Iterable[Row]]:
    """Return a function from a file's ``rows`` to these keys of each."""

    def rows(data: Any) -> Iterable[Row]:
        return ([row[key] for key in keys.split()] for row in data["rows"])

    return rows


def _kernels_for_cuda(*files: Any) -> Iterable[Row]:
    """Give the rows by side and layers; those of a later file are newer."""
    rows = {(row["side"], row["layers"]): row for data in files for row in data["rows"]}
    sides = list(dict.fromkeys(side for side, _ in rows))
    for side, layers in sorted(rows, key=lambda key: (sides.index(key[0]), key[1])):
        row = rows[side, layers]
        triton = row["triton"] if row["configurations"] else "not asked"
        yield (
            *(side, layers, row["kernels"], row["lowering"], triton),
            *(row["launches"], row["moved_mib"], row["peak_mib"]),
        )


def _contest(data: Any) -> Iterable[Row]:
    for row in data["rows"]:
        taken = f"{row['seconds']:.0f} / {row['allowed']}"
        cost, gap = f"{row['ratio']:.4f}", f"{row['gap']:.2%}"
        yield row["problem"], row["nodes"], cost, gap, taken


def _ablation(data: Any) -> Iterable[Row]:
    parts = (part for part in data.values() if isinstance(part, dict))
    for part in (data, *(part for part in parts if "rows" in part)):
        for row in part["rows"]:
            gap = f"{row['gap']:.3%}" if "gap" in row else ""
            cells = (row.get(name) or "" for name in ("cost", "seconds"))
            yield row["problem"], row["without"], gap, *cells


_WAYS_OF_ACCPAR = ("one weird trick", "hypar", "accpar")


def _accpar(data: Any) -> Iterable[Row]:
    for row in data["alike"]:
        published = row["published"]
        pairs = ((row["ratio"][way], published[way]) for way in _WAYS_OF_ACCPAR)
        yield row["network"], *(f"{ours:.2f} ({theirs})" for ours, theirs in pairs)


def _accpar_unlike(data: Any) -> Iterable[Row]:
    for links, case in data["unlike"].items():
        for row in case["rows"]:
            equal = (row["speedup_equal_shards"][way] for way in _WAYS_OF_ACCPAR)
            best, share = row["speedup_accpar_ratio"], row["share_of_slower_group"]
            yield links, row["network"], *equal, best, share


def _accpar_plans(data: Any) -> Iterable[Row]:
    for network, row in data["rows"].items():
        yield network, *(row[name] for name in ("equal", "shares", "search", "gain"))


def _flexflow(data: Any) -> Iterable[Row]:
    for row in data["rows"]:
        plans = [row[name] for name in ("data", "search", "ranked", "walked")]
        left = plans[-1]
        sent = (f"{x['bytes'] / 1e9:.1f}" for x in (plans[0], left))
        yield (
            row["net"],
            f"{row['gpus']} {row['cluster']}",
            *(x["seconds"] * 1e3 for x in plans),
            plans[0]["seconds"] / left["seconds"],
            *sent,
            f"{len(left['left'])} of {left['parameters']}",
        )


def _flexflow_sync(data: Any) -> Iterable[Row]:
    for row in data["rows"]:
        plans = row["data"], row["search"]
        yield (
            row["net"],
            f"{row['gpus']} {row['cluster']}",
            *(x["seconds"] * 1e3 for x in plans),
            row["faster"],
            *(f"{x['parameter_bytes'] / 1e9:.1f}" for x in plans),
        )


def _gpu_runs(data: Any) -> Iterable[Row]:
    for i, run in enumerate(data["runs"], 1):
        yield i, data["machine"], run["beside"], run["seconds"]


def _one_gpu(data: Any) -> Iterable[Row]:
    names = ("what", "measured", "predicted", "target", "verdict")
    for i, run in enumerate(data["runs"], 1):
        for row in run["table"]:
            yield i, *(row[name] for name in names)


STUDIES = (
    Study(
        "steps",
        "A training step against its peers",
        "A Llama on 2 CPU cores over gloo, every side compiled by Inductor, in the "
        "same processes, in turns. fxpar does what the README says: against DDP one "
        "line, whose parameters stay whole, in a run of its own; else `fxpar.shard` "
        "without hints or a sample; a search; the schedule that it chooses. Four "
        "ranks share two cores.",
        (
            Table(
                _STEPS,
                (
                    "peer | mesh | fxpar / peer | train_step / peer | train_step "
                    "/ peer, optimizer compiled | with the peer's layout / peer "
                    "| fxpar / without a schedule | calls | MiB moved | MiB of "
                    "peak"
                ),
                _steps,
                "Ratios of whole steps are medians with quartiles. The last three "
                "columns are of peer / fxpar / without a schedule / train_step; calls "
                "are collectives plus those of at most 4 KiB; bytes count an "
                "all-reduce twice, as a ring sends it.",
                "`train_step` has the update in the program, and leaves out what "
                "nobody reads: of the peers of tensor parallelism, the gather of the "
                "logits.",
            ),
            Table(
                ("plans_cpu.json",),
                (
                    "peer | mesh | search | search, sample | propagate | "
                    "propagate, sample"
                ),
                _plans,
                "How parameters come to their layout, in a wider Llama: a step of "
                "`fxpar.shard` over the compiled peer's. `search` is the default.",
            ),
        ),
    ),
    Study(
        "memory",
        "What a rank holds",
        "Llamas of 4 layers, by MiB of their parameters: MiB of parameters and "
        "optimizer state on a rank, and the peak of a step beyond them. `fxpar` keeps "
        "parameters whole beside DDP, and is `fxpar.shard` else. Beside sequence "
        "parallelism it takes a plan that is faster and splits no activation of a "
        "norm.",
        (
            Table(
                ("memory_cpu.json", "memory_wide_cpu.json"),
                "model | peer | side | state | peak | state / peer | peak / peer "
                "| both / peer",
                _memory,
            ),
        ),
    ),
    Study(
        "first_step",
        "The first step",
        "Seconds to the end of the first step, with empty (cold) and filled (warm) "
        "caches, and CPU seconds of all ranks in brackets; medians of three on 2 "
        "cores. `as_ddp`: parameters whole; `fxpar`, `fxpar_tp`: `fxpar.shard` on dp "
        "and tp.",
        (
            Table(
                ("first_step_cpu.json",),
                _FIRST_STEPS,
                _first_steps,
                after="One rank compiles each graph for all. Of a cold start most is "
                "torch's own tracing, partitioning, lowering and C++ compiler.",
            ),
            Table(
                ("first_step_32_layers.json",),
                _FIRST_STEPS,
                _first_steps,
                "By layers: 32 take 2.1 times as long as 2, cold and warm.",
            ),
            Table(
                ("first_step_four_ranks.json",),
                _FIRST_STEPS,
                _first_steps,
                "On 4 ranks, which share 2 cores, each run once.",
            ),
            Table(
                ("layers_cpu.json", "layers_8b_cpu.json"),
                "stage | 2 layers | 8 layers | 32 layers | 32 of 8B width",
                _stages_of_a_first_step,
                "Seconds of each stage on one rank of dp=2,tp=4, up to the C++ text.",
            ),
            Table(
                ("layers_cuda.json", "layers_cuda_peers.json"),
                "side | layers | kernels | lowering, CPU s | Triton, CPU s | launches "
                "| MiB moved | MiB of peak",
                _kernels_for_cuda,
                "Inductor's code for an H100, forward and backward, of one rank of "
                "four, without a GPU and on a busy machine. In `compile` and `shard` "
                "layers are calls of one body. `ddp` is what DDP lets Inductor "
                "compile, `fsdp2` a model of `fully_shard` whose layers are compiled "
                "one by one: all use the code of the first. What is eager is not in "
                "it: collectives, and of `fsdp2` copies of parameters, embedding, head "
                "and loss; its peak is that of a layer. Nothing ran.",
            ),
            Table(
                ("patches_cpu.json",),
                "left out | layers | way | CPU s | of",
                _patches,
                "CPU seconds of a first step with one patch of `fxpar/_fast` left out, "
                "with none, and with all (`FXPAR_FAST=0`): of `fxpar.shard` on dp=2, "
                "2 ranks together, with caches `cold` and `warm`. Each once: a few per "
                "cent are noise. `late_templates` has gone since.",
            ),
            Table(
                ("patches_cuda.json",),
                "left out | layers | way | CPU s | of",
                _patches,
                "The same for an H100, without a GPU: one rank of dp=2, to the text of "
                "Triton kernels, while other jobs ran. `libraries` and "
                "`probes_remembered` act on the C++ compiler and between ranks.",
            ),
            Table(
                ("compile_cpu.json",),
                "layers | ranks | mesh | seconds | ops | collectives",
                _of_keys("layers ranks mesh total ops collectives"),
                "Planning a Llama of 8B width, each once. Ops grow with layers, and "
                "not with ranks; seconds are of a machine that others used.",
            ),
        ),
    ),
    Study(
        "mixtures",
        "A Mixtral with experts on ranks",
        "Two layers, eight experts, 2 cores. `hand`: torch's `all_to_all_single` in "
        "exact sizes around local experts, the rest replicated and not compiled. fxpar "
        "sends rows by exact numbers too, and gathers the other parameters, which are "
        "whole by hand.",
        (
            Table(
                ("mixtures_cpu.json", "mixtures_four_cpu.json"),
                (
                    "mesh | side | seconds | fxpar over it | MiB moved | MiB of "
                    "state | MiB of peak"
                ),
                _mixtures,
            ),
            Table(
                ("expert_axes.json",),
                ("model | mesh | batch | experts over | way | seconds | peak, bytes"),
                _of_keys("model mesh batch axes way seconds peak"),
                "Predicted for H100: where a plan splits the experts of Mixtral 8x7B "
                "and Qwen3-30B-A3B.",
            ),
        ),
    ),
    Study(
        "uneven",
        "Dims that no axis divides, and unlike ranks",
        "A step on two ranks of what others leave whole: GPT-2's 50,257 words, images "
        "split over height.",
        (
            Table(
                ("uneven_cpu.json",),
                (
                    "program | side | seconds | fxpar over it | MiB sent | MiB "
                    "of peak | MiB of state"
                ),
                _uneven,
            ),
            Table(
                ("uneven_ways.json",),
                (
                    "program | way | ops | million flops of all ranks | bytes "
                    "sent | graphs | ms"
                ),
                _ways,
                "Own sizes, as fxpar has them, and padding with masks.",
                "Where much is computed, masks cost more than a second graph. Own "
                "sizes need no rule to know which rows count, so that a forgotten mask "
                "cannot give a wrong number.",
            ),
            Table(
                ("unlike_cpu.json",),
                "speeds of ranks | shards | seconds | predicted",
                _unlike,
                "One rank slowed by a busy loop: shards of equal sizes, and by speed.",
            ),
        ),
    ),
    Study(
        "contexts",
        "Long sequences",
        "A small Llama, batch 1, forward and backward. `torch`: the balanced ring of "
        "its `context_parallel`, not compiled; `whole`: torch.compile on one rank; "
        "`gathered`, `chosen`: fxpar without and with a schedule. fxpar also gives "
        "every rank the logits of the whole sequence.",
        (
            Table(
                (
                    *("context_cpu.json", "context_16384_cpu.json"),
                    *("context_four_cpu.json", "context_16384_four_cpu.json"),
                ),
                (
                    "ranks | tokens | side | seconds | over torch | MiB of peak "
                    "| MiB sent"
                ),
                _contexts,
            ),
            Table(
                ("context_8b.json",),
                (
                    "machine | tokens | cp | schedule | tokens/s a GPU | over "
                    "torchtitan's, published"
                ),
                _contexts_8b,
                "Llama 8B on 8 H100, predicted. `float8` has products in float8 "
                "and attention at FlashAttention-2's rate (arXiv 2307.08691), as "
                "torchtitan's published run (benchmarks/llama3_h100_202412).",
                "What is published fits ranks whose queries are in order: the last "
                "rank sees all keys. FSDP, the update and conversions are not in the "
                "prediction.",
            ),
        ),
    ),
    Study(
        "pipelines",
        "Two stages",
        "A Llama of 4 layers on 2 ranks; by hand is torch.distributed.pipelining with "
        "compiled stages. Seconds of a step, MiB of state, and of the peak beyond it.",
        (
            Table(
                ("pipelines_cpu.json",),
                "side | seconds | MiB held | MiB of peak",
                _pipelines,
            ),
        ),
    ),
    Study(
        "stages",
        "Stages found for large models",
        "Predicted; nothing ran there. Alpa's GPTs, mixtures and Wide-ResNets on its "
        "V100s, GSPMD's Transformer on TPU v3, Llama on H100. Forward and backward "
        "alone, nothing computed again where the published runs compute the forward "
        "again.",
        (
            Table(
                ("stages.json",),
                (
                    "model | ranks | by | mesh | microbatches | seconds | "
                    "tokens/s a device | TFLOP/s a device | gap | search, s | "
                    "published"
                ),
                _found_stages,
            ),
        ),
    ),
    Study(
        "solver",
        "The solver of the search",
        "Problems of the ASPLOS 2025 contest on intra-operator parallelism, within its "
        "time limits, on 2 shared cores; and the solver with one phase left out.",
        (
            Table(
                ("iopddl.json",),
                ("problem | nodes | cost / best known | gap | seconds / allowed"),
                _contest,
            ),
            Table(
                ("solver_ablation.json",),
                "problem | left out | gap | cost | seconds",
                _ablation,
                after="Reduced-cost fixing, dominance, crossover, combination and "
                "column generation are no phases of the solver any more. Without "
                "dominance, crossover and a thinning of leaves, llama x8 at limits of "
                "0.6 and 0.75 and llama x32 at 0.6 cost the same, with gaps of 0.027%, "
                "0.016% and 0.020% as before, in 11 to 19 % less time. Without "
                "combination, which mixed "
                "answers of layers as one, llama x8 at 0.6 cost 0.008% more then, and "
                "as much now. With more patience in place of column generation, llama "
                "x8 and x32 at 0.6 have the same cost and gap.",
            ),
        ),
    ),
    Study(
        "accpar",
        "AccPar's problems",
        "Layers of types I (batch), II (inner) and III (outer dim) on a binary mesh of "
        "2^7, batch 512, solved level by level as AccPar (HPCA 2020) does; no device.",
        (
            Table(
                ("accpar.json",),
                "network | one weird trick | HyPar | AccPar",
                _accpar,
                "Communication of data parallelism over that of each method, in "
                "elements; in brackets what AccPar's published code gives.",
            ),
            Table(
                ("accpar.json",),
                (
                    "links | network | one weird trick | HyPar | AccPar, equal "
                    "shards | AccPar, best ratio | share of v2"
                ),
                _accpar_unlike,
                "128 chips of TPU v2 with 128 of v3: speed-up over data parallelism "
                "with equal shards, nothing overlapped.",
            ),
            Table(
                ("accpar_plans.json",),
                "network | equal shards, s | by speed, s | searched, s | gain",
                _accpar_plans,
                "Plans of the whole system for one TPU v3 and one v2, predicted.",
            ),
        ),
    ),
    Study(
        "flexflow",
        "FlexFlow's networks",
        "Predicted steps of six networks on two clusters. The paper charges every "
        "replica's push and pull one after the other; the second table does so too.",
        (
            Table(
                ("flexflow.json",),
                (
                    "network | GPUs | data parallel, ms | search, ms | ranked, "
                    "ms | walked, ms | gain | GB, data parallel | GB | "
                    "parameters that left"
                ),
                _flexflow,
                "Rings, with overlap.",
            ),
            Table(
                ("flexflow_sync.json",),
                (
                    "network | GPUs | data parallel, ms | search, ms | gain | GB "
                    "of parameters, data parallel | GB of parameters"
                ),
                _flexflow_sync,
                "The paper's cost of parameters, nothing overlapped.",
            ),
        ),
    ),
    Study(
        "schedules",
        "Schedules: CoCoNeT's programs and Megatron's blocks",
        "Predicted; nothing ran there.",
        (
            Table(
                ("coconet.json",),
                ("case | mesh | variant | lines | ms | speed-up | CoCoNeT reports"),
                _of_keys(
                    "case mesh variant lines milliseconds speedup reported",
                ),
                "16 DGX-2. The first variant of each case is what is divided.",
            ),
            Table(
                ("schedules_h100.json",),
                "case | schedule | ms | auto over it",
                _of_keys("case schedule milliseconds auto_over_it"),
                "Blocks of width 4096 on tp=8 of H100, 8 x 1024 tokens in bfloat16: "
                "the same slices with one way of `overlap` for each kind of "
                "collective.",
            ),
        ),
    ),
    Study(
        "one_gpu",
        "One H100",
        "Generated kernels, products with signals and a Llama on one H100. What is "
        "measured of a check, which has the verdict ok or FAILED and no target, is the "
        "largest difference. FAILED is also a part that was ended at its time limit. "
        "Nothing here is a link between GPUs.",
        (
            Table(
                ("one_gpu_h100.json",),
                "run | machine | what else ran on the GPU | seconds",
                _gpu_runs,
            ),
            Table(
                ("one_gpu_h100.json",),
                "run | what | measured | predicted | target | verdict",
                _one_gpu,
            ),
        ),
    ),
    Study(
        "calls",
        "What a call costs",
        "Microseconds of fxpar's own part of a call of a compiled program, on two "
        "ranks: median and quartiles.",
        (
            Table(
                ("calls_own_cpu.json",),
                "inputs | sizes fixed | sizes open, again | sizes open, new",
                _of_keys("inputs fixed_again_us open_again_us open_new_us"),
            ),
        ),
    ),
)


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _cell(x: Any) -> str:
    if isinstance(x, list):  # a median and its quartiles
        low, mid, high = map(number, sorted(x))
        return f"{mid} [{low}, {high}]"
    return number(x)


def _runs(data: Any) -> Iterable[str]:
    """Yield the command, date and load before of every run in a file."""
    if isinstance(data, list):
        for each in data:
            yield from _runs(each)
    elif isinstance(data, dict):
        if command := data.get("command"):
            more = [data["date"]] if "date" in data else []
            if load := data.get("load_before"):
                more.append(f"load {load:.1f}")
            command = re.sub(r" --json \S+", "", command)
            yield f"`{command}`" + (f" ({', '.join(more)})" if more else "")
        for each in data.values():
            yield from _runs(each)


def rendered(table: Table) -> str:
    """Return a table as Markdown, with the files and commands that it comes from."""
    data = [_read(name) for name in table.files]
    lines = [f"| {table.heads} |", "|---" * len(table.heads.split(" | ")) + "|"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in table.rows(*data)]
    sources = []
    for name, each in zip(table.files, data, strict=True):
        runs = dict.fromkeys(_runs(each))
        sources.append(f"[{name}](../results/{name}): {', '.join(runs)}")
    texts = (table.before, "\n".join(lines), table.after, "; ".join(sources) + ".")
    return "\n\n".join(text for text in texts if text)


def page(study: Study) -> str:
    """Return a study's page."""
    parts = [f"# {study.title}", study.about, *map(rendered, study.tables)]
    return "\n\n".join([*parts, "Made by `python benchmarks/studies.py --write`.\n"])


def _headline() -> str:
    """Return the table of a step over its peers by ranks."""
    names = {
        "ddp": "DDP",
        "fsdp2": "FSDP2",
        "tp": "DTensor TP",
        "sp": "DTensor TP with sequence parallelism",
    }
    cases: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for case in _step_cases(*map(_read, _STEPS)):
        cases[case["peer"]].append(case["step"])
    lines = ["| peer | 2 ranks | 4 ranks | `train_step`, 2 ranks | 4 ranks |"]
    lines.append("|---|---|---|---|---|")
    for peer, steps in cases.items():
        cells = [ratio(step["ratio"]) for step in steps]
        cells += [f"{step['ratio_program']['median']:.2f}" for step in steps]
        lines.append(f"| {names[peer]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _list_of_studies() -> str:
    """Return the list of pages."""
    return "\n".join(f"- [{x.title}](studies/{x.name}.md)" for x in STUDIES)


MADE = {"headline": _headline, "studies": _list_of_studies}
_MARKED = re.compile(r"(<!-- made by studies.py: (\w+) -->\n).*?(\n<!-- end -->)", re.S)


def _with_tables(text: str) -> str:
    """Return a README with what stands between marks made anew."""
    return _MARKED.sub(lambda found: found[1] + MADE[found[2]]() + found[3], text)


def texts() -> dict[Path, str]:
    """Return every file that this script makes, and its text."""
    pages = {PAGES / f"{study.name}.md": page(study) for study in STUDIES}
    return pages | {path: _with_tables(path.read_text()) for path in READMES}


def stale() -> list[str]:
    """Return names of files that are not as this script makes them."""
    made = texts()
    wrong = [
        path.name
        for path, text in made.items()
        if not path.exists() or path.read_text() != text
    ]
    return wrong + [path.name for path in PAGES.glob("*.md") if path not in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what differs")
    if parser.parse_args().write:
        PAGES.mkdir(exist_ok=True)
        for path, text in texts().items():
            path.write_text(text)
    wrong = stale()
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
