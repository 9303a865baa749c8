"""Recall the plan and results of programs that an earlier start compiled, by one key.

In: a Dynamo graph, the sizes it is fed and all that is asked for. Out: a
``KnownProgram``, the same on all ranks: rank 0 looks it up and sends it. The start that
compiles a program first gives it a number, which enters the keys of torch's caches. So
what they hold under that number was made by this very plan: a rank that finds it there
needs neither tracing nor planning, and runs the same collectives as one that does not
and compiles by the known plan. Where nobody compiled it, rank 0 may do so for all: it
is the ``Leader``, and the others await it. Never: an error for a file that is damaged,
of another version or of another program; it counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar import _torch, cache_files
from fxpar._fast import cpp_kernels
from fxpar.config import Options
from fxpar.errors import HintError, PlanError, RuleError, ScheduleError
from fxpar.graph import custom_ops
from fxpar.graph.graph_bodies import all_nodes
from fxpar.runtime.caches import plan_store
from fxpar.runtime.caches.program_identity import NamedInput, fixed_content
from fxpar.runtime.calls.open_sizes import DivisorsAsked, OpenSizesRefused, refusal_of
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.ranks.meeting import current
from fxpar.sharding.hints import load
from fxpar.sharding.ops import has_user_rules
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import known_machine
from fxpar.sharding.spec import Spec

log = logging.getLogger("fxpar")

FORMAT = "fxpar program 4"


class PlanMisfit(Exception):
    """Says that a program's known plan does not fit the program as it is traced."""


@dataclass(frozen=True)
class KnownProgram:
    """Holds what is known of a program."""

    key: str  # digest of its text
    number: str  # its name in torch's caches, equal on all ranks (``name_of``)
    plan: Plan | None = None  # None: what follows is empty, too
    results: Mapping[int, Spec] = field(default_factory=dict)  # by position
    launches: tuple[str, ...] = ()  # collectives of its forward, in order
    # Axes of the process groups that it uses, in the order they are made.
    groups: tuple[tuple[str, ...], ...] = ()
    shared: bool = False  # rank 0 compiled it: its bound graph is equal on all
    written: tuple[int, ...] = ()  # positions of the inputs that it writes to
    # By name of an open size, the number that it must be a multiple of for the plan,
    # which is made for the program traced so; this one is not compiled.
    divisors: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""  # why its sizes cannot be left open; "" if they can

    def name_of(self, rank: int) -> str:
        """Return the name by which torch's caches know it on a rank."""
        per_rank = rank and not self.shared
        return f"{self.number}|{rank}" if per_rank else self.number


def look_up(text: str | None, tag: str, *, anew: bool = False) -> KnownProgram | None:
    """Return what rank 0 knows of the program with this text; None if ranks have
    different programs, or one cannot be kept (no ``text``). ``anew``: kept records are
    ignored.

    Raises RankMismatchError if a rank does not come.
    """
    key = text and hashlib.sha256(text.encode()).hexdigest()
    message: dict[str, Any] = {"key": key}
    if key and meeting.is_leader():
        message["number"] = uuid.uuid4().hex
        message["record"] = None
        if not anew:
            path = _path(key)
            message["record"] = cache_files.read_record(path, FORMAT, key, dict)
    every = meeting.gather_data(tag, message)
    if not key or any(each["key"] != key for each in every):
        return None
    first = every[0]
    program = _read(key, first["record"]) if first["record"] else None
    if program is not None and program.refused:
        return program
    if program is None or program.plan is None:
        return KnownProgram(key, first["number"])
    note = f"stored plan: {_path(key)}, nothing is planned"
    plan = replace(program.plan, notes=(*program.plan.notes, note))
    return replace(program, plan=plan)


def _read(key: str, data: Mapping[str, Any]) -> KnownProgram | None:
    """Return the program of a record; None if the record cannot be read."""
    try:
        if "refused" in data:
            number = str(data["number"])
            return KnownProgram(key, number, refused=str(data["refused"]))
        plan = Plan.from_dict(data["plan"])
        return KnownProgram(
            key,
            str(data["number"]),
            plan,
            {int(i): Spec.parse(text) for i, text in data["results"].items()},
            tuple(data["launches"]),
            tuple(map(plan.mesh.ordered, data["groups"])),
            bool(data["shared"]),
            tuple(data["written"]),
            {str(name): int(n) for name, n in data["divisors"].items()},
        )
    except Exception:  # a record of no known form may lead to any
        log.info("the stored record of a program cannot be read", exc_info=True)
        return None


def _record_of(program: KnownProgram) -> dict[str, Any]:
    """Return a program as data, which ``_read`` reads."""
    if program.refused:
        return {"number": program.number, "refused": program.refused}
    assert program.plan is not None, "it was planned"
    return {
        "number": program.number,
        "plan": program.plan.to_record(),
        "results": {str(i): str(spec) for i, spec in program.results.items()},
        "launches": program.launches,
        "groups": program.groups,
        "shared": program.shared,
        "written": program.written,
        "divisors": dict(program.divisors),
    }


def keep(program: KnownProgram) -> None:
    """Save on disk a program that was compiled or refused now."""
    record = _record_of(program)
    cache_files.write_record(_path(program.key), FORMAT, program.key, record)


def is_led(program: KnownProgram, examples: Sequence[Any]) -> bool:
    """Return whether rank 0 plans and compiles a program before all other ranks do:
    nobody did or failed to before, and they see its files. On CPUs alone: on others a
    schedule may fuse regions, whose kernels all ranks make together. ``examples``: the
    inputs."""
    channel = current()
    if program.plan is not None or program.refused or channel is None:
        return False
    tensors = (x for x in examples if isinstance(x, torch.Tensor))
    if any(x.device.type != "cpu" for x in tensors):
        return False
    return not _torch.inductor.is_cache_disabled() and len(set(channel.folders())) == 1


# Errors that depend on the program alone, at every start; not those of a rank that did
# not come.
_REFUSALS = (
    *(HintError, PlanError, RuleError, ScheduleError, OpenSizesRefused),
    _torch.symbols.Inexpressible,
)


@dataclass
class Leader:
    """Is rank 0 while it plans and compiles a program that the other ranks then take
    over. It sends messages to them; they wait in ``await_plan``, then in
    ``await_compiled``."""

    name: str  # name of the graph in messages between ranks
    program: KnownProgram
    is_open: bool  # whether its sizes are left open
    launches: Sequence[str]  # its collectives, in order, as they are found
    shared: bool = False  # whether the compiled code serves all ranks
    has_sent_plan: bool = False  # whether the others know the plan

    def tell_plan(self, planned: KnownProgram | None) -> None:
        """Send what was planned; None if nothing was, so that each rank finds out by
        itself what is wrong."""
        record = planned and _record_of(planned)
        meeting.gather(f"the plan of {self.name}", json.dumps(record))
        self.has_sent_plan = planned is not None

    def _tell_compiled(self, refused: str = "") -> None:
        """Send that it is compiled, or why sizes cannot be left open."""
        message: dict[str, Any] = {"shared": self.shared and not refused}
        message["launches"] = [] if refused else list(self.launches)
        message["refused"] = refused
        message["instructions"] = cpp_kernels.instructions()
        meeting.gather(f"{self.name} compiled on rank 0", json.dumps(message))

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Let the others wait while this runs, and hear of a failure or of the end."""
        with presence.works(f"compiles {self.name} for all ranks"):
            try:
                yield
            except Exception as error:
                self._tell_failure(error)
                raise
        if self.has_sent_plan:
            self._tell_compiled()
        else:
            self.tell_plan(None)

    def _tell_failure(self, error: Exception) -> None:
        """Send an error. With open sizes the others then do the same as this rank: fix
        the sizes, or trace with the divisors that the plan requires."""
        if isinstance(error, DivisorsAsked):
            planned = replace(self.program, plan=error.plan, divisors=error.divisors)
            self.tell_plan(planned)
        elif not self.is_open:
            if not self.has_sent_plan:
                self.tell_plan(None)
        elif self.has_sent_plan:
            self._tell_compiled(refusal_of(error))
        else:
            refused = replace(self.program, refused=refusal_of(error))
            self.tell_plan(refused)
            if isinstance(error, _REFUSALS):
                keep(refused)


def await_plan(graph: str, program: KnownProgram) -> KnownProgram | None:
    """Return what rank 0 planned, None if it failed.

    Raises RankMismatchError if rank 0 does not come.
    """
    text, *_ = meeting.gather(f"the plan of {graph}", "")
    record = json.loads(text)
    return record and _read(program.key, record)


def await_compiled(graph: str, program: KnownProgram) -> KnownProgram:
    """Return a planned program once rank 0 has compiled it.

    Raises RankMismatchError if rank 0 fails, or does not come.
    """
    text, *_ = meeting.gather(f"{graph} compiled on rank 0", "")
    message = json.loads(text)
    cpp_kernels.take_instructions(message["instructions"])
    return replace(
        program,
        shared=bool(message["shared"]),
        launches=tuple(message["launches"]),
        refused=str(message["refused"]),
    )


def text_of(
    gm: fx.GraphModule,
    inputs: Sequence[NamedInput],
    examples: Sequence[Any],
    options: Options,
    ranks: Ranks,
    requirements: Sequence[Any] = (),
) -> str | None:
    """Return all that planning and compiling a graph depends on, as text that is the
    same at every start; None if there is no such text, or options ask for more than
    compiling. ``requirements``: what else is required of the program, as its specs at
    rest."""
    uncacheable = options.tune or options.verify or options.dump or options.debug > 1
    uncacheable = (
        uncacheable or options.fuse != "none" or not options.cache_plans or ranks.open
    )
    named_plan = options.plan in ("search", "propagate", "replicate")
    if uncacheable or not named_plan or options.schedule not in ("auto", "none"):
        return None
    if options.codegen != "inductor" or not plan_store.is_on() or has_user_rules():
        return None
    content = fixed_content(gm, inputs, examples)
    return content and "\n".join(
        map(
            str,
            (
                *(FORMAT, torch.__version__, _torch.version.own_version()),
                *(ranks.mesh.axes, ranks.mesh.links, options),
                list(load(options.hints).items()),
                known_machine(options, ranks.whole.mesh.size),
                *(*requirements, content),
            ),
        )
    )


def groups_of(graph: fx.Graph) -> list[tuple[str, ...]]:
    """Return the axes of the process groups that a graph uses, in order."""
    names = (
        arg
        for node in all_nodes(graph)
        for arg in node.args
        if isinstance(arg, str) and arg.startswith(custom_ops.GROUP_PREFIX)
    )
    return [custom_ops.group_axes(name) for name in dict.fromkeys(names)]


def _path(key: str) -> Path:
    return cache_files.folder() / f"{key}.program.json"
