"""Compile a graph that is identical on several ranks on one of them.

In: a graph as Inductor gets it, and the function that compiles it. Out: the compiled
code. The first rank that comes compiles; the others that see the same folder of caches
wait for it and then compile in turn, which finds the result there. Machines without a
common folder compile at the same time. Ranks of all places share what they compile. A
rank whose graph differs (another size of shard, another device) waits for nobody. A
rank that fails reports it to those that wait; if one ends or hangs they wait as for any
other (``presence``). Never: code of another graph.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

from torch import fx

from fxpar import _torch, cache_files
from fxpar._fast import cpp_kernels
from fxpar.errors import RankMismatchError
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.runtime.caches.plan_store import lines_of
from fxpar.runtime.ranks import presence
from fxpar.runtime.ranks.meeting import Channel, all_ranks, answering
from fxpar.runtime.ranks.presence import Patience, timeout
from fxpar.runtime.stage_times import INDUCTOR, stage

# A rank that waits asks at least so often, in seconds; one that waits long, after this
# share of its wait, at most the last number of seconds: asking costs 0.2 ms, and as
# much on the rank that answers.
SLOWEST_POLL, OF_WAIT, LONGEST_PAUSE = 0.05, 0.01, 0.2

# Compiles; takes a text that replaces the graph in the keys of Inductor's cache.
Generate = Callable[[str | None], Any]


def compile_once(graph: fx.Graph, what: str, generate: Generate) -> Any:
    """Return the result of ``generate``, called on one rank before the others that have
    this graph. ``what``: the graph, in words that all ranks count equally.

    Raises RankMismatchError if the rank that compiles fails, or does not end.
    """
    with stage(INDUCTOR), presence.works(f"compiles {what}"):
        channel = all_ranks()
        if _torch.inductor.is_cache_disabled() or not _is_text(graph):
            return generate(None)
        text = _digest(graph)
        if channel is None:
            return generate(text)
        folder = hashlib.sha256(cache_files.folder_text().encode()).hexdigest()[:16]
        key = f"{channel.prefix}/compiled/{what}/{text}/{folder}"
        word = str(channel.rank)
        with answering(channel):
            first = channel.store.compare_set(key, "", word).decode()
            if first == word:
                return _compile_for_others(channel, key, what, lambda: generate(text))
            _take_over(channel, key, what, int(first))
        return generate(text)


def _is_text(graph: fx.Graph) -> bool:
    """Return whether lines of nodes say all of a graph: it holds no tensor, and no op
    that runs code of the user."""
    bodies = _bodies(graph)
    return all(_is_line(node, bodies) for node in graph.nodes) and all(
        _is_text(body) for body in bodies.values()
    )


def _is_line(node: fx.Node, bodies: Collection[str]) -> bool:
    if node.op == "call_function":
        runs = (_torch.inductor.OpOverload, BuiltinFunctionType)
        is_op = isinstance(node.target, runs) or node.target is INVOKE
        return is_op and not _torch.node_texts.is_lowered_by_user(node.target)
    if node.op == "get_attr":
        return node.target in bodies
    return node.op in ("placeholder", "output")


def _bodies(graph: fx.Graph) -> dict[str, fx.Graph]:
    """Return the bodies that a graph calls, by the names it has for them."""
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    attributes = {
        name: getattr(graph.owning_module, name, None) for name in sorted(names)
    }
    return {k: x.graph for k, x in attributes.items() if isinstance(x, fx.GraphModule)}


def _lines(graph: fx.Graph) -> Iterator[str]:
    yield from lines_of(graph)
    for name, body in _bodies(graph).items():
        yield name
        yield from _lines(body)


def _digest(graph: fx.Graph) -> str:
    """Return a digest of the lines of a graph and its bodies."""
    text = hashlib.sha256()
    for line in _lines(graph):
        text.update(line.encode() + b"\n")
    return text.hexdigest()[:32]


def _compile_for_others(
    channel: Channel, key: str, what: str, generate: Callable[[], Any]
) -> Any:
    """Compile, and report to other ranks how that ended."""
    try:
        with presence.works(f"compiles {what} for all ranks"):
            compiled = generate()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        channel.store.set(f"{key}/done", json.dumps({"failed": message}))
        raise
    done = json.dumps({"instructions": cpp_kernels.instructions()})
    channel.store.set(f"{key}/done", done)
    return compiled


def _take_over(channel: Channel, key: str, what: str, leader: int) -> None:
    """Wait until the rank that compiles is done, and take over its results."""
    done_key = f"{key}/done"
    patience = channel.patience(timeout())
    with presence.waits(f"waits for rank {leader}, which compiles {what}"):
        if not _poll(lambda: channel.has(done_key), patience, lambda: [leader]):
            raise RankMismatchError(
                f"rank {leader} did not finish compiling {what}, for which this "
                f"rank waited {patience.waited()}{patience.tell([leader])}",
                fix="see what that rank printed; it may have ended, or hang",
            )
    message = json.loads(channel.read(done_key))
    if "failed" in message:
        raise RankMismatchError(
            f"rank {leader} failed to compile {what}:\n{message['failed']}",
            fix="see the error of that rank: this one only stopped because of it",
        )
    cpp_kernels.take_instructions(message["instructions"])


def _poll(
    done: Callable[[], bool], patience: Patience, missing: Callable[[], Sequence[int]]
) -> bool:
    """Return whether ``done`` holds before patience is over; asks ever more seldom."""
    pause, begin = 0.0005, time.monotonic()
    while not done():
        if patience.is_over(missing):
            return done()
        time.sleep(pause)
        slowest = max(SLOWEST_POLL, OF_WAIT * (time.monotonic() - begin))
        pause = min(pause * 1.5, slowest, LONGEST_PAUSE)
    return True
