"""Keep plans on disk: what a search found, for the next run of the same program.

In: the normalized program and the request. Out: the plan found before, or None. A file
holds one plan; its name is the digest of everything the search depends on: ops with
their arguments, shapes, dtypes and rules, hints, specs of inputs and outputs, meshes,
the hardware's figures, the memory budget, and the versions of torch and of fxpar's own
code. Never: an error for a file that cannot be read or is another's, which counts as
none; a file deleted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar import _torch, cache_files
from fxpar._torch.symbols import SYMBOLIC
from fxpar.graph.graph_bodies import named_body
from fxpar.sharding.candidates import EQUAL
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.units import digest

FORMAT = "fxpar plan on disk 2"


def is_on() -> bool:
    """Return whether torch's caches are in use (TORCHINDUCTOR_FORCE_DISABLE_CACHES)."""
    return not _torch.inductor.is_cache_disabled()


def key_of(program: Program, graph: fx.Graph, request: Request) -> str:
    """Return the digest of all that the search for ``request`` depends on, except its
    seconds.

    graph: as it was traced, open sizes as symbols. program: with the sizes it was
    traced with, for which a plan is searched.
    """
    mode = request.mode
    assert isinstance(mode, SearchOptions)
    lines = (
        FORMAT,
        torch.__version__,
        _torch.version.own_version(),
        repr(replace(mode, seconds=0.0)),
        repr([request.mesh, *request.meshes, *request.staged]),
        repr((request.pipeline, request.pipeline_order)),
        repr(request.as_planned),
        repr(list(request.hints.items())),
        repr(
            (not request.options.reshard_after_forward, sorted(request.options.disable))
        ),
        repr(request.microbatches),
        repr((sorted(program.reduce_here), program.balances, program.even)),
        *lines_of(graph),
        repr([value.shape for value in program.values]),
        *_rules(program),
    )
    return digest("\n".join(lines), 64)


def lines_of(graph: fx.Graph) -> Iterator[str]:
    """Yield the nodes of a graph and its bodies with their arguments and the forms of
    their results, a line each."""

    def rebuilt(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.stride(), str(value.device)
        if isinstance(value, SYMBOLIC):
            return str(value)
        return (
            tuple(map(rebuilt, value))
            if isinstance(value, (list, tuple))
            else type(value)
        )

    for node in graph.nodes:
        target = _target_text(node.target)
        call = f"{node.name} {node.op} {target} {node.args} {node.kwargs}"
        yield f"{call} {rebuilt(node.meta.get('val'))}"
        body = named_body(node)
        if body is not None:
            yield from lines_of(body.graph)


@lru_cache(maxsize=1 << 12)
def _target_text(target: Any) -> str:
    if inspect.isroutine(target):  # its address would differ between runs
        return f"{target.__module__}.{target.__qualname__}"
    return _torch.node_texts.text_of_op(target)


def _rules(program: Program) -> Iterator[str]:
    """Yield the rules of the ops: users may have changed some."""
    texts: dict[int, str] = {}
    for op in program.ops:
        if id(op.rule) not in texts:
            rule = op.rule
            plain = replace(rule, whole=frozenset(), equal_over=frozenset())
            texts[id(rule)] = f"{plain} {sorted(rule.whole)} {sorted(rule.equal_over)}"
        yield texts[id(op.rule)]


def load(key: str, seconds: float) -> tuple[Plan, bool] | None:
    """Return the plan under ``key``, with a note that it was found before, and whether
    its schedule was chosen then. None if there is none, or only one that a search of
    more ``seconds`` than it had could better."""
    path = _path(key)

    def decode(data: dict[str, Any]) -> tuple[Plan, bool] | None:
        if not data["proved"] and data["seconds"] < seconds:
            return None
        plan = Plan.from_dict(data["plan"])
        proved = "proved" if data["proved"] else "not proved"
        note = f"stored plan: {path} (gap {data['gap']:.2g}, {proved}, searched "
        note += f"{data['seconds']:g} s)"
        return replace(plan, notes=(*plan.notes, note)), data["chosen"] is True

    return cache_files.read_record(path, FORMAT, key, decode)


def save(
    key: str, plan: Plan, result: SearchResult, seconds: float, *, chosen: bool
) -> None:
    """Save the plan that a search of so many ``seconds`` found, unless wall-clock time
    stopped the search; ``chosen``: whether its schedule was chosen, too. Where the disk
    refuses, nothing is kept."""
    proved = result.is_proved and result.rivals >= result.predicted * (1 - EQUAL)
    if not proved and result.solution.stopped:
        return
    data = {
        "proved": proved,
        "gap": result.solution.gap,
        "seconds": seconds,
        "chosen": chosen,
        "plan": plan.to_record(),
    }
    cache_files.write_record(_path(key), FORMAT, key, data)


def _path(key: str) -> Path:
    return cache_files.folder() / f"{key}.json"
