"""local -> as run: forward and backward parted, each scheduled, and joined again.

In: a local graph, joint or not. Out: a new graph of the same results, in which nodes
stand as they do in what is compiled: what the backward needs of the forward is kept or
computed again in the backward, and ``schedule`` has been applied to either. For
``simulate``; what runs is parted by AOTAutograd on the bound graph. Where AOTAutograd
solves a minimum cut, this decides one value after the other: a light op is computed
again if what it reads weighs less than what it gives, or is kept anyway. What is tagged
to be computed again (gathered parameters, the user's checkpoints) is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.passes.bucket_collectives import phase_of
from fxpar.passes.launches import KINDS, WAITS, depending_on_tangents
from fxpar.passes.order_collectives import DEFAULT, Settings, schedule
from fxpar.sharding.cost.op import (
    is_light,
    is_pointwise,
    is_view,
    nbytes_of,
    tensors_in,
)
from fxpar.sharding.rules.op_facts import op_facts_of

# What the tags of checkpoints say: whether the backward computes a value again.
_TAGGED = {
    CheckpointPolicy.MUST_RECOMPUTE: True,
    CheckpointPolicy.PREFER_RECOMPUTE: True,
    CheckpointPolicy.MUST_SAVE: False,
}

# So many light ops in a row are computed again, as AOTAutograd bans long chains.
_CHAIN = 16


def as_run(
    graph: fx.Graph,
    *,
    disable: Collection[str] = (),
    settings: Settings = DEFAULT,
) -> fx.Graph:
    """The graph in the order it runs; ``disable``: passes of ``schedule`` to leave out;
    ``settings``: of the others.

    Nodes of the backward are tagged ("partitioner_tag"), as AOTAutograd tags them.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    results = list(graph.output_node().args[0])
    late = depending_on_tangents(graph)
    if not late:
        whole = _graph(inputs, calls, results)
        of_step = any(map(phase_of, calls))  # which has its backward inside
        schedule(whole, backward=of_step, disable=disable, settings=settings)
        return whole
    second = _with_again(calls, late)
    there, read = set(second), {r for n in second for r in n.all_input_nodes}
    given = [n for n in calls if n in read and n not in there]
    early = [r for r in results if r not in late]
    grads = [r for r in results if r in late]
    ahead = _ancestors([r for r in (*early, *given) if isinstance(r, fx.Node)])
    first = [n for n in calls if n in ahead]
    forward = _graph(inputs, first, [*early, *given])
    backward = _graph([*inputs, *given], second, grads)
    schedule(forward, backward=False, disable=disable, settings=settings)
    schedule(backward, backward=True, disable=disable, settings=settings)
    return _joined(forward, backward, [r in late for r in results])


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes, and all they are computed from."""
    found, rest = set(nodes), list(nodes)
    while rest:
        for read in rest.pop().all_input_nodes:
            if read not in found:
                found.add(read)
                rest.append(read)
    return found


def _with_again(calls: Sequence[fx.Node], late: Collection[fx.Node]) -> list[fx.Node]:
    """The backward's nodes: those that are ``late``, and others that it computes for
    itself, each before what reads it."""
    again = _computed_again(calls, late)
    done: set[fx.Node] = set()
    out: list[fx.Node] = []
    for node in calls:
        stack = [node] if node in late else []
        while stack:
            missing = [
                read
                for read in stack[-1].all_input_nodes
                if read in again and read not in done
            ]
            if missing:
                stack += reversed(missing)
                continue
            made = stack.pop()
            if made not in done:
                done.add(made)
                out.append(made)
    return out


def _computed_again(
    calls: Sequence[fx.Node], late: Collection[fx.Node]
) -> set[fx.Node]:
    """What the backward reads and computes from other values that it is given. Not what
    it would have to write to memory, where a product reads it."""
    needed: set[fx.Node] = set()
    again: set[fx.Node] = set()
    must = {node for node in calls if _tag(node) is False}  # be kept
    row: dict[fx.Node, int] = {}  # so many ops after it are computed again
    for node in reversed(calls):
        if node in late:
            if not is_light(node.target):
                must.update(_seen(read) for read in node.all_input_nodes)
        elif node in needed and _is_lighter(node, needed, must):
            again.add(node)
            count = row.get(node, 0) + 1
            row.update((r, max(count, row.get(r, 0))) for r in node.all_input_nodes)
            if count >= _CHAIN:
                must.update(node.all_input_nodes)
        else:
            continue
        needed.update(node.all_input_nodes)
    early = [node for node in calls if node not in late]
    kept = {node for node in early if node in needed and node not in again}
    for node in _free(early, kept - must, kept | again):
        kept.discard(node)
        again.add(node)
    for node in reversed(early):
        if node in again:
            made = (r for r in node.all_input_nodes if r.op != "placeholder")
            again.update(r for r in made if r not in kept)
    return again


def _free(
    early: Sequence[fx.Node], may: Collection[fx.Node], there: Collection[fx.Node]
) -> list[fx.Node]:
    """Those that ``may`` go, since a few light ops give them of others that are
    ``there``."""
    ops: dict[fx.Node, int] = {}  # so many in a row
    out = []
    for node in early:
        read = (r for r in node.all_input_nodes if r.op != "placeholder")
        count = 1 + max((ops.get(r, _CHAIN) for r in read), default=0)
        light = count <= _CHAIN and (_is_given(node) or is_pointwise(node))
        if light and (node in may or node not in there):
            ops[node] = count
            if node in may:
                out.append(node)
        elif node in there:
            ops[node] = 0
    return out


def _is_given(node: fx.Node) -> bool:
    """Whether a value takes no work: a view, a constant, or no tensor."""
    if node.target is operator.getitem:
        return _is_given(node.args[0])
    if node.target in KINDS or node.target in WAITS:
        return False
    if node.op == "get_attr" or op_facts_of(node.target).constant:
        return True
    return not tensors_in(node.meta.get("val")) or is_view(node)


def _tag(node: fx.Node) -> bool | None:
    """Whether a value is tagged to be computed again; None if it is not tagged."""
    if node.target is operator.getitem:
        return _tag(node.args[0])
    return _TAGGED.get(node.meta.get("recompute"))


def _is_lighter(
    node: fx.Node, needed: Collection[fx.Node], must: Collection[fx.Node]
) -> bool:
    """Whether what a value is made of weighs less than itself, what is ``needed`` being
    there anyway; or it is tagged so."""
    if _tag(node) or _is_given(node):
        return True
    if node in must or not is_pointwise(node):
        return False
    size = _bytes(node)
    read = {_seen(read) for read in node.all_input_nodes}
    read = {
        r for r in read if r.op != "placeholder" and not op_facts_of(r.target).constant
    }
    more = sum(_bytes(r) for r in read if r not in needed)
    # Of a function of one value that one is kept, from which there may be others.
    return more < size or more == size and len(read) == 1


def _seen(node: fx.Node) -> fx.Node:
    """What a view looks at."""
    while node.op == "call_function" and node.target not in WAITS and is_view(node):
        node = node.args[0]
    return node


def _bytes(node: fx.Node) -> int:
    return sum(nbytes_of(value) for value in tensors_in(node.meta.get("val")))


def _graph(
    inputs: Iterable[fx.Node], calls: Iterable[fx.Node], results: Iterable[Any]
) -> fx.Graph:
    """A graph of copies; ``inputs`` that are no placeholders become such."""
    graph = fx.Graph()
    made: dict[Any, Any] = {}
    for node in inputs:
        if node.op == "placeholder":
            made[node] = graph.node_copy(node)
        else:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
    for node in calls:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made.get(r, r) for r in results])
    return graph


def _joined(forward: fx.Graph, backward: fx.Graph, late: Sequence[bool]) -> fx.Graph:
    """Forward and backward one after the other. ``late``: which of the results are of
    the backward."""
    graph = fx.Graph()
    early = _append(graph, forward, [], "is_forward")
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    count = late.count(False)
    grads = _append(graph, backward, [*inputs, *early[count:]], "is_backward")
    of = iter(early[:count]), iter(grads)
    graph.output([next(of[is_late]) for is_late in late])
    graph.lint()
    return graph


def _append(
    graph: fx.Graph, part: fx.Graph, given: Sequence[fx.Node], tag: str
) -> list[fx.Node]:
    """Add tagged copies of a part's nodes, ``given`` being its inputs, or else copies
    of them too; returns its results."""
    made: dict[fx.Node, fx.Node] = {}
    feeds = iter(given)
    for node in part.nodes:
        if node.op == "placeholder" and given:
            made[node] = next(feeds)
        elif node.op != "output":
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta["partitioner_tag"] = tag
    results = part.output_node().args[0]
    return [made[r] if isinstance(r, fx.Node) else r for r in results]
