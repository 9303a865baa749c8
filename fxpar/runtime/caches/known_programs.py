"""Recall programs that an earlier start compiled, and compile on one rank for others.

In: a Dynamo graph, the sizes it is fed and all that is asked for. Out: a
``KnownProgram``, the same on all ranks: rank 0 looks it up and sends it. The start that
compiles a program first gives it a number, which enters the keys of torch's caches. So
what they hold under that number was made by this very plan: a rank that finds it there
needs neither tracing nor planning, and runs the same collectives as one that does not
and compiles by the known plan. Where nobody compiled it, rank 0 may do so for all: it
is the ``Leader``, and the others await it. Never: an error for a file that is damaged,
of another version or of another program; it counts as none.

Of other programs, ``compile_once`` lets one rank compile a graph that Inductor gets
identical on several: the first that comes compiles; the others that see the same folder
of caches wait for it and then compile in turn, which finds the result there. Machines
without a common folder compile at the same time. Ranks of all places share what they
compile. A rank whose graph differs (another size of shard, another device) waits for
nobody. A rank that fails reports it to those that wait; if one ends or hangs they wait
as for any other (``presence``). Never: code of another graph.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from fxpar import _torch, cache_files
from fxpar._fast import cpp_kernels
from fxpar._fast.python_memory import collect_young
from fxpar.config import Options
from fxpar.errors import HintError, PlanError, RuleError, ScheduleError
from fxpar.graph import custom_ops
from fxpar.graph.graph_bodies import all_nodes, named_body
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.runtime.caches import plan_store
from fxpar.runtime.caches.program_identity import fixed_content
from fxpar.runtime.calls.open_sizes import DivisorsAsked, OpenSizesRefused, refusal_of
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.ranks.meeting import (
    all_ranks,
    answering,
    current,
    error_of,
    watched,
)
from fxpar.runtime.ranks.presence import FAILED, Patience, failure, timeout
from fxpar.runtime.ranks.worlds import World
from fxpar.runtime.stage_times import INDUCTOR, stage
from fxpar.sharding.hints import load
from fxpar.sharding.ops import has_user_rules
from fxpar.sharding.plan import Plan
from fxpar.sharding.plan_request import known_machine
from fxpar.sharding.program import Input
from fxpar.sharding.spec import Spec
from fxpar.units import digest

log = logging.getLogger("fxpar")

FORMAT = "fxpar program 5"


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
    key = text and digest(text, 64)
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
        return KnownProgram(
            key,
            str(data["number"]),
            data["plan"] and Plan.from_dict(data["plan"]),
            {int(i): Spec.parse(text) for i, text in data["results"].items()},
            tuple(data["launches"]),
            tuple(map(tuple, data["groups"])),
            bool(data["shared"]),
            tuple(data["written"]),
            {str(name): int(n) for name, n in data["divisors"].items()},
            str(data["refused"]),
        )
    except Exception:  # a record of no known form may lead to any
        log.info("the stored record of a program cannot be read", exc_info=True)
        return None


def _record_of(program: KnownProgram) -> dict[str, Any]:
    """Return a program as data, which ``_read`` reads."""
    plan = program.plan and program.plan.to_record()
    results = {str(i): str(spec) for i, spec in program.results.items()}
    return {**vars(program), "plan": plan, "results": results}


def keep(program: KnownProgram) -> None:
    """Save on disk a program that was compiled or refused now."""
    record = _record_of(program)
    cache_files.write_record(_path(program.key), FORMAT, program.key, record)


def is_led(program: KnownProgram, examples: Sequence[Any]) -> bool:
    """Return whether rank 0 plans and compiles a program before all other ranks do:
    nobody did or failed to before, and they see its files. On CPUs alone: on others a
    schedule may fuse regions, whose kernels all ranks make together. ``examples``: the
    inputs."""
    world = current()
    if program.plan is not None or program.refused or world is None:
        return False
    tensors = (x for x in examples if isinstance(x, torch.Tensor))
    if any(x.device.type != "cpu" for x in tensors):
        return False
    keys = (f"{world.presence.prefix}/folder/{rank}" for rank in world.ranks)
    return len(set(map(world.store.get, keys))) == 1


# Errors that depend on the program alone, at every start; not those of a rank that did
# not come.
_REFUSALS = (
    *(HintError, PlanError, RuleError, ScheduleError, OpenSizesRefused),
    _torch.symbols.Inexpressible,
)


def _message_of(graph: str, is_planned: bool) -> str:
    """Return the name of the first or the second message of a ``Leader``."""
    return f"{graph} compiled on rank 0" if is_planned else f"the plan of {graph}"


@dataclass
class Leader:
    """Is rank 0 while it plans and compiles a program that the other ranks then take
    over: it sends what it planned, then what it compiled (``await_leader``)."""

    name: str  # name of the graph in messages between ranks
    program: KnownProgram
    is_open: bool  # whether its sizes are left open
    has_sent_plan: bool = False  # whether the others know the plan

    def tell(self, program: KnownProgram | None) -> None:
        """Send what was planned or compiled; None if nothing was planned, so that each
        rank finds out by itself what is wrong."""
        record = program and _record_of(program)
        message = json.dumps([record, cpp_kernels.instructions()])
        meeting.gather(_message_of(self.name, self.has_sent_plan), message)
        self.has_sent_plan = program is not None

    @contextlib.contextmanager
    def waited_for(self, compiled: Callable[[], KnownProgram]) -> Iterator[None]:
        """Let the others wait while this runs, and hear of a failure or, from
        ``compiled``, of the end."""
        with presence.works(f"compiles {self.name} for all ranks"):
            try:
                yield
                # The others have the plan.
                end = replace(compiled(), plan=None) if self.has_sent_plan else None
            except Exception as error:
                self._tell_failure(error)
                raise
        self.tell(end)

    def _tell_failure(self, error: Exception) -> None:
        """Send an error. With open sizes the others then do the same as this rank: fix
        the sizes, or trace with the divisors that the plan requires."""
        if isinstance(error, DivisorsAsked):
            self.tell(replace(self.program, plan=error.plan, divisors=error.divisors))
        elif self.is_open:
            refused = replace(self.program, refused=refusal_of(error))
            is_kept = not self.has_sent_plan and isinstance(error, _REFUSALS)
            self.tell(refused)
            if is_kept:
                keep(refused)
        elif not self.has_sent_plan:
            self.tell(None)


def await_leader(graph: str, program: KnownProgram) -> KnownProgram | None:
    """Return what rank 0 planned; of a planned program, what rank 0 compiled. None if
    it could not plan.

    Raises RankMismatchError if rank 0 fails to compile, or does not come.
    """
    text, *_ = meeting.gather(_message_of(graph, program.plan is not None), "")
    record, instructions = json.loads(text)
    cpp_kernels.take_instructions(instructions)
    told = _read(program.key, record) if record else None
    return told and replace(told, plan=told.plan or program.plan)


def text_of(
    gm: fx.GraphModule,
    inputs: Sequence[Input],
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


# Compiles; takes a text that replaces the graph in the keys of Inductor's cache.
Generate = Callable[[str | None], Any]


def compile_once(graph: fx.Graph, what: str, generate: Generate) -> Any:
    """Return the result of ``generate``, called on one rank before the others that have
    this graph. ``what``: the graph, in words that all ranks count equally.

    Raises RankMismatchError if the rank that compiles fails, or does not end.
    """
    with stage(INDUCTOR), presence.works(f"compiles {what}"):
        world = all_ranks()
        if _torch.inductor.is_cache_disabled() or not _is_text(graph):
            return generate(None)
        text = digest("\n".join(plan_store.lines_of(graph)), 32)
        if world is None:
            return generate(text)
        folder = digest(cache_files.folder_text())
        key = f"{world.prefix}/compiled/{what}/{text}/{folder}"
        word = str(world.rank)
        with answering(world):
            first = world.store.compare_set(key, "", word).decode()
            if first == word:
                return _compile_for_others(world, key, what, lambda: generate(text))
            _take_over(world, key, what, int(first))
        return generate(text)


def _is_text(graph: fx.Graph) -> bool:
    """Return whether lines of nodes say all of a graph: it holds no tensor, and no op
    that runs code of the user."""
    return all(map(_is_line, graph.nodes))


def _is_line(node: fx.Node) -> bool:
    if node.op == "call_function":
        runs = (_torch.inductor.OpOverload, BuiltinFunctionType)
        is_op = isinstance(node.target, runs) or node.target is INVOKE
        return is_op and not _torch.node_texts.is_lowered_by_user(node.target)
    if node.op == "get_attr":
        body = named_body(node)
        return body is not None and _is_text(body.graph)
    return node.op in ("placeholder", "output")


def _compile_for_others(
    world: World, key: str, what: str, generate: Callable[[], Any]
) -> Any:
    """Compile, and report to other ranks how that ended."""
    try:
        with presence.works(f"compiles {what} for all ranks"):
            compiled = generate()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        fact = f"rank {world.rank} failed to compile {what}:\n{message}"
        fix = "see the error of that rank: this one only stopped because of it"
        world.store.set(f"{key}/done", failure(fact, fix))
        raise
    world.store.set(f"{key}/done", json.dumps(cpp_kernels.instructions()))
    return compiled


def _take_over(world: World, key: str, what: str, leader: int) -> None:
    """Wait until the rank that compiles is done, and take over its results."""
    done_key = f"{key}/done"

    def give_up(_: Sequence[int], patience: Patience) -> None:
        fact = f"rank {leader} did not finish compiling {what}, for which rank "
        fact += f"{world.rank} waited {patience.waited()}{patience.tell([leader])}"
        fix = "see what that rank printed; it may have ended, or hang"
        world.presence.store.compare_set(done_key, "", failure(fact, fix))

    with (
        presence.waits(f"waits for rank {leader}, which compiles {what}"),
        watched(world, {leader: done_key}, timeout(), give_up),
    ):
        if not world.store.check([done_key]):
            collect_young()
        text = world.store.get(done_key).decode()
    if text.startswith(FAILED):
        raise error_of(text)
    cpp_kernels.take_instructions(json.loads(text))
