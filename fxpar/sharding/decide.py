"""Makes a Decision from a Program, a Mesh and hints.

``decide`` propagates the given specs, chooses a strategy per op, places the reductions,
and connects. ``decide_on`` does so for a request, or takes the given specs as facts and
searches the fastest plan. (``recall`` applies a saved plan to a program again.)
``cut_in_time`` finds what follows the batch, by planning over an axis in time.
In: a Program, a mesh or a request with one, hints. Out: a Decision; a ``BatchCut``.
Never: looks at graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fxpar.sharding import shard_sizes
from fxpar.sharding.cost.hardware_table import Hardware, lookup
from fxpar.sharding.factors import Axes
from fxpar.sharding.hints import Entries, make_seed, match
from fxpar.sharding.mesh import Link, Mesh, axis_of
from fxpar.sharding.program import Program, Signature, Value, user_line
from fxpar.sharding.propagate import conventions
from fxpar.sharding.propagate.assign_strategies import (
    choose,
    fed_as_read,
    make_as_read,
)
from fxpar.sharding.propagate.at_rest import exchanged_notes, settle_at_rest
from fxpar.sharding.propagate.gather_early import (
    gather_before_growth,
    gather_before_views,
    gather_lookups,
    is_cut,
    share_before_views,
)
from fxpar.sharding.propagate.place_reductions import place_reductions
from fxpar.sharding.propagate.propagation import Origin, Propagation, Seed, State
from fxpar.sharding.reshard.route import Edges, Reshard, connect, steps
from fxpar.sharding.reshard.steps import Step
from fxpar.sharding.search.batch_parts import BatchCut, PartProgram
from fxpar.sharding.search.run_search import (
    STOPPED,
    SearchOptions,
    SearchResult,
    can_be_faster,
    priced_as,
    rivals,
    search,
)
from fxpar.sharding.solver import work_clock
from fxpar.sharding.spec import Spec
from fxpar.sharding.strategy import Strategy

if TYPE_CHECKING:
    from fxpar.sharding.plan_request import Request

# A gap that deserves a warning.
_POOR = 0.05

# The hardware on which ops are priced where none is named: propagation then depends on
# the program, the mesh and the hints alone, not on the local device. Ties compare
# compute with links, all equally fast: the links of this hardware and of ``Link()``.
UNNAMED = "h100"

# Op -> (propagation in which the batch has its axes, these axes, mesh with links,
# hardware), adds seeds for such ops: what features add.
SEEDING: dict[str, Callable[[Propagation, Axes, Mesh, Hardware], None]] = {}


@dataclass(frozen=True)
class Decision:
    """Holds the decisions about a Program."""

    # In global shapes.
    program: Program
    # With the links that it was priced with.
    mesh: Mesh
    # By op.
    strategies: tuple[Strategy, ...]
    # By value, the spec in which it settles.
    settled: tuple[Spec, ...]
    # The specs that ops read, and the reshards between.
    edges: Edges
    # By value: axis -> why it splits the value.
    origins: tuple[Mapping[str, Origin], ...]
    # Text for the plan.
    notes: tuple[str, ...] = ()
    # The search that decided, if one did.
    search: SearchResult | None = None
    # Reasons of a saved plan, which has no origins.
    reasons: tuple[tuple[str, str], ...] = ()
    # The op at which each stage but the first begins, if a search cut the program.
    stages_begin: tuple[str, ...] = ()
    # Axes that only parameters and their gradients cross.
    manual: Axes = ()
    # Values that are means over the manual axes.
    averaged: frozenset[int] = frozenset()
    # Other decisions on the same program that may be faster.
    rivals: tuple[Decision, ...] = ()

    @property
    def is_even(self) -> bool:
        """Return whether all ranks hold equally much of every value."""
        return self.first_uneven is None

    @cached_property
    def first_uneven(self) -> tuple[Value, Spec] | None:
        """Return the first value with unequal parts on ranks, and its spec there; None
        if there is none."""
        edges, values = self.edges, self.program.values
        specs = [*zip(values, edges.specs, strict=True)]
        specs += [(values[r.value], r.target) for r in edges.reshards]
        uneven = (x for x in specs if not x[1].is_even(self.mesh, x[0].shape))
        return next(uneven, None)


def route(decision: Decision, reshard: Reshard) -> tuple[Step, ...]:
    """Return the steps a reshard is lowered to."""
    value = decision.program.values[reshard.value]
    source, target = reshard.source, reshard.target
    itemsize, manual_axes = value.dtype.itemsize, value.manual
    return steps(source, target, decision.mesh, value.shape, itemsize, manual_axes)


def constraints_of(program: Program) -> list[tuple[int, list[str]]]:
    """Return the hints in the code, as (value, entries of its dims)."""
    return [
        (op.results[0], op.node.args[1].split(","))
        for op in program.ops
        if op.target is torch.ops.fxpar.constrain.default
    ]


def decide(
    program: Program,
    mesh: Mesh,
    hints: Mapping[str, Entries],
    constraints: Sequence[tuple[int, Entries]] = (),
    *,
    mode: str = "propagate",
    batch: Sequence[str] | None = None,
    hardware: Hardware | None = None,
) -> Decision:
    """Return the decision by propagation: propagate hints (and conventions for axes
    that no hint names), then choose strategies, place reductions and connect.
    ``constraints``: (value, entries) found in the code; ``batch``: the axes that split
    the batch, by default those with such names. ``hardware``: prices ties; None: ops on
    ``UNNAMED``, reshards on the mesh's links.

    Raises HintError for hints that do not fit.
    """
    engine = Propagation(program, mesh)
    priced = hardware.on(mesh) if hardware is not None else mesh
    on = hardware or lookup(UNNAMED)
    notes: list[str] = []
    of_batch: Sequence[str] = ()
    for a, b in _ties(program):
        engine.tie(a, b)
    if mode != "replicate":
        seeds = _given_seeds(program, mesh, hints, constraints)
        axes = conventions.batch_axes(mesh) if batch is None else batch
        all_seeds = seeds + _output_seeds(program, mesh)
        of_batch = _seed_all(engine, all_seeds, axes, notes)
        split = tuple(a for a in axes if mesh.sizes[a] > 1)
        for target in {str(op.target) for op in program.ops} & SEEDING.keys():
            SEEDING[target](engine, split, priced, on)
    if program.signature.has_layouts:
        settle_at_rest(engine)
    state = engine.state
    fed = fed_as_read(program, state)
    strategies = choose(program, state, fed, priced, on)
    strategies, settled = gather_lookups(
        program,
        strategies,
        lambda chosen: place_reductions(program, state, chosen, priced),
        state,
        priced,
        on,
    )
    gather_before_views(program, strategies, settled, mesh)
    gather_before_growth(program, strategies, settled, priced, on)
    share_before_views(program, strategies, settled, mesh)
    make_as_read(program, fed, strategies, settled, mesh)
    edges = connect(program, strategies, settled, priced)
    notes += _indivisible_notes(state, program, mesh, of_batch)
    notes += _edge_notes(program, edges, mesh)
    return Decision(
        program,
        mesh,
        tuple(strategies),
        tuple(settled),
        edges,
        tuple(state.origins),
        tuple(notes),
    )


def decide_on(
    program: Program,
    request: Request,
    before: SearchResult | None = None,
    parts: PartProgram | None = None,
) -> Decision:
    """Return the decision on the request's mesh: by ``decide``, or by a search for the
    fastest plan that keeps the hints and fits in memory. ``before``, ``parts``: as for
    ``run_search.search``.

    Raises HintError for hints that do not fit, PlanError if no searched plan does.
    """
    mesh, hints, options = request.mesh, request.hints, request.mode
    if not isinstance(options, SearchOptions):
        assert isinstance(options, str), "a saved plan is recalled"
        constraints, hardware = constraints_of(program), request.named_hardware
        return decide(
            program, mesh, hints, constraints, mode=options, hardware=hardware
        )
    seeds = _seeds_by_value(program, mesh, hints)
    with work_clock.within(options.seconds):
        result = search(program, mesh, options, seeds, before=before, parts=parts)
        notes = [str(result)]
        if not options.equal_layers and result.solution.gap > _POOR:
            notes.append(
                f"the plan may be {result.solution.gap:.0%} from the best after "
                f"{options.seconds:.0f} s of search: increase search_seconds"
            )
        notes += [STOPPED] if result.solution.stopped else []
        decision = _found(program, result, seeds, notes)
        if options.ranked:
            decision = with_rivals(decision, hints, options)
    return decision


def with_rivals(
    decision: Decision, hints: Mapping[str, Entries], options: SearchOptions
) -> Decision:
    """Return a searched decision with rivals on its mesh that may be faster."""
    program, result = decision.program, decision.search
    assert result is not None, "a searched decision"
    parts = result.formulation.parts
    if parts is not None and not parts.is_step:
        return decision
    seeds, notes = _seeds_by_value(program, result.mesh, hints), decision.notes[:1]
    others = [_found(program, x, seeds, notes) for x in rivals(result, options)]
    is_laid_out = any(declared.splits for declared in program.signature.inputs)
    for expert in _by_hand(program, result.mesh, hints, options.hardware):
        cost = priced_as(result, expert.strategies)
        if not can_be_faster(result, cost):
            continue
        if is_laid_out:  # an expert's plan, but with the search's layout of parameters
            others += [] if cost is None else [_found(program, cost, seeds, notes)]
            continue
        both = (*notes, *expert.notes)
        others.append(replace(expert, mesh=result.mesh, search=cost, notes=both))
    return replace(decision, rivals=(*decision.rivals, *others))


def _by_hand(
    program: Program,
    mesh: Mesh,
    hints: Mapping[str, Entries],
    hardware: Hardware,
) -> list[Decision]:
    """Return decisions as an expert would begin: each axis used as its name says, all
    axes for the batch, and no axis for it."""
    decisions: dict[tuple[Any, Any], Decision] = {}
    constraints = constraints_of(program)
    for batch in (None, mesh.names, ()):
        decision = decide(
            program, mesh, hints, constraints, batch=batch, hardware=hardware
        )
        decisions.setdefault((decision.strategies, decision.settled), decision)
    return list(decisions.values())


def _found(
    program: Program,
    result: SearchResult,
    seeds: Mapping[int, Sequence[Seed]],
    notes: Sequence[str],
) -> Decision:
    """Return the decision for the result of a search."""
    names_at_rest = {
        v: f"{declared.name} at rest"
        for declared, v in program.tensor_inputs
        if declared.at_rest is not None
    }

    def origin(v: int, axis: str) -> str:
        seeded = (x.origin for x in seeds.get(v, ()) if axis in chain(*x.dims))
        return names_at_rest.get(v) or next(seeded, "search")

    origins = [
        {axis: Origin(origin(v, axis)) for axis in spec.axes}
        for v, spec in enumerate(result.settled)
    ]
    edges = connect(program, result.strategies, result.settled, result.mesh)
    return Decision(
        program,
        result.mesh,
        result.strategies,
        result.settled,
        edges,
        tuple(origins),
        (*notes, *_edge_notes(program, edges, result.mesh)),
        result,
    )


def _given_seeds(
    program: Program,
    mesh: Mesh,
    hints: Mapping[str, Entries],
    constraints: Sequence[tuple[int, Entries]],
) -> list[Seed]:
    """Return seeds of hints, of inputs whose use is known, and of hints in the code."""
    seeds = [
        make_seed(program, v, x.use, mesh, x.kind, f"spec given for {x.name}")
        for x, v in program.tensor_inputs
        if x.use is not None
    ]
    seeds += match(program, hints, mesh)
    for value, entries in constraints:
        what = f"fxpar.constrain at {program.values[value].name}"
        seeds.append(make_seed(program, value, entries, mesh, "value", what))
    return seeds


def _seeds_by_value(
    program: Program, mesh: Mesh, hints: Mapping[str, Entries]
) -> dict[int, list[Seed]]:
    """Return the given seeds by value, as a search takes them."""
    seeds: dict[int, list[Seed]] = {}
    for seed in _given_seeds(program, mesh, hints, constraints_of(program)):
        seeds.setdefault(seed.value, []).append(seed)
    return seeds


def _seed_all(
    engine: Propagation, seeds: list[Seed], over: Iterable[str], notes: list[str]
) -> list[str]:
    """Seed the engine with the given seeds, then with conventions for the axes that
    these leave open. Return the axes by which these split the batch; one that only
    parameters name (ZeRO) still does."""
    program, mesh = engine.program, engine.mesh
    axes = [axis for axis, size in mesh.axes if size > 1]
    named_axes = _axes_named(seeds)
    named_on_values = _axes_named(s for s in seeds if s.priority == 0)
    batch = [axis for axis in over if axis in axes and axis not in named_on_values]
    seeded_values = {seed.value for seed in seeds}
    extra = conventions.batch_seeds(program, mesh, batch, notes)
    along = tuple(
        axis
        for axis in conventions.sequence_axes(mesh)
        if axis not in (*batch, *named_axes)
    )
    extra += conventions.sequence_seeds(program, mesh, along, notes) if along else []
    expert_seeds = conventions.expert_seeds(program, mesh)
    engine.seed(
        seeds
        + expert_seeds
        + [seed for seed in extra if seed.value not in seeded_values]
    )
    assigned = {axis_of(axis) for axis in (*batch, *named_axes, *_axes_named(extra))}
    for axis in dict.fromkeys(map(axis_of, axes)):
        if axis not in assigned:
            conventions.seed_weights(engine, axis)
    return batch


def _axes_named(seeds: Iterable[Seed]) -> set[str]:
    return {axis for seed in seeds for dim in seed.dims for axis in dim}


def _output_seeds(program: Program, mesh: Mesh) -> list[Seed]:
    """Return seeds of outputs that must have a spec; gradients follow parameters. For
    an input that is an output too, or a value with two specs, one seed is kept; the
    outputs are resharded."""
    specs = [
        (v, x.at_rest.without_partial(), f"spec given for {x.name}")
        for x, v in program.tensor_outputs
        if x.at_rest is not None and x.kind != "gradient"
    ]
    return [make_seed(program, v, x, mesh, "value", what) for v, x, what in specs]


def _ties(program: Program) -> list[tuple[int, int]]:
    """Return pairs of values that share a spec: parameters and their gradients,
    tangents and their outputs."""
    signature, pairs = program.signature, []
    for k, result in enumerate(signature.outputs):
        if result.of is not None:
            a, b = program.inputs[result.of], program.outputs[k]
            if a is not None and b is not None and a != b:
                pairs.append((a, b))
    for i, k in signature.tangents:
        a, b = program.inputs[i], program.outputs[k]
        if a is not None and b is not None:
            pairs.append((a, b))
    return pairs


def _edge_notes(program: Program, edges: Edges, mesh: Mesh) -> list[str]:
    """Return notes of what a plan's specs and reshards cost."""
    uneven, gathered = (
        f(program, edges, mesh) for f in (_uneven_notes, _gathered_notes)
    )
    exchanged = exchanged_notes(program, edges) if program.sharded else []
    return [*uneven, *gathered, *exchanged]


def _uneven_notes(program: Program, edges: Edges, mesh: Mesh) -> list[str]:
    """Return notes of dims with unequal shards, for which ranks wait for others."""
    out: dict[tuple[int, Axes], str] = {}
    for value, spec in zip(program.values, edges.specs, strict=True):
        for rows, axes in zip(value.shape, spec.dims, strict=True):
            shared = shard_sizes.has_shares(mesh, axes)
            if shared or shard_sizes.is_even(rows, mesh, axes):
                continue
            largest, idle = (
                f(rows, mesh, axes) for f in (shard_sizes.largest, shard_sizes.idle)
            )
            out.setdefault(
                (rows, axes),
                f"uneven: {rows} rows of {value.name} over {'+'.join(axes)}: the "
                f"largest of {mesh.count(axes)} shards has {largest}, and ranks "
                f"are idle {idle:.0%} of the time",
            )
    return list(out.values())


# A gather of more bytes is a warning.
_MUCH = 1 << 20


def _gathered_notes(program: Program, edges: Edges, mesh: Mesh) -> list[str]:
    """Return notes of split dims that are gathered because an op that depends on the
    order or place of rows, such as a sort or a slice, reads them whole."""
    out: dict[tuple[str, str | None, int], str] = {}
    for reshard in edges.reshards:
        op = program.ops[reshard.reader] if reshard.reader is not None else None
        if op is None or reshard.output is not None:
            continue
        dims = op.rule.operands[op.operands.index(reshard.value)]
        value = program.values[reshard.value]
        pairs = zip(reshard.source.dims, reshard.target.dims, strict=True)
        for d, (before, after) in enumerate(pairs):
            is_whole = not dims[d] or not op.rule.whole.isdisjoint(dims[d])
            is_whole |= is_cut(op) and not op.rule.contracted.isdisjoint(dims[d])
            exchanged = set(before) <= {*reshard.target.sharded_axes}
            if not before or after or not is_whole or value.shape[d] == 1 or exchanged:
                continue
            line = user_line(op.node)
            nbytes = value.nbytes * (1 - 1 / mesh.count(before))
            begin = "gathered: " if nbytes < _MUCH else ""
            out.setdefault(
                (op.name, line, d),
                (
                    f"{begin}{op.name} reads dim {d} of {value.name} "
                    f"{list(value.shape)} whole, which is split over "
                    f"{'+'.join(before)}: up to {nbytes:.0f} bytes to each rank"
                )
                + (f" ({line})" if line else ""),
            )
    return list(out.values())


def _indivisible_notes(
    state: State, program: Program, mesh: Mesh, of_batch: Sequence[str]
) -> list[str]:
    """Return notes of axes that end at a dim. Parameters that are stored over axes of
    the batch are gathered for their use anyway."""
    out: dict[tuple, str] = {}
    for (v, d, axis), origin in state.indivisible.items():
        if axis in of_batch and not origin.batch:
            continue
        value = program.values[v]
        key = (origin.seed, axis, value.shape, d)
        out.setdefault(
            key,
            f"{value.name}: dim {d} of {list(value.shape)} cannot be split over {axis} "
            f"(from {origin.seed}): it stays whole there, "
            f"{value.nbytes * (1 - 1 / mesh.sizes[axis]):.0f} bytes more per rank",
        )
    return list(out.values())


# -- a batch in parts ----------------------------------------------------------------

# A message between places in time is a read and a write of memory, so that a reduction
# is cheaper the earlier it runs.
_MEMORY = Link(bandwidth=1e12, latency=0.0, overhead=0.0)


def cut_in_time(program: Program) -> BatchCut | None:
    """Return the factors and dims that follow the batch, by the same factor rules that
    split a batch over ranks; None if the batch cannot be cut. ``stages.microbatches``
    cuts the local graph in the same way."""
    program = whole_in_time(program)
    batch = conventions.batch_inputs(program)
    if not batch:
        return None
    rows = math.gcd(*(program.values[v].shape[0] for v in batch))
    if rows < 2:
        return None
    least = next(n for n in range(2, rows + 1) if rows % n == 0)
    timed = decide_in_time(program, least, batch)
    if not timed.is_even:
        return None
    factors = [
        frozenset(f for f, axes in strategy.factors if axes)
        for strategy in timed.strategies
    ]
    specs = list(timed.edges.specs)
    sums = frozenset(v for v, spec in enumerate(specs) if spec.partial)
    inputs = set(program.inputs)
    for reshard in timed.edges.reshards:  # inputs are whole, and read in parts
        if reshard.value in inputs:
            specs[reshard.value] = reshard.target
    dims = [frozenset(d for d, axes in enumerate(x.dims) if axes) for x in specs]
    for op, cut in zip(program.ops, factors, strict=True):
        rows = math.gcd(rows, *(op.rule.size[f] for f in cut))
    return BatchCut(tuple(factors), tuple(dims), sums, rows)


def whole_in_time(program: Program) -> Program:
    """Return the program with each input and output whole."""

    def whole(v: int | None) -> Spec | None:
        return None if v is None else Spec.whole(len(program.values[v].shape))

    signature = program.signature
    inputs = (
        replace(end, at_rest=whole(v), use=None)
        for end, v in zip(signature.inputs, program.inputs, strict=True)
    )
    outputs = (
        replace(end, at_rest=whole(v), layout="whole")
        for end, v in zip(signature.outputs, program.outputs, strict=True)
    )
    signature = Signature(tuple(inputs), tuple(outputs), signature.tangents)
    return replace(program, signature=signature)


def decide_in_time(program: Program, count: int, batch: Iterable[int]) -> Decision:
    """Return the decision for a program whose inputs and outputs are whole, over
    ``count`` places in time that split dim 0 of the values of a batch."""
    mesh = Mesh(((conventions.TIME, count),), (_MEMORY,))
    seeds = [(v, (conventions.TIME,)) for v in batch]
    return decide(program, mesh, {}, seeds, batch=())
