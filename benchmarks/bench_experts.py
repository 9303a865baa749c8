"""Plans the search finds beside plans of experts, under one cost model.

    python benchmarks/bench_experts.py [--short] [--json FILE] [--models NAME ...]

Seven models of realistic size (``expert_models``) on fake tensors in bfloat16, forward
and backward of the loss, planned for H100s. An expert's plan is hints, propagated, and
says where parameters rest; it is priced with the cheapest reshards there are. Beside it
stands the plan found for parameters that rest there too, with no more memory than 80 GB
or what the expert takes: never slower, or the search is wrong. ``free`` is the plan
found where parameters may rest anywhere, within 80 GB. Each model runs in a process of
its own, on one core; tracing is left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from _common import conditions, write
from expert_models import MODELS, Hints, Model

MESHES = ("dp=8", "tp=8", "dp=2,tp=4", "dp=8,tp=8")
# model, layers (0: all), meshes
ROWS: list[tuple[str, int, tuple[str, ...]]] = [
    *((name, 2, MESHES) for name in MODELS),
    ("gpt2-medium", 0, ("dp=2,tp=4",)),
    ("llama-8b", 0, ("dp=8,tp=8",)),
]
SHORT = [("gpt2-medium", 2, ("dp=2,tp=4",))]
HARDWARE, SECONDS = "h100", 30.0


@dataclass(frozen=True)
class Expert:
    """``hints`` of its plan. ``rest``: name of a parameter -> where it lies."""

    name: str
    hints: Hints
    at_rest: Mapping[str, Any]


def program_of(
    model: Any, batch: Mapping[str, Any], mesh: Any = None, **how: Any
) -> Any:
    """The Program that a search sees: moments as sums, so that they can be split.
    ``mesh`` and ``how``: of the request, where the program depends on them."""
    from fxpar.passes.normalize.normalize_ops import MOMENTS, expand_moments
    from fxpar.pipeline import JOINT, JointState, run_steps
    from fxpar.runtime.tracing import TracedCall, read_signature
    from fxpar.sharding.mesh import Mesh
    from fxpar.sharding.plan_request import Request
    from fxpar.sharding.read_program import read

    call = TracedCall(model, (), dict(batch), True)
    module, mode = call.trace()
    signature = read_signature(
        module.graph,
        lambda kind, of, node: call.declare(kind, of, node, [None] * call.count),
    )
    state = JointState(
        graph=module.graph,
        request=Request(mesh or Mesh((("all", 1),)), signature, **how),
        fake_mode=mode,
        normalized=module.graph,
    )
    names = [step.name for step in JOINT]
    run_steps(JOINT[: names.index("look_up_plan")], state)
    moments = [node for node in module.graph.nodes if node.target in MOMENTS]
    expand_moments(moments, state.build)
    module.graph.eliminate_dead_code()
    return read(module.graph, signature)


def resting(program: Any, rest: Mapping[str, Any]) -> Any:
    """The program with parameters, and so their gradients, at rest where ``rest``
    says."""
    signature = program.signature
    inputs = tuple(
        replace(declared, at_rest=rest.get(declared.name))
        if declared.kind == "parameter"
        else declared
        for declared in signature.inputs
    )
    outputs = tuple(
        replace(out, at_rest=rest.get(out.name)) if out.kind == "gradient" else out
        for out in signature.outputs
    )
    return replace(
        program, signature=replace(signature, inputs=inputs, outputs=outputs)
    )


def experts(model: Model, program: Any, mesh: Any) -> Iterator[Expert]:
    """The plans of experts that a mesh has room for. Where there is one sample only,
    its sequence is split in place of the batch ("cp", context parallel)."""
    shapes = {
        declared.name: program.values[v].shape
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if v is not None and declared.kind == "parameter"
    }
    inputs = [i.name for i in program.signature.inputs if i.kind == "input"]
    every, names = tuple(mesh.names), set(mesh.names)

    def batch(axes: Sequence[str]) -> Hints:
        split = tuple(axes) or "?"
        return dict.fromkeys(inputs, ("?", split) if model.one else (split,))

    data = "cp" if model.one else "ddp"
    yield Expert(data, batch(every), lie(shapes, mesh, {}, names))
    yield Expert("fsdp", batch(every), lie(shapes, mesh, {}, set()))
    if model.experts:
        split = {model.experts: (every,)}
        yield Expert(
            "ddp+ep", {**batch(every), **split}, lie(shapes, mesh, split, names)
        )
    if "tp" not in names or not model.tp:
        return
    others = tuple(axis for axis in mesh.names if axis != "tp")
    hints = {**batch(others), **model.tp}
    rest = lie(shapes, mesh, model.tp, names)
    lengths = sequence_parallel(program, model, others, mesh.sizes["tp"])
    yield Expert("tp", hints, rest)
    if lengths:
        yield Expert("tp+sp", {**hints, **lengths}, rest)
    if others:
        opened = {
            pattern: tuple("tp?" if e == "tp" else "?" for e in entries)
            for pattern, entries in model.tp.items()
        }
        rest = lie(shapes, mesh, opened, {"tp"})
        yield Expert("fsdp+tp", {**hints, **opened}, rest)
        if lengths:
            yield Expert("fsdp+tp+sp", {**hints, **lengths, **opened}, rest)


def lie(
    shapes: Mapping[str, Sequence[int]], mesh: Any, table: Hints, decided: set[str]
) -> dict[str, Any]:
    """Where parameters rest under hints; axes not in ``decided`` go where they
    divide."""
    from fxpar.sharding.hints import entries
    from fxpar.sharding.propagate.at_rest import at_rest

    out = {}
    for name, shape in shapes.items():
        hits = [hint for p, hint in table.items() if fnmatch.fnmatchcase(name, p)]
        dims, closed = entries(hits[-1] if hits else (), len(shape), name)
        out[name] = at_rest(shape, mesh, dims, closed, decided)
    return out


def sequence_parallel(
    program: Any, model: Model, others: tuple[str, ...], ranks: int
) -> Hints:
    """Residual streams, [batch, sequence, width], split along the sequence by tp, and
    products with columns along the last dim, sequences not by tp. Nothing where a
    sequence does not divide."""
    import torch

    backward, out = program.backward, {}
    batch, length = ((), others) if model.one else (others, ())
    owner = owners(program)
    for op in program.ops:
        shapes = {program.values[v].shape for v in op.tensors}
        name, ndim = op.name, len(program.values[op.results[0]].shape)
        if op.index in backward or ndim < 3:
            continue
        if op.target is torch.ops.aten.add.Tensor and len(shapes) == 1 and ndim == 3:
            if next(iter(shapes))[1] % ranks:
                return {}
            out[name] = ((*batch, "?"), (*length, "tp"), "?")
        elif op.target is torch.ops.fxpar.dot.default:
            weight = next((owner[v] for v in op.operands if v in owner), "")
            if any(fnmatch.fnmatchcase(weight, p) for p in model.columns):
                out[name] = ((*batch, "?"), length, *[None] * (ndim - 3), "tp")
    return out


def owners(program: Any) -> dict[int, str]:
    """Values that are a parameter, or made from one alone -> its name."""
    out = {
        v: declared.name
        for declared, v in zip(program.signature.inputs, program.inputs, strict=True)
        if declared.kind == "parameter"
    }
    for op in program.ops:
        if len(op.operands) == 1 and op.operands[0] in out:
            out.update(dict.fromkeys(op.results, out[op.operands[0]]))
    return out


def compare(program: Any, mesh: Any, expert: Expert) -> dict[str, Any]:
    """What an expert's plan costs, and the one found with the same parameters at
    rest."""
    from fxpar.errors import FxparError
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.decide import decide
    from fxpar.sharding.search.formulate import cost_of, formulate

    machine = lookup(HARDWARE)
    on, program = machine.on(mesh), resting(program, expert.at_rest)
    decision = decide(program, on, expert.hints)
    formulation = formulate(program, on, machine)
    row: dict[str, Any] = {"expert": expert.name}
    try:
        theirs = cost_of(formulation, decision.strategies, SECONDS)
    except FxparError as error:
        return row | {"why": str(error)}
    seconds = theirs.cost + formulation.launches
    memory = max(machine.memory, theirs.peak * (1 + 1e-9))
    row |= {"propagated_seconds": seconds, "expert_peak": theirs.peak}
    row["expert_fits"] = theirs.peak <= machine.memory
    if "tp" in expert.name:
        kept = completed(program, mesh, expert, memory)
        seconds = min(seconds, kept.predicted)
        row |= {"completed_seconds": kept.predicted, "completed_gap": kept.solution.gap}
    found = free_search(program, mesh, memory)
    row |= {"expert_seconds": seconds, **told(found)}
    return row | {"expert_over_found": seconds / found.predicted}


def free_search(program: Any, mesh: Any, memory: float | None) -> Any:
    """What a search without hints finds, before plans are ranked by simulation: one
    cost model for all."""
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.decide import decide_on
    from fxpar.sharding.plan_request import Request
    from fxpar.sharding.search.run_search import SearchOptions

    asked = SearchOptions(lookup(HARDWARE), SECONDS, memory, ranked=False)
    return decide_on(program, Request(mesh, program.signature, {}, asked)).search


def completed(program: Any, mesh: Any, expert: Expert, memory: float) -> Any:
    """The best plan that keeps the expert's hints."""
    from fxpar.sharding.cost.hardware_table import lookup
    from fxpar.sharding.hints import match
    from fxpar.sharding.search.run_search import SearchOptions, search

    seeds: dict[int, list[Any]] = {}
    for seed in match(program, expert.hints, mesh):
        seeds.setdefault(seed.value, []).append(seed)
    return search(
        program, mesh, SearchOptions(lookup(HARDWARE), SECONDS, memory), seeds
    )


def told(found: Any) -> dict[str, Any]:
    """What a search comes to."""
    return {
        "found_seconds": found.predicted,
        "found_peak": found.solution.peak,
        "gap": found.solution.gap,
        "search_seconds": found.built + found.solution.seconds,
    }


def run(name: str, layers: int, meshes: Sequence[str]) -> Iterator[dict[str, Any]]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fxpar.errors import FxparError
    from fxpar.sharding.mesh import Mesh

    model = MODELS[name]
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        program = program_of(*model.build(layers or model.depth))
    for text in meshes:
        mesh = Mesh.parse(text)
        rows = [compare(program, mesh, e) for e in experts(model, program, mesh)]
        try:
            free = told(free_search(program, mesh, None))
        except FxparError as error:
            free = {"why": str(error)}
        yield {
            "model": name,
            "what": model.what,
            "layers": layers or model.depth,
            "ops": len(program.ops),
            "mesh": text,
            "free": free,
            "experts": rows,
        }


def show(row: Mapping[str, Any]) -> None:
    free = row["free"].get("found_seconds")
    best = f"{free * 1e3:.2f} ms" if free else row["free"]["why"]
    print(f"{row['model']} x{row['layers']} {row['mesh']}: free {best}")
    for e in row["experts"]:
        if "why" in e:
            print(f"  {e['expert']:11} {e['why']}")
            continue
        print(
            f"  {e['expert']:11} {e['expert_seconds'] * 1e3:9.2f} ms "
            f"({e['propagated_seconds'] * 1e3:.2f}) "
            f"{e['expert_peak'] / 2**30:6.1f} GiB"
            f"{' ' if e['expert_fits'] else '!'} found {e['found_seconds'] * 1e3:9.2f} "
            f"ms {e['found_peak'] / 2**30:6.1f} GiB, {e['expert_over_found']:.3f}, "
            f"gap {e['gap'] * 100:.3f}%, {e['search_seconds']:.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        for row in run(*json.loads(args.row)):
            print("ROW", json.dumps(row), flush=True)
        return
    before, out, begun = conditions(), [], time.time()
    for given in SHORT if args.short else ROWS:
        if given[0] not in args.models:
            continue
        command = [sys.executable, __file__, "--row", json.dumps(given)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROW"):
                out.append(json.loads(line.removeprefix("ROW")))
                show(out[-1])
        if process.wait():
            sys.exit(f"{given} failed")
    print(f"{time.time() - begun:.0f} s")
    write(args.json, "bench_experts", {"conditions": before, "rows": out})


if __name__ == "__main__":
    main()
