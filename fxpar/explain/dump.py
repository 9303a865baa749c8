"""Write every stage as text and as Python: ``FXPAR_DUMP`` and ``FXPAR_DEBUG``.

In: a graph after a step, or a plan. Out: ``DUMP/<graph>/<n>_<stage>.txt`` holds one
line per node with its shape and the user's line; ``.py`` the stage as a module; the log
and warnings hold what a plan reports. Debug levels: 1 the plan's summary, 2 the plan, 3
the local graph, 4 every stage. Never: a change to a graph.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar.config import Options, write_dump
from fxpar.errors import warn
from fxpar.graph.graph_bodies import body_of
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_text import line_text, short_dtype
from fxpar.sharding.program import user_line
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec
from fxpar.units import short_bytes

log = logging.getLogger("fxpar")

# How many ops are named of those that a step changed.
_OPS = 12


def node_text(node: fx.Node, specs: Sequence[Spec] = ()) -> str:
    """Return a line for a node: its result, shape, ``specs``, call and user line."""

    def shape(val: Any) -> str:
        if isinstance(val, torch.Tensor):
            return f"{short_dtype(str(val.dtype))}{[int(n) for n in val.shape]}"
        if isinstance(val, (tuple, list)):
            return f"({', '.join(shape(v) for v in val)})"
        return type(val).__name__

    name = f"{node.name}: {' '.join(map(str, (shape(node.meta.get('val')), *specs)))}"
    if node.op == "placeholder":
        return f"{name} = input"
    if node.op == "output":
        return f"return {node.args[0]}"
    args = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    line = user_line(node)
    cause = node.meta.get("fxpar_cause")
    note = f"  # {cause or line}" if cause or line else ""
    return f"{name} = {target_text(node.target)}({', '.join(args)}){note}"


def target_text(target: Any) -> str:
    """Return the name of the op that a node calls."""
    if inspect.isroutine(target):  # its address would differ between ranks
        return target.__name__
    return str(target)


def graph_text(
    graph: fx.Graph, specs: Mapping[fx.Node, Sequence[Spec]] | None = None
) -> str:
    """Return a whole graph, a line per node; bodies that ops run below their names.
    ``specs``: of the tensors that nodes make, where they are decided."""
    lines = []
    for node in graph.nodes:
        lines.append(node_text(node, (specs or {}).get(node, ())))
        body = body_of(node)
        if body is not None:
            inside = graph_text(body.graph).splitlines()
            lines += [f"    {line}" for line in inside]
    return "\n".join(lines) + "\n"


def graph_python(graph: fx.Graph) -> str:
    """Return a graph as a Python module with a function ``forward`` that runs it: a
    tensor per input, whatever calling convention the graph has; ``self`` holds its
    constants."""
    plain = fx.Graph()
    plain.output(plain.graph_copy(graph, {}))
    code = plain.python_code("self")
    names = (name for name, obj in code.globals.items() if obj is None)
    imports = "\n".join(f"{name} = None  # bound below" for name in names)
    import_lines = {
        "torch": "import torch",
        "device": "from torch import device",
        "inf": "from math import inf",
        "nan": "from math import nan",
        "NoneType": "from types import NoneType",
        "operator": "import operator",
    }
    lines = ["import torch", "import operator", "import fxpar.pipeline"]
    lines += ["from fxpar import _torch", "from fxpar.features import register_ops"]
    lines += [import_lines[name] for name in code.globals if name in import_lines]
    lines += [
        f"from {obj.__module__} import {obj.__name__} as {name}"
        for name, obj in code.globals.items()
        if name not in import_lines
        and hasattr(obj, "__module__")
        and hasattr(obj, "__name__")
    ]
    register = "\n\nregister_ops()\n"  # those of features, and of Inductor
    if "prims.inductor_" in code.src:
        register += '_torch.inductor.inductor_prim("seeds")\n'
    return "\n".join(dict.fromkeys(lines)) + register + imports + code.src


def show_stage(
    graph: fx.Graph,
    stage: str,
    label: str,
    number: int,
    *,
    debug: int,
    dump: str | None,
    specs: Mapping[fx.Node, Sequence[Spec]] | None = None,
) -> None:
    """Print or write a stage of a graph, the ``number``-th, as the options ask.
    ``label``: of the graph, and its folder; ``specs``: as of ``graph_text``. Raises
    OptionError if it cannot be written."""
    if debug >= 4 or (debug == 3 and stage == "local"):
        log.warning("%s: %s\n%s", label, stage, graph_text(graph, specs))
    if dump:
        stem = Path(dump) / label / f"{number}_{stage}"
        write_dump(stem.with_suffix(".txt"), graph_text(graph, specs))
        write_dump(stem.with_suffix(".py"), graph_python(graph))


def op_counts(graph: fx.Graph) -> Counter[str]:
    """Return how often each op is called."""
    return Counter(
        target_text(node.target) for node in graph.nodes if node.op == "call_function"
    )


def show_step(
    label: str, step: str, seconds: float, before: Counter[str], after: Counter[str]
) -> None:
    """Print a step of the pipeline with its seconds, and the ops whose number it
    changed: ``graph0: bucket 0.01 s: all_reduce.default 5 -> 2``."""
    changed = [op for op in {**before, **after} if before[op] != after[op]]
    changes = [f"{op} {before[op]} -> {after[op]}" for op in changed[:_OPS]]
    if len(changed) > _OPS:
        changes.append(f"{len(changed) - _OPS} more")
    text = ", ".join(changes) or "the same ops"
    log.warning("%s: %s %.3f s: %s", label, step, seconds, text)


def show_seconds(
    name: str, which: str, table: str, options: Options, rank: int
) -> None:
    """Print on rank 0 how long each stage took until a graph was compiled. ``which``:
    forward or backward; ``table``: a line for each stage."""
    if rank == 0 and options.debug >= 1:
        log.warning("%s: seconds until the %s is compiled\n%s", name, which, table)


def _is_repeated_silently(plan: Plan) -> bool:
    """Return whether ranks repeat a graph with parameters, and no note says so."""
    is_noted = any("repeat the same work" in note for note in plan.notes)
    if not plan.parameters or is_noted:
        return False
    specs = (spec for node in plan.nodes for spec in (*node.operands, *node.results))
    return not any(spec.sharded_axes for spec in specs)


# A kind of warning, as in ``warned``.
_WHOLE = "the plan splits nothing"


# Notes that begin so report a choice; all others are warnings.
_NEWS = (
    *("search: ", "schedule: ", "mesh ", "stored plan", "result ", "in parts: "),
    *("uneven: ", "shares: ", "stages: ", "gathered: ", "valid for "),
)


def report(
    plan: Plan,
    options: Options,
    rank: int,
    count: int,
    name: str,
    broken_at: str | None,
    warned: set[str],
) -> None:
    """Report a plan on rank 0: notes on what was chosen go to the log, others become
    warnings; the plan is printed or written if asked for.

    ``count``: of the ranks that it is for, those of a place where axes are manual;
    ``broken_at``: the user's line where Dynamo broke the graph, None if it did not.
    ``warned``: kinds of warnings that were given of the model, once each.
    """
    if rank != 0:
        return
    for note in plan.notes:
        if note.startswith(_NEWS):
            log.info("%s: %s", name, note)
        else:
            warn(f"{name}: {note}")
    one_stage = plan.of_one_stage() if plan.stages else plan
    count = count * one_stage.mesh.size // plan.mesh.size
    if count > 1 and _WHOLE not in warned and _is_repeated_silently(one_stage):
        warned.add(_WHOLE)
        whose = "all" if one_stage is plan else "in each stage all"
        text = f"{name}: {_WHOLE}, {whose} {count} ranks "
        text += "compute the whole of it: "
        if any(note.startswith(("search: ", "stored plan")) for note in plan.notes):
            text += "by the cost model every split takes longer than it saves"
        else:
            text += "no axis divides a dim that its ops can split, or hints keep them "
            text += "whole"
        fix = (
            "run python -m fxpar plan to see what splits would cost; or ask for "
            "one with "
        )
        fix += "hints, or fxpar.constrain"
        warn(text, fix=fix)
    # In local mode parts of the batch stay local: ``outside_graphs`` says what it
    # costs.
    if broken_at is not None and options.inputs == "global":
        gathered = [c for c in plan.collectives if c.source.startswith("output ")]
        text = (
            f"{name} ends in a graph break: its results become ordinary tensors, "
            f"whole on every rank ({short_bytes(sum(c.bytes for c in gathered))} "
            f"gathered in {len(gathered)} collectives)"
        )
        fix = (
            "write a branch by data with torch.where or torch.cond, or move what "
            "cannot be traced out of what is compiled; TORCH_LOGS=graph_breaks says why"
        )
        warn(text, where=broken_at, fix=fix)
    if options.debug >= 2:
        log.warning("%s\n%s", name, plan)
    elif options.debug == 1:
        log.warning("%s\n%s", name, plan.summary())
    elif options.progress:
        batch = batch_axes(plan.mesh) if options.inputs == "local" else ()
        text = line_text(plan, batch)
        log.warning("fxpar %s: %s (FXPAR_DEBUG=1 says more)", name, text)
    if options.dump:
        folder = Path(options.dump) / f"rank{rank}" / name
        write_dump(folder / "plan.json", plan.to_json())
        write_dump(folder / "plan.txt", str(plan))
