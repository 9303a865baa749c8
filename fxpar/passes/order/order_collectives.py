"""Orders the collectives of a forward or a backward by itself, and the work that can
wait for them (``delay_work``).

In: the bound graph of one of the two, as it goes to code generation: a ``PhaseGraph``.
Out: the same graph, changed in place by the passes of ``ORDER``, then by ``LAST``:
rows that ``fxpar.pipeline`` takes into its list, and that ``schedule`` runs to predict
a step. Never: ranks get different orders of collectives; each has the same graph.

``recompute_in_step``: of the graph of a whole step, light values of the forward that
the backward reads are computed again in the backward if it can compute them from values
that are kept anyway (``sharding.cost.recompute``). AOTAutograd does this when it splits
forward and backward; a step is one graph that it does not split. Never repeated:
collectives, draws, nodes that a schedule placed, and nodes that read an input that the
graph writes before its end.

``start_first``: a collective of values that light ops compute from graph inputs, such
as the number of valid labels, starts before any other work, so that no rank waits for
the others in the middle of a step. ``wait_last``: a wait, and light ops that only lead
from it to an output of one element, such as the mean of a loss, come last, so that the
backward of a step does not wait for them. Never: either one holds more than ``ROOM``
bytes for longer, moves work that contracts, draws or writes, or touches the update,
chunks, fused regions, gathers that ``prefetch`` places, or a graph with messages
between stages, whose ranks have different orders of collectives; or ``start_first``
moves a collective on uneven shards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import calls_where
from fxpar.graph.builder import Builder, custom_of, region_of
from fxpar.graph.custom_ops import register_lowerings
from fxpar.graph.pipeline_ops import MESSAGES
from fxpar.passes.order.bucket_collectives import (
    LARGEST,
    Joinable,
    join_buckets,
)
from fxpar.passes.order.delay_work import (
    delay,
    derived_from,
    from_inputs,
    hoist,
    is_cheap,
    is_chunk,
    is_pure,
    is_write,
    needed,
    sink,
    sink_waits,
)
from fxpar.passes.simulate.launches import KINDS, WAIT
from fxpar.sharding.cost.collectives import FULL
from fxpar.sharding.cost.op import bytes_of, is_contraction, viewed
from fxpar.sharding.cost.recompute import computed_again, with_operands
from fxpar.sharding.op_facts import is_draw, is_random
from fxpar.sharding.program import PHASE, descendants, phase_of

ours = torch.ops.fxpar

c10d = torch.ops._c10d_functional

_GATHER = c10d.all_gather_into_tensor.default


@dataclass(frozen=True)
class Settings:
    """Holds how collectives are joined and started early."""

    # Bytes of a full bucket; None: the default.
    bucket: int | None = None
    # Bytes of a bucket of gathers, whose results are all live at once; None: as
    # ``bucket``.
    gathers: int | None = None
    # Number of gathers of parameters that are started before they are needed.
    ahead: int = 1
    # Bytes of a bucket of gathers that a backward repeats; None: as ``gathers``.
    again: int | None = None


DEFAULT = Settings()


@dataclass
class PhaseGraph:
    """Is the graph of a forward or a backward by itself, with what passes need."""

    # Changed in place.
    graph: fx.Graph
    # Gradients are reduced in it: a backward, or a step that has one inside.
    backward: bool
    # The settings of the schedule.
    settings: Settings = DEFAULT

    @cached_property
    def build(self) -> Builder:
        values = [node.meta.get("val") for node in self.graph.nodes]
        return Builder(self.graph, _torch.fake.mode_of(values))

    @property
    def waits(self) -> bool:
        """Return whether the graph waits for a collective."""
        waits = self.graph.find_nodes(op="call_function", target=WAIT)
        return bool(waits) and self.build.fake_mode is not None


def schedule(
    graph: fx.Graph,
    *,
    backward: bool,
    disable: Collection[str] = (),
    settings: Settings = DEFAULT,
) -> None:
    """Run the passes that ``disable`` does not name; the graph is checked once, after
    the last, since many schedules are tried."""
    phase = PhaseGraph(graph, backward, settings)
    for row in (*ORDER, *LAST):
        if row.name not in disable:
            row.run(graph, phase)
    graph.lint()


def join(graph: fx.Graph, phase: PhaseGraph) -> None:
    """Join collectives in buckets of the sizes in the settings."""
    if phase.waits:
        joinable = Joinable.of(graph, reductions=phase.backward)
        join_buckets(graph, phase.build, buckets_of(joinable, phase.settings))


def buckets_of(joinable: Joinable, settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Return the buckets, by names, of the collectives to join under settings."""
    most = FULL if settings.bucket is None else settings.bucket
    gathers = most if settings.gathers is None else settings.gathers
    again = gathers if settings.again is None else settings.again
    return joinable.buckets(reduction=most, gather=gathers, again=again)


def drop_unread(graph: fx.Graph) -> None:
    """Erase waits that nothing reads, with the collectives they wait for and the nodes
    that these send, draws included; and all waits but the first for one collective.

    The partitioner repeats waits for forward results in the backward, and dead code
    elimination may not remove them: a backward would draw, and the next step have other
    numbers than on one device. Equal reductions, such as those of the biases of two
    layers that are added, it merges to one, which then has two waits.
    """
    first: dict[fx.Node, fx.Node] = {}
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        kept_wait = first.setdefault(wait.args[0], wait)
        if kept_wait is not wait:
            wait.replace_all_uses_with(kept_wait)
    if all(n.users or n.op in ("placeholder", "output") for n in graph.nodes):
        return
    graph.eliminate_dead_code(
        lambda n: (
            bool(n.users)  # first, since it is cheap and mostly true
            or (n.target is not WAIT and not is_random(n) and n.is_impure())
        )
    )


def start_early(graph: fx.Graph, phase: PhaseGraph) -> None:
    """Start gathers as far ahead as the settings say."""
    if phase.waits:
        prefetch(graph, phase.settings.ahead)


def prefetch(graph: fx.Graph, ahead: int = 1) -> None:
    """Start each gather of parameters where the gather ``ahead`` before it is first
    read, so that it overlaps with the work on that. FSDP starts one ahead: more hold
    more in memory. The partitioner puts gathers that a backward repeats at its top, in
    the forward's order, so all are first moved to where they are read. Gathers among
    stages stay where they are, since each stage has other nodes between its
    messages."""
    of_stages = {message.args[-1] for message in _messages(graph)}

    def may_move(node: fx.Node) -> bool:
        among_stages = node.target is _GATHER and node.args[-1] in of_stages
        return not among_stages and (is_cheap(node) or node.target in (_GATHER, WAIT))

    input_derived = derived_from(graph.find_nodes(op="placeholder"), may_move)
    sink(graph, {node for node in input_derived if node.op != "placeholder"})
    gathers = graph.find_nodes(op="call_function", target=_GATHER)
    ends = _read_next(gathers, input_derived)
    for i, node in enumerate(ends[1:], 1):
        at = min(ends[max(0, i - ahead)].users)  # its wait
        if at < node:
            hoist(node, at)


def gathers_started(graph: fx.Graph) -> int:
    """Return the most gathers that ``prefetch`` may move; passes before it only reduce
    their number."""
    gathers = graph.find_nodes(op="call_function", target=_GATHER)
    derived = from_inputs(graph, through=(_GATHER, WAIT)) if gathers else ()
    return len(_read_next(gathers, derived))


def _read_next(
    gathers: Iterable[fx.Node], input_derived: Collection[fx.Node]
) -> list[fx.Node]:
    """Return gathers of graph inputs that are not followed by one over more axes."""
    return [
        node
        for node in gathers
        if node in input_derived
        and not any(_is_gathered_again(wait, input_derived) for wait in node.users)
    ]


def _messages(graph: fx.Graph) -> list[fx.Node]:
    """Return the messages between stages, in order."""
    return calls_where(graph, MESSAGES.__contains__)


def _is_gathered_again(wait: fx.Node, input_derived: Collection[fx.Node]) -> bool:
    """Return whether a gathered value is gathered over more axes before it is used."""
    return any(
        user.target is _GATHER
        or (user in input_derived and _is_gathered_again(user, input_derived))
        for user in wait.users
    )


# Reduce-scatters under way at a time. The operand of one, an unsharded gradient, lives
# until its wait.
UNDER_WAY = 2


def drain(graph: fx.Graph) -> None:
    """Wait for a reduce-scatter before the next but one starts; except for chunks,
    which together read no more than one device holds at once."""
    all_scatters = graph.find_nodes(
        op="call_function", target=c10d.reduce_scatter_tensor.default
    )
    scatters = [node for node in all_scatters if not is_chunk(node)]
    for before, node in zip(scatters, scatters[UNDER_WAY:], strict=False):
        for wait in list(before.users):
            if wait.target is WAIT and node < wait:
                node.prepend(wait)


def give_outputs(graph: fx.Graph) -> None:
    """Replace all-gathers on CPU by an op of our own, which is given its output tensor.

    The two threads of a gloo group (torch 2.13) both write the name of what they
    completed to one ``std::string``, without a lock: for names too long to be stored in
    the string itself that is a double free. ALLGATHER_COALESCED, which the functional
    all-gather runs as, is the only one of those that compiled graphs could run; given
    its output it runs as ALLGATHER. An op of our own, since Inductor (2.13) does not
    order readers after ``all_gather_into_tensor_out``.
    """
    for node in graph.find_nodes(op="call_function", target=_GATHER):
        value = node.meta["val"]
        if value.device.type == "cpu" and not value.is_complex():
            register_lowerings()
            node.target = ours.all_gather_into_tensor.default


def recompute_in_step(graph: fx.Graph) -> None:
    """Copy each recomputed node to before its first reader in the backward."""
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    later = {node for node in calls if phase_of(node) in ("backward", "update")}
    if not later:
        return
    writes = set(calls_where(graph, is_write))
    late: dict[fx.Node, None] = {}  # with nodes that passes added, without a phase
    for node in calls:
        if node in writes:
            continue  # a value that one reads was computed before the writes
        if node in later or any(read in late for read in node.all_input_nodes):
            late[node] = None
    if not late:
        return
    changed = {viewed(n) for w in writes if w < max(late) for n in w.all_input_nodes}
    recomputed = {
        node
        for node in computed_again(calls, late)
        if _can_repeat(node) and changed.isdisjoint(map(viewed, node.all_input_nodes))
    }
    copies: dict[fx.Node, fx.Node] = {}
    pending: list[fx.Node] = []
    for node in with_operands(late, late, recomputed):
        if node in recomputed:
            pending.append(node)
            continue
        with graph.inserting_before(node):
            for each in sorted(pending):
                copies[each] = copy = graph.node_copy(each, lambda n: copies.get(n, n))
                copy.meta["custom"] = custom_of(each) | {PHASE: "backward"}
        pending.clear()
        node.args = fx.node.map_arg(node.args, lambda n: copies.get(n, n))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda n: copies.get(n, n))
    for node in reversed(calls):
        if node in recomputed and not node.users:
            graph.erase_node(node)
    graph.lint()


def _can_repeat(node: fx.Node) -> bool:
    """Return whether an op may be repeated: it only computes, and draws nothing."""
    if node.target is operator.getitem:
        return _can_repeat(node.args[0])
    if is_chunk(node) or region_of(node):
        return False
    tensors = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    is_core = getattr(node.target, "namespace", "") in ("aten", "prims")
    return tensors and is_core and not is_draw(node)


# Bytes that may be held for longer, in all.
ROOM = 1 << 20


def start_first(graph: fx.Graph) -> None:
    """Move collectives of small values that light ops compute from graph inputs, with
    these ops, before all other work, in their order."""
    collectives = calls_where(graph, lambda target: KINDS.get(target) in _STARTED)
    if not collectives or _messages(graph):
        return
    placed_by_prefetch = from_inputs(graph, through={*KINDS, WAIT})
    sources = _light_sources(graph)
    started: dict[fx.Node, None] = {}
    room = ROOM
    for node in collectives:
        if not _can_start(node) or node in placed_by_prefetch:
            continue
        if not sources.issuperset(node.all_input_nodes):
            continue
        moved = dict.fromkeys(needed(node))
        held = {viewed(n) for n in moved if not moved.keys() >= n.users.keys()}
        new = [n for n in held - started.keys() if n.op == "call_function"]
        size = sum(map(bytes_of, new))
        if size <= room:
            room -= size
            started.update(moved)
    # Tokens of ops with effects, such as checks of solvers, are made between inputs.
    inputs = graph.find_nodes(op="placeholder")[-1:]
    others = (n for n in graph.nodes if n not in started and all(n > x for x in inputs))
    first = next(others)  # the output at the latest
    for node in sorted(started):
        first.prepend(node)


def wait_last(graph: fx.Graph) -> None:
    """Move waits, and light ops after them, that lead only to outputs of one element,
    to the end."""
    results = graph.output_node().all_input_nodes
    if _messages(graph) or not any(map(_is_one, results)):
        return
    waited = descendants(graph.find_nodes(op="call_function", target=WAIT))
    last: set[fx.Node] = set()
    room = ROOM
    for node in sorted(waited, reverse=True):
        if not _is_only_for_scalars(node, last) or not _can_wait(node):
            continue
        reads = {viewed(n) for n in node.all_input_nodes}
        size = bytes_of(node) + sum(map(bytes_of, reads))
        if size <= room:
            room -= size
            last.add(node)
    sink(graph, last)


# Kinds of collectives that may start first.
_STARTED = ("all_gather", "reduce_scatter", "all_reduce")

# Kinds of nodes that need no work.
_INPUTS = ("placeholder", "get_attr")


def _can_start(node: fx.Node) -> bool:
    """Return whether a collective may move before others: not if its shards are uneven,
    since ranks would then decide by different sizes."""
    is_even = LARGEST not in custom_of(node)
    return is_even and not is_chunk(node) and not region_of(node)


def _is_only_for_scalars(node: fx.Node, last: Collection[fx.Node]) -> bool:
    """Return whether a node leads only to outputs of one element, such as a loss, by
    nodes in ``last``."""
    return bool(node.users) and all(
        _is_one(node) if user.op == "output" else user in last for user in node.users
    )


def _is_one(node: fx.Node) -> bool:
    """Return whether a node is a tensor without dims."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _can_wait(node: fx.Node) -> bool:
    if node.target is WAIT:
        return not is_chunk(node.args[0]) and not region_of(node.args[0])
    return _is_light_work(node) and phase_of(node) != "update"


def _is_light_work(node: fx.Node) -> bool:
    return is_pure(node) and not is_contraction(node.target)


def _light_sources(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes computed from graph inputs by light ops, before any write."""
    light = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and is_write(node.target):
            break
        is_light = node.op in _INPUTS or _is_light_work(node)
        if is_light and light.issuperset(node.all_input_nodes):
            light.add(node)
    return light


Run = Callable[[fx.Graph, Any], fx.Graph | None]


@dataclass(frozen=True)
class Pass:
    """Is one step of ``fxpar.pipeline``."""

    # The name in FXPAR_DISABLE and in printed output.
    name: str
    # (graph, context): changes the graph in place, or returns another. The context is a
    # state of ``pipeline_state``, or the PhaseGraph of a prediction.
    run: Run
    # FXPAR_DISABLE may leave it out.
    optional: bool = True
    # The stage that the graph is in after it, by its name in the docs; "" where
    # another step ends the stage.
    stage: str = ""
    # What it has something to do for, looked for when its turn comes; it always runs if
    # none of these is given. Ops of the graph (``op_facts.has_any``):
    ops: str = ""
    # Ops whose rows state this fact:
    fact: str = ""
    # An attribute of the context that is set:
    setting: str = ""


def of_build(function: Callable[[fx.Graph, Builder], None]) -> Run:
    """Return the ``run`` of a pass that needs the context's builder."""
    return lambda graph, context: function(graph, context.build)


# The passes over a phase, in order; regions are fused after them, before ``LAST``.
ORDER = (
    Pass("drop_unread", lambda graph, _: drop_unread(graph), optional=False),
    Pass("recompute_in_step", lambda graph, _: recompute_in_step(graph)),
    Pass("bucket", join),
    Pass("start_first", lambda graph, _: start_first(graph)),
    Pass("sink_waits", lambda graph, _: sink_waits(graph)),
    Pass("wait_last", lambda graph, _: wait_last(graph)),
    Pass("prefetch", start_early),
    Pass("drain", lambda graph, _: drain(graph)),
)
LAST = (
    Pass("give_outputs", lambda graph, _: give_outputs(graph), optional=False),
    Pass("delay", lambda graph, _: delay(graph), stage="scheduled"),
)

# The passes of ``ORDER`` before "bucket", which do not depend on settings.
BEFORE_BUCKETS = ORDER[: [row.name for row in ORDER].index("bucket")]
