"""What leaves a graph that is fed parts of the batch: results as each rank would have
them with its own part alone, on average over the ranks.

In: a Dynamo graph, which computes the program of the global batch. Out: the same graph,
its results divided by the number of parts as often as they grow with the batch
(``sharding.batch_growth``): a sum over the batch leaves as the mean over ranks, and so
does its gradient; a mean leaves as it is. Of a sum of both the summands are divided
apart, through the linear ops that lead to the result. Whole numbers are not divided: a
count leaves as the rank's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpar import _torch, cache_files
from fxpar._torch.dynamo import example_of
from fxpar.errors import FxparWarning, PlanError, compose
from fxpar.passes.graph_bodies import show_bodies
from fxpar.passes.layers_left_out import LayersLeftOut, layers_left_out
from fxpar.passes.repeated_segments import repeated_segments
from fxpar.runtime.caches import plan_store
from fxpar.runtime.caches.compile_once import one_does
from fxpar.runtime.caches.program_identity import NamedInput, fixed_content
from fxpar.runtime.calls.divide_summands import (
    divided,
    linear_ways,
    may_grow,
    name_written,
)
from fxpar.runtime.train_step.forward import fake_of, globally
from fxpar.sharding.batch_growth import growths
from fxpar.sharding.fed_positions import are_alike, compared_ids, fed_positions
from fxpar.sharding.growth_powers import FIXED, Growth, unknown
from fxpar.sharding.program import user_line
from fxpar.sharding.rules import has_user_rules
from fxpar.sharding.spec import Spec

FORMAT = "fxpar growths 2"

# Arguments of the program with so many times the batch of one rank.
Sized = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class LocalResults:
    """What leaves a graph that is fed parts of the batch."""

    # Names of results that leave as this rank's summand, by position.
    summand_names: Mapping[int, str] = field(default_factory=dict)
    # What was done to results, for the plan.
    notes: tuple[str, ...] = ()

    def lines_of_results(
        self, specs: Mapping[int, Spec], parts: int
    ) -> tuple[str, ...]:
        """The notes on a plan in which results have these specs."""
        summands = [name for i, name in self.summand_names.items() if specs[i].partial]
        whole = [name for i, name in self.summand_names.items() if specs[i].is_whole]
        return (
            *self.notes,
            *(f"result {x} counts over the batch: each rank's own" for x in summands),
            *(
                f"{x} counts over the batch in a way that no rank does by itself: each "
                f"has the count of all {parts}"
                for x in whole
            ),
        )


def scale_results(
    gm: fx.GraphModule, inputs: Sequence[NamedInput], sized: Sized, parts: int
) -> LocalResults:
    """Divide the results of a Dynamo graph, in place; warn of those that grow and
    cannot be."""
    if not any(may_grow(x) for x in gm.graph.output_node().args[0]):
        return LocalResults()
    name_written(gm.graph)
    results = list(gm.graph.output_node().args[0])
    growths = _Growths(gm, inputs, sized, parts)
    summands, notes, unclear = {}, [], []
    for k, x in enumerate(results):
        if not isinstance(x, fx.Node) or growths.last[k].is_fixed:
            continue
        grown, whole = growths.last[k], not _is_floating(x)
        if whole and grown.power == 1.0 and not grown.mixed:
            summands[k] = x.name
            continue
        scaled = None if whole else divided(gm.graph, x, grown, growths.of, parts)
        if scaled is None:
            unclear.append((x, grown))
            continue
        results[k] = scaled
        notes.append(_note(x, grown, parts))
        if grown.power not in (-1.0, 1.0):
            _warn_nonlinear(x, grown, parts)
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(results),)
    gm.graph.lint()
    gm.recompile()
    if growths.compared:
        _warn_compared(*growths.compared)
    notes += [f"result {x.name} is of the whole batch: {_why(g)}" for x, g in unclear]
    if unclear:
        _warn_unclear(unclear, parts)
    return LocalResults(summands, tuple(notes))


def _note(x: fx.Node, grown: Growth, parts: int) -> str:
    if grown.power == 1.0:
        how = " in part" if grown.mixed else ""
        return f"result {x.name} grows with the batch{how}: the mean over {parts} ranks"
    how = f"as the batch to the power {grown.power:g}"
    return f"result {x.name} grows {how}: divided by {parts} to that power"


def _why(grown: Growth) -> str:
    if grown.power is None:
        return f"how it grows with the batch is not known ({grown.why})"
    return f"terms that grow with the batch to the power {grown.power:g} cannot be told"


def _warn_unclear(unclear: Sequence[tuple[fx.Node, Growth]], parts: int) -> None:
    x, grown = unclear[0]
    also = f" (and {len(unclear) - 1} more)" if len(unclear) > 1 else ""
    text = compose(
        f"with FXPAR_INPUTS=local result {x.name}{also} is what one device has for the "
        f"whole batch, {parts} times that of a rank: {_why(grown)}",
        where=user_line(x),
        fix=_FIX,
    )
    warnings.warn(text, FxparWarning, stacklevel=2)


def _warn_nonlinear(x: fx.Node, grown: Growth, parts: int) -> None:
    text = compose(
        f"with FXPAR_INPUTS=local result {x.name}, which grows as the batch to the "
        f"power {grown.power:g}, is divided by {parts} to that power: that is the mean "
        "over ranks only if their parts are alike",
        where=user_line(x),
        fix=_FIX,
    )
    warnings.warn(text, FxparWarning, stacklevel=2)


def _warn_compared(name: str, line: str) -> None:
    text = compose(
        f"with FXPAR_INPUTS=local each row of {name} is compared with those of all "
        "ranks, as one device does: ids that each rank counts in its own part "
        "(documents, groups) are taken for one another",
        where=line or None,
        fix="count ids through all ranks (add the rank times their number); classes "
        "are right as they are",
    )
    warnings.warn(text, FxparWarning, stacklevel=2)


_FIX = "return sums and means over the batch, and compute with them outside the model"


def _is_floating(x: fx.Node) -> bool:
    value = example_of(x)
    return value.dtype.is_floating_point or value.dtype.is_complex


# Growth of the values of a Dynamo graph


@dataclass(frozen=True)
class _Fed:
    """What a program is given."""

    # Its inputs.
    names: Sequence[NamedInput]
    # Arguments, with so many parts of a batch.
    sized: Sized
    # Of a batch.
    parts: int


class _Growths:
    """``last``: of each result, as it leaves. ``of``: of nodes on linear ways to the
    results, when they are made. ``compared``: an input whose rows are compared with one
    another, and the user's line; () if there is none."""

    def __init__(
        self, gm: fx.GraphModule, names: Sequence[NamedInput], sized: Sized, parts: int
    ) -> None:
        results, fed = gm.graph.output_node().args[0], _Fed(names, sized, parts)
        self.ways = linear_ways(results)
        key = _key(gm, names, sized(parts), parts)
        program = _found_before(key)
        if program is None:
            traced = list[_Known]()

            def trace() -> None:
                traced.append(self._growths(gm, fed))
                _keep(key, traced[0])

            if key:
                one_does("traces how results grow with the batch", key, trace)
                program = _found_before(key)
            if program is None and not traced:
                trace()
            program = program or traced[0]
        growths, self.compared = program
        count = len(results)
        self.last = growths[:count]
        self.of = dict(zip(self.ways, growths[count:], strict=False))

    def _growths(self, gm: fx.GraphModule, fed: _Fed) -> _Known:
        """Of the results, then of ``ways``; and what is compared."""
        try:
            short = layers_left_out(gm, _parameters(gm, fed.names))
            traced, grown = self._of_layers(gm, fed, short)
            positions = fed_positions(*traced.graphs)
            ids = compared_ids(*traced.graphs)
        except Exception as error:  # compiling it says what is wrong
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            return [unknown(f"it cannot be traced: {why}")] * 10**6, ()
        if positions is not None:
            lookup, place = positions
            raise _positions(fed.names[traced.position(place)], lookup)
        if ids is None:
            return grown, ()
        comparison, place = ids
        name = fed.names[traced.position(place)].name
        return grown, (name, user_line(comparison) or "")

    def _of_layers(
        self, gm: fx.GraphModule, fed: _Fed, short: LayersLeftOut
    ) -> tuple[_Traced, list[Growth]]:
        """The program without layers, and growths of its results and ``ways``; the
        whole program if not the same is known of what both layers of a row leave."""
        if short.instead:
            with contextlib.suppress(Exception):  # the whole program says what is wrong
                traced = self._traced(gm, fed, short)
                grown = traced.growths(fed.names)
                pairs = len(short.carried)
                left = grown[len(grown) - 2 * pairs :]
                if left[::2] == left[1::2] and traced.last_alike(pairs):
                    return traced, grown[: len(grown) - 2 * pairs]
        traced = self._traced(gm, fed, LayersLeftOut())
        return traced, traced.growths(fed.names)

    def _traced(self, gm: fx.GraphModule, fed: _Fed, short: LayersLeftOut) -> _Traced:
        """The program with the batch and with one twice as large, without its backward.
        Outputs: the results, the values of ``ways``, those that layers hand on."""
        more = [*self.ways, *itertools.chain(*short.carried)]
        both = []
        for n in (fed.parts, 2 * fed.parts):
            args = fed.sized(n)
            probe = _with_outputs(gm, more, short)
            both.append(_aten(globally(probe, fed.names, args).module, args))
        (once, inputs), (twice, _) = both
        return _Traced((once, twice), inputs)


def _with_outputs(
    gm: fx.GraphModule, more: Sequence[fx.Node], short: LayersLeftOut
) -> fx.GraphModule:
    """A copy of a Dynamo graph without layers, which also returns ``more``, as they are
    when they are made."""
    probe = _torch.dynamo.copy_graph(gm)
    twins = dict(zip(gm.graph.nodes, probe.graph.nodes, strict=True))
    short.leave_out(twins)
    output = probe.graph.output_node()
    outputs = [x if isinstance(x, fx.Node) else None for x in output.args[0]]
    for node in more:
        twin = twins[node]
        with probe.graph.inserting_after(twin):
            clone = probe.graph.call_method("clone", (twin,))
        clone.meta = dict(twin.meta)
        outputs.append(clone)
    output.args = (tuple(outputs),)
    probe.recompile()
    return probe


def _parameters(gm: fx.GraphModule, names: Sequence[NamedInput]) -> set[fx.Node]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    kinds = ("parameter", "buffer")
    return {x for x, y in zip(placeholders, names, strict=True) if y.kind in kinds}


def _positions(entry: NamedInput, lookup: fx.Node) -> PlanError:
    return PlanError(
        f"with FXPAR_INPUTS=local {entry.name} says which rows of the batch are read "
        "or written: a rank's positions are those in its own part, and the program "
        "has the rows of all ranks",
        where=user_line(lookup),
        fix="do it outside of what is compiled; what is looked up in and is no part of "
        "the batch, make a buffer; or feed the global batch (FXPAR_INPUTS=global)",
    )


def _key(
    gm: fx.GraphModule, inputs: Sequence[NamedInput], args: Sequence[Any], parts: int
) -> str | None:
    """Of the growths of a program on disk; None if they are not to be kept."""
    content = fixed_content(gm, inputs, args)
    if content is None or not plan_store.allowed() or has_user_rules():
        return None
    versions = (torch.__version__, _torch.version.own_version())
    lines = (FORMAT, *versions, str(parts), content)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# Growths, and the name of an input whose rows are compared, with the user's line.
_Known = tuple[Sequence[Growth], Sequence[str]]


def _found_before(key: str | None) -> _Known | None:
    """What an earlier start found."""

    def decode(data: dict[str, Any]) -> _Known:
        return [Growth(*each) for each in data["growths"]], list(data["compared"])

    return cache_files.read_record(_path(key), FORMAT, key, decode) if key else None


def _keep(key: str | None, facts: _Known) -> None:
    growths, compared = facts
    if key and len(growths) < 10**6:
        rows = [[each.power, each.mixed, each.why] for each in growths]
        record = {"growths": rows, "compared": list(compared)}
        cache_files.write_record(_path(key), FORMAT, key, record)


def _path(key: str) -> Path:
    return cache_files.folder() / f"{key}.growths.json"


def _of_input(entry: NamedInput) -> Growth:
    return Growth(1.0) if entry.kind == "summand" else FIXED


@dataclass(frozen=True)
class _Traced:
    """A program as two ATen graphs."""

    # With the batch, and with one twice as large. Functional; their placeholders are
    # all tensors.
    graphs: tuple[fx.Graph, fx.Graph]
    # For each placeholder the position of the argument.
    inputs: tuple[int, ...]

    def position(self, placeholder: fx.Node) -> int:
        """Of the argument that a placeholder stands for."""
        once, _ = self.graphs
        return self.inputs[once.find_nodes(op="placeholder").index(placeholder)]

    def growths(self, names: Sequence[NamedInput]) -> list[Growth]:
        """Of the outputs."""
        return growths(*self.graphs, [_of_input(names[i]) for i in self.inputs])

    def last_alike(self, pairs: int) -> bool:
        """Whether as much is known of positions in both of the last outputs, ``pairs``
        of them."""
        once, _ = self.graphs
        outputs = once.output_node().args[0]
        left = [clone.args[0] for clone in outputs[len(outputs) - 2 * pairs :]]
        return are_alike(*self.graphs, list(zip(left[::2], left[1::2], strict=True)))


def _aten(gm: fx.GraphModule, args: Sequence[Any]) -> tuple[fx.Graph, tuple[int, ...]]:
    """The functional ATen graph of a Dynamo graph on concrete shapes, whose outputs are
    those of ``gm``; and for each of its placeholders, which are those that are read,
    the position of the argument."""
    mode = _torch.fake.fake_mode_of(args) or _torch.fake.new_fake_mode()
    tensors, places = [], []
    placeholders = gm.graph.find_nodes(op="placeholder")
    for i, (node, x) in enumerate(zip(placeholders, args, strict=True)):
        if isinstance(x, torch.Tensor) and node.users:
            tensors.append(fake_of(x, mode))
            places.append(i)
        else:
            node.replace_all_uses_with(x)
            gm.graph.erase_node(node)
    gm.recompile()
    traced = _torch.aot.export_forward(gm, tensors, mode, repeated_segments)
    show_bodies(traced.graph, traced)
    output = traced.graph.output_node()
    values: list[Any] = [None] * len(gm.graph.output_node().args[0])
    for x, desc in zip(output.args[0], output.meta["desc"], strict=True):
        kind, place = _torch.descriptors.descriptor(desc)
        if kind == "output":
            values[place] = x
    output.args = (tuple(values),)
    inputs = traced.graph.find_nodes(op="placeholder")
    positions = [_torch.descriptors.descriptor(node.meta["desc"])[1] for node in inputs]
    return traced.graph, tuple(places[i] for i in positions)
