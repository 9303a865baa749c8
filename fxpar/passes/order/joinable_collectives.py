"""Which collectives of a forward or a backward may be joined, and in which buckets.

In: the graph of one of the two. Out: ``Joinable``, data that tells for any sizes what
``bucket_collectives`` joins. A gather may be joined if its operand is made of graph
inputs by cheap ops alone; a reduction if nothing but cheap ops stand between its result
and the graph's output. Operands never wait for anything of their own bucket, nor for a
bucket that does. In the graph of a training step the update stands behind the
reductions, as the output does elsewhere. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.passes.order.sink_waits import WAIT, is_chunk
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.program import phase_of

c10d = torch.ops._c10d_functional

# The checkpointed region of what is gathered again in the backward, among the user's.
REGATHERED = 1 << 20

# What a node says of itself, in ``meta["custom"]``, which all passes keep: which region
# a schedule made of it.
REGION = "fxpar_region"
# And what ``whole_bytes`` are on the rank with the largest shards, where these are not
# alike.
LARGEST = "fxpar_largest"

_GATHER = c10d.all_gather_into_tensor.default
_SCATTER = c10d.reduce_scatter_tensor.default
_REDUCE = c10d.all_reduce.default


@dataclass
class _Bucket:
    """Collectives of one kind that become one."""

    # Names, in graph order.
    members: list[str] = field(default_factory=list)
    size: int = 0  # bytes


@dataclass(frozen=True)
class JoinableCollective:
    """What of a collective tells which others it may be joined with."""

    # Of its node.
    name: str
    # "reduction", "gather", or "again": a backward's gather of what a forward gathered.
    what: str
    # Equal for those that may be joined.
    kind: Hashable
    # As ``whole_bytes``.
    size: int
    # Names of the reductions among those that could be joined that it depends on.
    before: frozenset[str]


@dataclass(frozen=True)
class Joinable:
    """The collectives of a phase that could be joined, whatever their sizes."""

    # In graph order.
    collectives: tuple[JoinableCollective, ...]

    @staticmethod
    def of(graph: fx.Graph, *, reductions: bool) -> Joinable:
        """Gathers of parameters; ``reductions`` of gradients too."""
        candidates = set[fx.Node]()
        gathers = graph.find_nodes(op="call_function", target=_GATHER)
        if gathers:
            derived = from_inputs(graph)
            candidates.update(
                node
                for node in gathers
                if node.args[0] in derived and (not reductions or _is_read_alike(node))
            )
        before: Mapping[fx.Node, frozenset[str]] = {}
        if reductions:
            near_output = _near_output(graph)
            ends = {n for n in near_output if n.target in (_SCATTER, _REDUCE)}
            candidates |= ends
            before = _reductions_before(ends)
        none = frozenset[str]()
        return Joinable(
            tuple(
                JoinableCollective(
                    node.name,
                    _what(node, reductions),
                    _kind_of(node),
                    whole_bytes(node),
                    before.get(node, none),
                )
                for node in sorted(candidates)
                if _may_join(node)
            )
        )

    def buckets(self, **most: int) -> tuple[tuple[str, ...], ...]:
        """Names of those that are joined, by bucket. ``most``: bytes of a full bucket,
        by ``JoinableCollective.what``."""
        opened: dict[Hashable, _Bucket] = {}
        filled: list[_Bucket] = []
        home: dict[str, _Bucket] = {}
        before = {each.name: each.before for each in self.collectives}
        for each in self.collectives:
            room = most[each.what]
            if each.size >= room:
                continue
            open_bucket = opened.get(each.kind)
            needs = _buckets(each.before, home, before)
            if (
                open_bucket is None
                or id(open_bucket) in needs
                or open_bucket.size + each.size > room
            ):
                open_bucket = opened[each.kind] = _Bucket()
                filled.append(open_bucket)
            open_bucket.members.append(each.name)
            open_bucket.size += each.size
            home[each.name] = open_bucket
        return tuple(tuple(b.members) for b in filled if len(b.members) > 1)


def _what(node: fx.Node, backward: bool) -> str:
    if node.target is not _GATHER:
        return "reduction"
    is_again = backward and node.meta.get("ac_graph_id") == REGATHERED
    return "again" if is_again else "gather"


def _kind_of(node: fx.Node) -> Hashable:
    value = node.args[0].meta["val"]
    return node.target, node.args[1:], value.dtype, value.device


def _may_join(node: fx.Node) -> bool:
    """Whether a schedule leaves it alone, and its kind can be joined."""
    real = not node.args[0].meta["val"].is_complex()
    return real and not is_chunk(node) and not region_of(node)


def _is_read_alike(node: fx.Node) -> bool:
    """Whether all ranks gather in a backward what it is given: where shards are not
    alike some may save what others compute again, but for what is made of parameters.
    """
    return LARGEST not in _custom(node) or node.meta.get("ac_graph_id") == REGATHERED


def from_inputs(graph: fx.Graph, through: Collection[Any] = ()) -> set[fx.Node]:
    """Nodes made of graph inputs by cheap ops, and those in ``through``, alone."""
    return derived_from(graph.find_nodes(op="placeholder"), through)


def derived_from(
    inputs: Iterable[fx.Node],
    through: Collection[Any] = (),
    within: Collection[fx.Node] | None = None,
) -> set[fx.Node]:
    """Inputs, and what is made of these so; ``within`` some nodes, if told."""
    derived = set(inputs)
    pending = list(derived)
    while pending:
        for user in pending.pop().users:
            if user in derived or not (within is None or user in within):
                continue
            if (is_cheap(user) or user.target in through) and derived.issuperset(
                user.all_input_nodes
            ):
                derived.add(user)
                pending.append(user)
    return derived


def is_cheap(node: fx.Node) -> bool:
    """Whether work may stand between a collective and the border of the graph."""
    facts = op_facts_of(node.target)
    return facts.moves or facts.reshapes or facts.casts


def _near_output(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between which and the output there is nothing but cheap work."""
    ends: set[fx.Node] = set()
    borders = {graph.output_node()}
    borders.update(node for node in graph.nodes if phase_of(node) == "update")
    pending = [read for border in borders for read in border.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in ends and all(
            user in borders or (user in ends and _leads_on(user.target))
            for user in node.users
        ):
            ends.add(node)
            pending += node.all_input_nodes if _leads_on(node.target) else ()
    return ends


def _leads_on(target: Any) -> bool:
    """Whether what an op reads may be near the output, if the op is."""
    facts = op_facts_of(target)
    return (
        facts.moves
        or facts.reshapes
        or facts.casts
        or facts.scales
        or target in (WAIT, _SCATTER, _REDUCE)
    )


def region_of(node: fx.Node) -> str | None:
    """The region that a schedule's line ``fuse`` made of it and others."""
    return _custom(node).get(REGION)


def _custom(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _reductions_before(
    reductions: Collection[fx.Node],
) -> dict[fx.Node, frozenset[str]]:
    """For nodes that depend on some reductions, the names of these."""
    waits = {u: n for n in reductions for u in n.users if u.target is WAIT}
    behind, pending = set(waits), list(waits)
    while pending:
        new = [user for user in pending.pop().users if user not in behind]
        behind.update(new)
        pending += new
    none = frozenset[str]()
    out: dict[fx.Node, frozenset[str]] = {}
    for node in sorted(behind):
        own = (waits[node].name,) if node in waits else ()
        out[node] = none.union(own, *(out.get(r, none) for r in node.all_input_nodes))
    return out


def _buckets(
    names: Iterable[str],
    home: Mapping[str, _Bucket],
    before: Mapping[str, Iterable[str]],
) -> set[int]:
    """Ids of the buckets that must be done before what depends on collectives is:
    theirs, and those that any member of these depends on."""
    ids: set[int] = set()
    stack = list(names)
    while stack:
        bucket_of_node = home.get(stack.pop())
        if bucket_of_node is not None and id(bucket_of_node) not in ids:
            ids.add(id(bucket_of_node))
            stack += [n for member in bucket_of_node.members for n in before[member]]
    return ids


def whole_bytes(node: fx.Node) -> int:
    """Bytes of the larger of operand and result; where shards are not alike of the
    largest ones, so that all ranks fill their buckets with the same."""
    largest = _custom(node).get(LARGEST)
    return largest or max(nbytes_of(x.meta["val"]) for x in (node, node.args[0]))
