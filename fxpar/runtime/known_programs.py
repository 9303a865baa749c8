"""Programs that an earlier start compiled: their plan and results, by one key.

In: a Dynamo graph, the sizes it is fed and all that is asked for. Out: what is known of
the program, the same on all ranks: rank 0 looks, and tells. The start that compiles a
program first gives it a number, which enters the keys of torch's caches. So what they
hold under that number was made by this very plan: a rank that finds it there needs
neither tracing nor planning, and runs the same collectives as one that does not and
compiles by the known plan. A file that is damaged, of another version or of another
program counts as none.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar import cache_files
from fxpar.config import Options
from fxpar.errors import FxparError
from fxpar.passes import custom_ops
from fxpar.passes.graph_bodies import all_nodes
from fxpar.runtime import consensus, plan_store
from fxpar.runtime.groups import Ranks
from fxpar.runtime.program_identity import Named, fixed_content
from fxpar.sharding.hints import load
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import known_machine
from fxpar.sharding.rules import has_user_rules
from fxpar.sharding.spec import Spec

FORMAT = "fxpar program 1"


@dataclass(frozen=True)
class KnownProgram:
    """What is known of a program; no ``plan``: nothing but its key, and its number
    from now on."""

    key: str
    number: str
    plan: Plan | None = None
    # Specs of its results, by position.
    results: Mapping[int, Spec] = field(default_factory=dict)
    # Collectives of its forward, in order.
    launches: tuple[str, ...] = ()
    # Axes of the process groups that it uses, in the order they are made.
    groups: tuple[tuple[str, ...], ...] = ()


def look_up(text: str | None, tag: str) -> KnownProgram | None:
    """What is known of the program of this text, as rank 0 knows it; None if ranks have
    unlike programs, or one cannot be kept (no ``text``).

    Raises RankMismatchError if a rank does not come.
    """
    key = text and hashlib.sha256(text.encode()).hexdigest()
    said: dict[str, Any] = {"key": key}
    if key and consensus.leads():
        said["number"] = uuid.uuid4().hex
        said["record"] = cache_files.read_record(_path(key), FORMAT, key)
    every = [json.loads(x) for x in consensus.gather(tag, json.dumps(said))]
    if not key or any(each["key"] != key for each in every):
        return None
    first = every[0]
    known = _read(key, first["record"]) if first["record"] else None
    return known or KnownProgram(key, first["number"])


def _read(key: str, data: Mapping[str, Any]) -> KnownProgram | None:
    try:
        plan = Plan.from_dict(data["plan"])
        note = f"found before: {_path(key)}, nothing is planned"
        return KnownProgram(
            key,
            str(data["number"]),
            replace(plan, notes=(*plan.notes, note)),
            {int(i): Spec.parse(text) for i, text in data["results"].items()},
            tuple(data["launches"]),
            tuple(map(tuple, data["groups"])),
        )
    except (ValueError, TypeError, KeyError, AttributeError, FxparError):
        return None


def keep(
    known: KnownProgram,
    plan: Plan,
    results: Mapping[int, Spec],
    launches: Sequence[str],
    local: fx.Graph,
) -> None:
    """Leave a program on disk that was compiled now. ``local``: its graph."""
    data = {
        "number": known.number,
        "plan": plan.to_record(),
        "results": {str(i): str(spec) for i, spec in results.items()},
        "launches": list(launches),
        "groups": [list(axes) for axes in _groups_of(local)],
    }
    cache_files.write_record(_path(known.key), FORMAT, known.key, data)


def text_of(
    gm: fx.GraphModule,
    named: Sequence[Named],
    examples: Sequence[Any],
    options: Options,
    ranks: Ranks,
) -> str | None:
    """All that planning and compiling a graph depends on, as text that is the same at
    every start; None if there is no such text, or more is asked for than to compile."""
    more = options.tune or options.verify or options.dump or options.debug > 1
    more = more or options.fuse != "none" or not options.cache_plans or ranks.open
    named_plan = options.plan in ("search", "propagate", "replicate")
    if more or not named_plan or options.schedule not in ("auto", "none"):
        return None
    if options.codegen != "inductor" or not plan_store.allowed() or has_user_rules():
        return None
    program = fixed_content(gm, named, examples)
    return program and "\n".join(
        map(
            str,
            (
                *(FORMAT, torch.__version__, plan_store.own_version()),
                *(ranks.mesh.axes, ranks.mesh.links, options),
                *(list(load(options.hints).items()), known_machine(options)),
                program,
            ),
        )
    )


def _groups_of(graph: fx.Graph) -> list[tuple[str, ...]]:
    names = (
        arg
        for node in all_nodes(graph)
        for arg in node.args
        if isinstance(arg, str) and arg.startswith(custom_ops.GROUP_PREFIX)
    )
    return [custom_ops.group_axes(name) for name in dict.fromkeys(names)]


def _path(key: str) -> Path:
    return cache_files.folder() / f"{key}.program.json"
