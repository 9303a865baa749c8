"""Let places along manual axes compare their collectives before they launch them.

Where each place along manual axes runs a program of its own, collectives between places
(gathers of parameters, means of their gradients) pair by their order alone. In: the
graph of a forward or a backward. Out: the same graph which, if it has such collectives,
sends a digest of them at each run before the first one, by a message without a
collective (``meeting.meet``): places that branched to other parameters, or that run
another number of calls or backwards, raise RankMismatchError. Never: a hang.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import fx

from fxpar.errors import RankMismatchError
from fxpar.graph.custom_ops import group_of_call
from fxpar.passes.simulate.launches import EXACT, crossings
from fxpar.runtime.ranks import meeting, worlds
from fxpar.runtime.ranks.groups import axes_of_group
from fxpar.runtime.steps.pipeline_state import PhaseState
from fxpar.sharding.factors import Axes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import user_line

# Compilers take ``first`` for written to, so that they leave the op before its readers.
torch.library.define(
    "fxpar::compare_places",
    "(Tensor(a!) first, str launches, str what, str mesh, str manual) -> ()",
)


@torch.library.register_fake("fxpar::compare_places")
def _(first, launches, what, mesh, manual):
    return None


@torch.library.impl("fxpar::compare_places", "CompositeExplicitAutograd")
def _(first, launches, what, mesh, manual):
    with worlds.inside(None):
        words = meeting.meet("collectives between places", launches, what)
    if len(set(words)) == 1:
        return
    mesh = Mesh.parse(mesh)
    for rank, word in enumerate(words):
        peer = mesh.group(rank, manual.split("+"))[0]
        if words[peer] != word:
            error = RankMismatchError(
                f"in {what} rank {rank} gathers or reduces other parameters than rank "
                f"{peer}: they took other branches, or broke their graphs elsewhere",
                fix="use the same parameters in the same order on every rank, or leave "
                "them whole (no fxpar.shard)",
            )
            raise meeting.as_reported(error)


def compare_places(graph: fx.Graph, state: PhaseState) -> None:
    """Add an op that compares collectives between places at each run, if any."""
    manual = state.request.manual
    if manual is None:
        return
    launched = [node for node in graph.nodes if _is_between_places(node, manual.axes)]
    # Ranks at other stages run other programs, and meet those of their own stage.
    if not launched and state.request.pipeline is None:
        return
    lines = [*state.at_rest, *crossings(graph, even=state.even, among=launched)]
    where = next(filter(None, map(user_line, graph.nodes)), "")
    what = f"the {state.which} of the graph at {where}" if where else state.which
    digest = meeting.digest_of("\n".join(lines))[:16]
    tensors = (x for n in launched for x in n.all_input_nodes)
    inputs = graph.find_nodes(op="placeholder")
    fed = (n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor))
    operand = next(chain(tensors, fed))
    calls = (n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(launched[0] if launched else next(calls)):
        call = graph.call_function(
            torch.ops.fxpar.compare_places.default,
            (operand, digest, what, str(manual.mesh), "+".join(manual.axes)),
        )
    call.meta["val"] = None


def _is_between_places(node: fx.Node, axes: Axes) -> bool:
    """Return whether a node is a collective whose group has ranks of several places."""
    name = str(node.target)
    is_ours = name.startswith("fxpar.all_gather") or node.target in EXACT
    if "c10d" not in name and not is_ours:
        return False
    if "wait" in name:
        return False
    return not set(axes).isdisjoint(axes_of_group(group_of_call(node)) or axes)
