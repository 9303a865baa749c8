"""Calls a Dynamo graph: ranks meet, and run the same variant for their sizes.

In: the arguments of a call. Every rank writes one digest of program, options and sizes,
and checksums of its inputs (``drift``), and reads those of all (``meet``). Out: the
results of the variant that all ranks chose before anything is launched: one that all
have, or a new one, for open sizes or for the sizes of the call (``Variants``); or the
same error on all of them, which says in what they differ. Never: a launch that another
rank does not make.

Dynamo traces code again for a tensor with other strides (columns of a larger one, as
``ids[:, :-1]``), and gives the same program: inputs with other strides than it was
compiled for are copied, and results written to a copy are written back.
"""

from __future__ import annotations

import itertools
import json
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import FxparError, RankMismatchError, warn
from fxpar.runtime.caches.program_identity import BEGINS, content, program_text
from fxpar.runtime.calibrate.measure import measure_first
from fxpar.runtime.calls.open_sizes import (
    DivisorsAsked,
    Fed,
    OpenProgram,
    OpenSize,
    OpenSizesRefused,
    PlanStands,
    SizeRange,
    Sizes,
    open_program,
    open_sizes,
)
from fxpar.runtime.ranks import check_inputs, drift, meeting, presence
from fxpar.runtime.ranks.check_inputs import (
    check_arguments,
    check_options,
    options_text,
)
from fxpar.runtime.ranks.drift import Drift
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.ranks.meeting import ALONE, CALL, current, meet
from fxpar.runtime.ranks.presence import in_call
from fxpar.runtime.stage_times import CHECKS, stage
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Input, user_line
from fxpar.sharding.propagate.conventions import batch_axes
from fxpar.sharding.spec import Spec
from fxpar.units import digest

Strides = tuple[int, ...]


def for_any_strides(
    run: Callable[..., Any], strides: Mapping[int, Strides], written: Collection[int]
) -> Callable[..., Any]:
    """Return ``run`` for inputs of any strides. ``strides``: those that ``run`` takes,
    by input position; ``written``: positions of the inputs that ``run`` writes to."""
    if not strides:
        return run

    def call(*args: Any) -> Any:
        copies = {
            i: _copied(args[i], stride)
            for i, stride in strides.items()
            if args[i].stride() != stride and not _has_strides(args[i], stride)
        }
        if not copies:
            return run(*args)
        results = run(*(copies.get(i, x) for i, x in enumerate(args)))
        with torch.no_grad():
            for i in copies.keys() & set(written):
                args[i].copy_(copies[i])
        return results

    return call


def _has_strides(x: torch.Tensor, stride: Strides) -> bool:
    """Return whether ``x`` has these strides; dims of one element do not count."""
    if not x.numel():
        return True
    dims = zip(x.shape, x.stride(), stride, strict=True)
    return all(n == 1 or own == other for n, own, other in dims)


def _copied(x: torch.Tensor, stride: Strides) -> torch.Tensor:
    """Return a copy with other strides, through which gradients flow. Along dims of
    stride 0 only the first element is copied."""
    rows = x
    for d, step in enumerate(stride):
        rows = rows if step else rows.narrow(d, 0, min(x.shape[d], 1))
    copy = torch.empty_strided(rows.shape, stride, dtype=x.dtype, device=x.device)
    return copy.copy_(rows).expand(x.shape)


# Sizes that differ by this factor may be better off with another plan.
TWICE = 2.0


@dataclass(frozen=True)
class CompileJob:
    """Holds all that the compilation of a graph takes, except the graph itself."""

    # Options of the compiled function, as they were read.
    options: Options
    # This rank in the mesh, and its process groups.
    ranks: Ranks
    # One for each input of the graph, in order.
    named_inputs: Sequence[Input]
    # Specs that results must have, by position.
    rest_specs: Mapping[int, Spec] = field(default_factory=dict)
    # Inputs are written, and keep their layout.
    writes: bool = False
    # The graph takes its open sizes as symbols.
    open: OpenProgram | None = None
    # Dims are split into equal shards only.
    even: bool = False
    # A plan to follow; None: one is made.
    recalled: Plan | None = None
    # A plan that is left only for one that is faster by ``options.replan``.
    rival: Plan | None = None
    # As of the request.
    sent_room: int | None = None
    # Notes of the plan on how it was made.
    notes: tuple[str, ...] = ()


# Compiles a graph with its examples as a job says.
CompileGraph = Callable[[CompileJob, fx.GraphModule, Sequence[Any]], Any]


@dataclass
class Variants:
    """Holds what was compiled of graphs with the same content."""

    # Compiled callables by number, which is the same on all ranks.
    run: dict[int, Callable[..., Any]] = field(default_factory=dict)
    # The number of the variant for sizes.
    keys: dict[Sizes, int] = field(default_factory=dict)
    # By number: the sizes that a variant with open sizes holds for.
    ranges: dict[int, SizeRange] = field(default_factory=dict)
    # Why the last variant with open sizes could not be made; "" if it could.
    refused: str = ""
    # How many of those could not be made; a few end the attempts.
    refusals: int = 0
    # Names of sizes that could not be left open.
    closed: set[str] = field(default_factory=set)
    # Sizes that a plan was made for, or looked for, and the variant that they run.
    planned_for: dict[Sizes, int] = field(default_factory=dict)

    @property
    def fixed(self) -> set[int]:
        """Return the numbers of the variants for one set of sizes each."""
        return self.run.keys() - self.ranges.keys()

    def in_range(self, sizes: Sizes, *, far: bool = True) -> int:
        """Return the number of the variant with open sizes that holds for ``sizes``,
        the one planned for the nearest sizes. 0 if none does, or, unless ``far``, if
        some size differs from the planned one by TWICE or more."""
        hold = {
            number
            for number in set(self.planned_for.values())
            if self.ranges[number].contains(sizes.shapes, sizes.numbers)
        }
        if far and len(hold) < 2:
            return next(iter(hold), 0)
        distances = [
            (sizes.distance(planned), number)
            for planned, number in self.planned_for.items()
            if number in hold
        ]
        distance, number = min(distances, default=(math.inf, 0))
        return number if far or distance < TWICE else 0


def is_strided(x: Any) -> bool:
    """Return whether a value is a tensor with strides, and not a DTensor."""
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return strided and not isinstance(x, DTensor)


# After so many programs that differ in sizes alone, or in numbers of Python, a warning
# says so.
_MANY = 8

# After so many failures to leave sizes open, all are fixed, up to so many programs:
# then they are left open once more, with dims whole that shards cut unequally.
_MOST_REFUSALS, _MOST_FIXED = 2, 4

# Owner of graphs that are compiled by themselves, without the rest of a step.
FORWARD = "forward"

_OWN_MEMORY = (
    "pass a copy, x.clone(): Dynamo traces a branch or a loop differently where "
    "an input is part of a larger tensor"
)

# Keyed by content: Dynamo may trace the same code again to an identical graph.
_VARIANTS: weakref.WeakValueDictionary[str, Variants] = weakref.WeakValueDictionary()


def forget() -> None:
    """Forget the compiled variants, so that later graphs share none of them.
    ``torch.compiler.reset()`` calls this."""
    _VARIANTS.clear()
    drift.forget()


class Calls:
    """Is the callable that Dynamo calls for one of its graphs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        job: CompileJob,
        compile_as: CompileGraph,
        owner: object,
    ) -> None:
        """Prepare the calls of ``gm``, which ``compile_as`` compiles as ``job`` says.
        ``owner``: graphs of different owners share no variants."""
        inputs, options, ranks = job.named_inputs, job.options, job.ranks
        self.gm, self.job = gm, job
        self.where = next(filter(None, map(user_line, gm.graph.nodes)), None)
        self.fed = Fed(gm, inputs, self.where)
        self.text = program_text(gm, inputs)
        self.identity = digest(self.text)
        self.options_text = options_text(options, ranks)
        self.options_digest = digest(self.options_text)
        world = current()
        inner = (
            content(gm, inputs, examples),
            options,
            ranks,
            owner,
            world and world.prefix,
        )
        key = digest("\n".join(map(str, inner)))
        self.variants = _VARIANTS.setdefault(key, Variants())
        takes_more = options.verify or options.tune or options.fuse != "none"
        self.compile, self.sizes = compile_as, open_sizes(gm, inputs)
        # Whether any size may be left open.
        self.opens = owner == FORWARD and not takes_more
        self.opens = self.opens and options.microbatches in (None, 1)
        fed, verify = self.fed.tensors, options.verify
        self.drift = Drift(inputs, examples, fed, ranks.mesh, verify=verify)
        self.fresh = True  # its inputs were not yet compared in full
        self.heads: dict[Sizes, str] = {}
        self.ready: dict[tuple[str, ...], Callable[..., Any]] = {}
        self.what = f"a call of the graph at {self.where}" if self.where else "a call"

    def __call__(self, *args: Any) -> Any:
        with self.job.ranks.inside():
            return self._variant(args)(*args)

    def _variant(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Meet the other ranks, and return the variant that all of them run."""
        sizes = self.fed.sizes(args)
        head = self.heads.get(sizes) or self._head(sizes)
        word = f"{head}\t{self.drift.word(args)}"
        words = [each.split("\t", 1) for each in meet(CALL, word, self.what)]
        heads, sums = zip(*words, strict=True)
        run = self.ready.get(heads)
        if run is None:
            with stage(CHECKS), in_call():
                run = self._variant_for(heads, sums, sizes, args)
        else:
            self.drift.compare(sums, args, held=True)
        return run

    def _head(self, sizes: Sizes) -> str:
        """Return what a rank writes of a call on these sizes, without checksums: a
        digest of all that ranks must have the same, the number of the variant last run
        for these sizes or one in range (0: none), and whether inputs must be compared
        in full."""
        far = self.job.options.replan is None
        last = self.variants.keys.get(sizes, 0)
        last = last or self.variants.in_range(sizes, far=far)
        self.heads[sizes] = _head(self._asked(sizes), last, fresh=self.fresh)
        return self.heads[sizes]

    def _asked(self, sizes: Sizes) -> str:
        """Return, as JSON, the program, options and sizes that all ranks must share."""
        return _as_text(
            [self.identity, self.options_digest, sizes.shapes, sizes.numbers]
        )

    def _variant_for(
        self,
        heads: tuple[str, ...],
        sums: Sequence[str],
        sizes: Sizes,
        args: Sequence[Any],
    ) -> Callable[..., Any]:
        """Return the variant to run, the same on every rank, given what each rank
        wrote: its head, and its checksums of inputs, state and gradients
        (``drift``)."""
        digests, last, fresh = zip(*(head.split(" ") for head in heads), strict=True)
        if len(set(digests)) > 1:
            self._refuse(sizes)
        any_fresh = "True" in fresh
        self.drift.compare(sums, args, held=not any_fresh)
        number, *further = set(map(int, last))
        if not further and number in self.variants.ranges:
            self.variants.keys.setdefault(sizes, number)
        if not any_fresh and not further and self.variants.keys.get(sizes) == number:
            self.ready[heads] = self.variants.run[number]
            return self.ready[heads]
        mine = self.variants.keys.get(sizes, 0)
        every = set(map(int, meet("the choice of a variant", str(mine), self.what)))
        agreed = mine if every == {mine} else 0
        if any_fresh or not agreed:
            check_arguments(self.job.named_inputs, args)
            self.drift.settle(args)
        number = agreed or self._new(sizes, args)
        self.fresh = False
        self.heads.clear()
        self.ready.clear()
        return self.variants.run[number]

    def _refuse(self, sizes: Sizes) -> None:
        """Raise, on all ranks, an error that says in what their calls differ: options,
        programs or sizes."""
        own = self._asked(sizes)
        programs, options, *fed = _gathered(own)
        if len(set(options)) > 1:
            torch.compiler.reset()  # the next call reads options again
            check_options(self.options_text, self.what)
        if len(set(programs)) > 1:
            self._refuse_others(sizes)
        every = [
            Sizes(tuple(map(tuple, shapes)), tuple(numbers))
            for shapes, numbers in zip(*fed, strict=True)
        ]
        self.fed.require_same(every)
        meeting.agree("a call", own, what="the call")

    def _refuse_others(self, sizes: Sizes) -> None:
        """Raise RankMismatchError, on all ranks, since they call different programs."""
        names = [self.job.named_inputs[i].name for i in self.fed.tensors]
        shapes = zip(names, map(list, sizes.shapes), strict=True)
        lines = [f"{name}: {shape}" for name, shape in shapes]
        text, what = "\n".join([*lines, self.text]), "the program they call"
        try:
            meeting.agree("a call", text, key=self.identity, what=what, fix=ALONE)
        except RankMismatchError as error:
            if BEGINS in error.what:
                clearer = RankMismatchError(error.what, fix=_OWN_MEMORY)
                raise meeting.as_reported(clearer) from None
            raise

    def _new(self, sizes: Sizes, args: Sequence[Any]) -> int:
        """Compile a variant for sizes, and return its number. All ranks come here, and
        if one fails all do: Dynamo forgets the graph then, so that the next call reads
        options again."""
        try:
            if self.job.ranks.world is None:  # places compile separately
                measure_first(self.job.options)
            with presence.works(f"compiles {self.what}"):
                run, range_ = self._open(args) or (self._fixed(args), None)
        except FxparError:
            torch.compiler.reset()
            raise
        self.variants.run.pop(self.variants.keys.get(sizes, 0), None)
        world = current()  # the count of meetings is equal on all ranks
        number = next(_variant_numbers) if world is None else world.meetings
        self.variants.keys[sizes] = number
        self.variants.run[number] = run
        if range_ is not None:
            self.variants.ranges[number] = range_
            self.variants.planned_for[sizes] = number
        else:
            self._warn_of_numbers(sizes)
            self._warn_of_sizes()
        return number

    def _warn_of_numbers(self, sizes: Sizes) -> None:
        """Warn, once, of numbers whose every value is compiled anew."""
        every = [x.numbers for x in self.variants.keys if x.shapes == sizes.shapes]
        if len(every) != _MANY or not meeting.is_leader():
            return
        columns = zip(self.fed.numbers, zip(*every, strict=True), strict=True)
        changing = (i for i, values in columns if len(set(values)) > 1)
        names = check_inputs.listed(self.job.named_inputs[i].name for i in changing)
        warn(
            f"the graph was compiled {_MANY} times on the same shapes: each value of "
            f"{names}, a number of Python, has a program of its own",
            where=self.where,
            fix="give it as a tensor, torch.tensor(value), if it changes often",
        )

    def _warn_of_sizes(self) -> None:
        """Warn, once, of sizes whose every value is compiled anew."""
        fixed = self.variants.fixed
        shapes = {x.shapes for x, n in self.variants.keys.items() if n in fixed}
        if self.variants.refused and len(shapes) == _MANY and meeting.is_leader():
            names = check_inputs.listed(size.text for size in self.sizes)
            warn(
                f"the graph was compiled for {_MANY} values of {names}, and is for "
                f"each new one: {self.variants.refused}",
                where=self.where,
                fix="pad to a few sizes",
            )

    def _open(self, args: Sequence[Any]) -> tuple[Callable[..., Any], SizeRange] | None:
        """Return a variant that leaves sizes open, and the sizes that it holds for: an
        existing one if it holds for these sizes and its plan is kept, else a new one.
        None if sizes are to be fixed."""
        # Open in Dynamo, not closed here, and above 1.
        open_ = [x for x in self.sizes if x.name not in self.variants.closed]
        sizes = [x for x in open_ if x.of(args) > 1]
        if not self.opens and sizes:
            self.variants.refused = "the request needs fixed sizes"
        refusals = self.variants.refusals
        even = refusals >= _MOST_REFUSALS and len(self.variants.fixed) >= _MOST_FIXED
        if not sizes or not self.opens or refusals >= _MOST_REFUSALS + even:
            return None
        mesh, replan = self.job.ranks.mesh, self.job.options.replan
        parts = mesh.count(batch_axes(mesh))
        units = {
            size.name: math.gcd(size.of(args), parts) for size in sizes if size.dim == 0
        }
        plan = rival = None
        held = self.variants.in_range(self.fed.sizes(args))
        if held and replan is not None:
            rival = self.variants.ranges[held].plan
        while True:
            try:
                job = replace(self.job, recalled=plan, rival=rival, even=even)
                return self._opened(args, sizes, units, job)
            except PlanStands:
                return self.variants.run[held], self.variants.ranges[held]
            except OpenSizesRefused as error:
                if held and replan is not None:
                    return self.variants.run[held], self.variants.ranges[held]
                self.variants.refused = str(error)
                self.variants.refusals += 1
                return None
            except DivisorsAsked as asked:
                plan, rival = asked.plan, None
                for name, divisor in asked.divisors.items():
                    units[name] = units.get(name, 1) * divisor

    def _opened(
        self,
        args: Sequence[Any],
        sizes: Sequence[OpenSize],
        units: Mapping[str, int],
        job: CompileJob,
    ) -> tuple[Callable[..., Any], SizeRange]:
        """Compile a variant with ``sizes`` open, as multiples of ``units``. Raises
        PlanStands if the rival of the job is not to be replaced."""
        gm = _torch.dynamo.copy_graph(self.gm)
        several = [x for x in sizes if x.of(args) > units.get(x.name, 1)]
        if not several:
            raise OpenSizesRefused(f"{sizes[0].text} is one row of each rank")
        sizes = several
        named_inputs = self.job.named_inputs
        opened = open_program(gm, args, named_inputs, self.fed, sizes, units)
        job = replace(job, named_inputs=opened.inputs, open=opened)
        run = self.compile(job, opened.graph, opened.examples)
        self.variants.closed |= {size.name for size in run.sizes.fixed}
        self.variants.refused = ""
        size_range = replace(run.sizes, plan=run.plan)
        return opened.caller(run, run.written), size_range

    def _fixed(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Return a variant for the sizes of these arguments alone."""
        gm = _torch.dynamo.copy_graph(self.gm)
        refused = self.variants.refused
        notes = (f"sizes are fixed: {refused}",) if refused else ()
        run = self.compile(replace(self.job, notes=notes), gm, list(args))
        strides = {i: args[i].stride() for i in self.fed.tensors if is_strided(args[i])}
        return for_any_strides(run, strides, getattr(run, "written", ()))


def meet_first(options: Options, ranks: Ranks, what: str) -> None:
    """Raise RankMismatchError on all ranks if their options differ at a first call.
    In local mode all ranks meet at that call alone."""
    text = options_text(options, ranks)
    call_text = _as_text(["", digest(text), (), ()])
    words = meet(CALL, f"{_head(call_text, 0, fresh=True)}\t", what)
    if len({word.split(" ")[0] for word in words}) > 1:
        _, every, *_ = _gathered(call_text)
        if len(set(every)) > 1:
            check_options(text, what)
    measure_first(options)


# Made once: ``json.dumps`` makes an encoder at each call.
_as_text = json.JSONEncoder(default=str).encode


def _head(call_text: str, last: int, *, fresh: bool) -> str:
    """Return the head (``Calls._head``) for a text of ``Calls._asked``."""
    return f"{digest(call_text)} {last} {fresh}"


def _gathered(call_text: str) -> list[tuple[Any, ...]]:
    """Gather ``call_text`` of all ranks, and return four tuples with an entry for each
    rank: digests of programs, digests of options, shapes, and numbers."""
    every = meeting.gather("a call in full", call_text)
    return list(zip(*map(json.loads, every), strict=True))


_variant_numbers = itertools.count(1)  # for a process without other ranks
