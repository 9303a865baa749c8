"""A Dynamo graph as it is called: ranks meet, and run one variant for their sizes.

Every rank writes which program it calls, on which sizes, and sums of what it feeds
(``meet``). So all ranks know of all, and make the same choice, before anything is
launched: run a variant that all have, compile one (``compile_variants``), or raise.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.config import Options
from fxpar.errors import FxparError, RankMismatchError
from fxpar.runtime.caches.program_identity import (
    BEGINS,
    NamedInput,
    content,
    digest,
    program_text,
)
from fxpar.runtime.calibrate.at_start import measure_first
from fxpar.runtime.calls.call_sizes import Fed, Sizes, sizes_of
from fxpar.runtime.calls.compile_variants import (
    CompileGraph,
    VariantCompiler,
    Variants,
)
from fxpar.runtime.calls.open_sizes import open_sizes
from fxpar.runtime.ranks import (
    compare_replicas,
    compare_tangents,
    consensus,
    presence,
)
from fxpar.runtime.ranks.check_inputs import Drift, check_arguments
from fxpar.runtime.ranks.compare_options import check_options, options_text
from fxpar.runtime.ranks.groups import Ranks
from fxpar.runtime.ranks.meeting import ALONE, current, meet
from fxpar.runtime.ranks.patience import in_call
from fxpar.runtime.stage_times import CHECKS, stage
from fxpar.sharding.program import user_line

# Owner of graphs that are compiled as they are, without the rest of a step.
FORWARD = "forward"

_OWN_MEMORY = (
    "pass a copy, x.clone(): what is fed part of a larger tensor, a branch or a loop, "
    "Dynamo traces otherwise"
)

# Dynamo traces code again for what changes nothing: variants are by content.
_VARIANTS: weakref.WeakValueDictionary[str, Variants] = weakref.WeakValueDictionary()


def forget() -> None:
    """Share nothing of what was compiled so far with graphs to come: what
    ``torch.compiler.reset()`` calls of a backend."""
    _VARIANTS.clear()
    compare_tangents.forget()
    compare_replicas.forget_steps()


class Calls:
    """What Dynamo calls for one of its graphs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        inputs: Sequence[NamedInput],
        options: Options,
        ranks: Ranks,
        compile_graph: CompileGraph,
        owner: object,
    ) -> None:
        """``owner``: graphs of other owners share nothing with this one."""
        self.gm, self.inputs, self.options, self.ranks = gm, inputs, options, ranks
        self.where = next(filter(None, map(user_line, gm.graph.nodes)), None)
        self.fed = Fed(gm, inputs, self.where)
        self.text = program_text(gm, inputs)
        self.identity = digest(self.text)
        self.options_text = options_text(options, ranks)
        self.options_digest = digest(self.options_text)
        channel = current()
        inner = (
            content(gm, inputs, examples),
            options,
            ranks,
            owner,
            channel and channel.prefix,
        )
        key = digest("\n".join(map(str, inner)))
        self.variants = _VARIANTS.setdefault(key, Variants())
        takes_more = options.verify or options.tune or options.fuse != "none"
        self.compiler = VariantCompiler(
            gm=gm,
            inputs=inputs,
            fed=self.fed,
            ranks=ranks,
            sizes=open_sizes(gm, inputs),
            opens=owner == FORWARD
            and not takes_more
            and options.microbatches in (None, 1),
            replan=options.replan,
            compile=compile_graph,
            variants=self.variants,
        )
        self.drift = self._drift(examples)
        self.replicas = self._replicas(examples)
        self.fresh = True  # what it is fed was not compared in full
        self.heads: dict[Sizes, str] = {}
        self.ready: dict[tuple[str, ...], Callable[..., Any]] = {}
        self.what = f"a call of the graph at {self.where}" if self.where else "a call"

    def __call__(self, *args: Any) -> Any:
        with self.ranks.inside():
            return self._variant(args)(*args)

    def _variant(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The variant to run, once all ranks are known to call this graph."""
        sizes = self.fed.sizes(args)
        head = self.heads.get(sizes) or self._head(sizes)
        sums = self.drift.word(args) if self.drift is not None else ""
        state = self.replicas.word(args)
        tangents = compare_tangents.word()
        word = f"{head}\t{sums}\t{state}\t{tangents}"
        words = meet(word, self.what)
        heads, all_sums, states, all_tangents = zip(
            *(word.split("\t") for word in words), strict=True
        )
        beside = (all_sums, states, all_tangents)
        run = self.ready.get(heads)
        if run is None:
            with stage(CHECKS), in_call():
                run = self._variant_for(heads, beside, args)
        else:
            self._compare(beside, args, held=True)
        return run

    def _drift(self, examples: Sequence[Any]) -> Drift | None:
        if self.ranks.mesh.size == 1:
            return None
        from torch.distributed.tensor import DTensor

        fed = {
            i: (entry.name, examples[i].dim())
            for i, entry in enumerate(self.inputs)
            if i in self.fed.tensors
            and entry.kind == "input"
            and not isinstance(examples[i], DTensor)
        }
        return Drift(fed)

    def _replicas(self, examples: Sequence[Any]) -> compare_replicas.Replicas:
        held = {
            i: (entry.name, entry.kind)
            for i, entry in enumerate(self.inputs)
            if entry.kind in ("parameter", "buffer")
            and isinstance(examples[i], torch.Tensor)
        }
        return compare_replicas.Replicas(held, examples, self.ranks.mesh)

    def _compare(
        self, beside: tuple[Sequence[str], ...], args: Sequence[Any], *, held: bool
    ) -> None:
        """Compare what ranks feed, what they hold if that is asked for, and gradients
        since the last call. Raises InputMismatchError or GradientError on all."""
        sums, states, tangents = beside
        if self.drift is not None:
            self.drift.compare(sums)
        self.replicas.compare_parts(states, args)
        if held:
            self.replicas.compare(states, args)
        error = compare_tangents.compare(tangents)
        if error is not None:
            if held:
                self.replicas.look(args)  # whether it comes of these
            raise error

    def _head(self, sizes: Sizes) -> str:
        """The word of a call on these sizes, without sums: which program, the variant
        to run if others have the sizes they had last, whether all must be compared."""
        far = self.options.replan is None
        last = self.variants.last.get(sizes, 0)
        last = last or self.variants.in_range(sizes, far=far)
        entries = [self.identity, last, self.fresh, sizes.shapes, sizes.numbers]
        entries.append(self.options_digest)
        self.heads[sizes] = _as_text(entries)
        return self.heads[sizes]

    def _variant_for(
        self,
        heads: tuple[str, ...],
        beside: tuple[Sequence[str], ...],
        args: Sequence[Any],
    ) -> Callable[..., Any]:
        """The variant to run, the same on every rank, for what all have written: heads,
        and beside these sums of what they feed, hold and were given back."""
        # Most often ranks have written the same: it is read once.
        read = {head: json.loads(head) for head in set(heads)}
        entries = [read[head] for head in heads]
        if len({entry[5] for entry in read.values()}) > 1:
            torch.compiler.reset()  # the next call reads options again
            check_options(self.options_text, self.what)
        if len({entry[0] for entry in read.values()}) > 1:
            self._refuse_others(entries)
        sizes = {head: sizes_of(entry) for head, entry in read.items()}
        key = tuple(sizes[head] for head in heads)
        self.fed.require_same(key)
        any_fresh = any(entry[2] for entry in read.values())
        self._compare(beside, args, held=not any_fresh)
        number, *further = {entry[1] for entry in read.values()}
        if not further and number in self.variants.ranges:
            self.variants.keys.setdefault(key, number)
        if not any_fresh and not further and self.variants.keys.get(key) == number:
            self.ready[heads] = self.variants.run[number]
            return self.ready[heads]
        mine = self.variants.keys.get(key, 0)
        every = set(map(int, meet(str(mine), self.what)))
        agreed = mine if every == {mine} else 0
        if any_fresh or not agreed:
            check_arguments(self.inputs, args)
            self.replicas.settle(args)
        number = agreed or self._new(key, args)
        own_sizes = key[self.ranks.rank if len(key) > 1 else 0]
        self.variants.last[own_sizes] = number
        self.fresh = False
        self.heads.clear()
        self.ready.clear()
        return self.variants.run[number]

    def _refuse_others(self, entries: Sequence[Any]) -> None:
        """Raise RankMismatchError, on all ranks: they call other programs."""
        mine = entries[self.ranks.rank]
        shapes = dict(zip(self._names(), mine[3], strict=True))
        sizes = [f"{name}: {list(shape)}" for name, shape in shapes.items()]
        text = "\n".join([*sizes, self.text])
        what = "the program they call"
        try:
            consensus.agree("a call", self.identity, text, what=what, fix=ALONE)
        except RankMismatchError as error:
            if BEGINS in error.what:
                clearer = RankMismatchError(error.what, fix=_OWN_MEMORY)
                raise consensus.as_told(clearer) from None
            raise

    def _names(self) -> list[str]:
        return [self.inputs[i].name for i in self.fed.tensors]

    def _new(self, key: tuple[Sizes, ...], args: Sequence[Any]) -> int:
        """Compile for sizes; the number of what was made. All ranks come here alike,
        and if one fails all do: Dynamo forgets the graph then, so that the next call
        reads options again."""
        try:
            if self.ranks.world is None:  # places compile apart
                measure_first(self.options)
            with presence.works(f"compiles {self.what}"):
                run, range_ = self.compiler.for_sizes(args)
        except FxparError:
            torch.compiler.reset()
            raise
        self.variants.run.pop(self.variants.keys.get(key, 0), None)
        number = self.variants.keys[key] = _number()
        self.variants.run[number] = run
        if range_ is not None:
            self.variants.ranges[number] = range_
            self.variants.planned_for[key[0]] = number
        return number


def meet_first(options: Options, ranks: Ranks, what: str) -> None:
    """Raise RankMismatchError on all ranks if they come to a first call with other
    options, some of them in local mode, where all ranks meet at that call alone."""
    text = options_text(options, ranks)
    head = _as_text(["", 0, True, (), (), digest(text)])
    heads = [word.split("\t")[0] for word in meet(f"{head}\t\t\t", what)]
    if len({json.loads(head)[5] for head in heads}) > 1:
        check_options(text, what)
    measure_first(options)


# What a rank writes of a call, as JSON. ``json.dumps`` makes an encoder at each call.
_as_text = json.JSONEncoder(default=str).encode

_variant_numbers = itertools.count(1)  # variants of a process by itself


def _number() -> int:
    """Of what all ranks compile now: that of the call, which they count alike."""
    channel = current()
    return next(_variant_numbers) if channel is None else channel.calls
