"""States facts about ops that make a plan fast, not only right.

Most follow from torch (views, tags, schemas) and from the family of the op's rule
(pointwise); rows of ops (``sharding.ops``) state the others.
In: the target of a call. Out: its ``OpFacts``.
Never: depends on a call's shapes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.objects import argument
from fxpar.sharding.op_table import look_up


@dataclass(frozen=True)
class OpFacts:
    """Holds facts that are true of every call of an op."""

    # The result is a view of the operand's memory.
    view: bool = False
    # It takes the shape of its result and keeps the elements in order: a view where
    # strides allow.
    reshapes: bool = False
    # The result has all elements of the operand, in the same order.
    keeps_order: bool = False
    # The result has all elements of the operand, with permuted dims.
    permutes: bool = False
    # The results are parts of the operand along a dim.
    splits: bool = False
    # The result has elements of the operands unchanged, at other places, and constants.
    moves: bool = False
    # It reads its operand's memory by strides that the call gives.
    by_strides: bool = False
    # It moves down with the wait whose result it rearranges, as lowering puts it after
    # a collective. (Moving every op that moves elements makes some schedules slower.)
    sinks: bool = False
    # The result is the operand under another name.
    renames: bool = False
    # The result is the operand in another dtype.
    casts: bool = False
    # The result may be a copy of the whole operand.
    copies: bool = False
    # It multiplies or divides one operand by another.
    scales: bool = False
    # Each element of the result is made of one element of each operand.
    pointwise: bool = False
    # Along a free factor of its rule it computes each row independently of the others.
    by_row: bool = False
    # It depends on the order of rows along a dim that it needs whole: an axis that
    # splits that dim splits another one instead.
    orders: bool = False
    # Which of its results counts places along a dim.
    places: int | None = None
    # It reads only as many elements of an operand as it gives.
    gathers: bool = False
    # Its threads write at indices, in any order.
    scatters: bool = False
    # Made of no operand's elements: "filled" with one value (or any), or "counted".
    constant: str = ""
    # Position of the argument that names the dim along which it needs whole rows,
    # though nothing gets smaller.
    rows: int | None = None
    # Position of the argument that names the dim, or dims, along which it works: each
    # row of the other dims is made of the rows at its place in all tensors that it
    # reads.
    along: int | None = None
    # The result is one number of all elements, in any order.
    of_all: bool = False
    # Inductor has a separate kernel for it, with which nothing is fused.
    alone: bool = False
    # Inductor chooses the strides of its result, together with the ops around it.
    chosen_strides: bool = False
    # It makes random numbers.
    random: bool = False
    # It takes random numbers from a generator, in order.
    draws: bool = False
    # It writes to an operand.
    mutates: bool = False
    # Compiled, it overwrites its first operand where nothing reads that later.
    over_first: bool = False
    # Its local form replaces it even where nothing is split.
    replaced: bool = False
    # Queries and keys of an attention are [..., sequence, heads, features], and not
    # [..., heads, sequence, features].
    seq_first: bool = False
    # It communicates between ranks.
    communicates: bool = False
    # Its work for each element, a class of ``hardware_table.LIGHT``.
    work: str = "step"
    # For a pool and its backward, the position of the window argument; ``work`` is
    # done for each element of each window.
    window: int | None = None
    # For a product of matrices, the position of its first factor.
    product: int | None = None
    # The factors of the product, as in a rule; "" if it does more than multiply and
    # add.
    equation: str = ""


# Ops of these namespaces communicate, and ops that take one of these arguments.
_NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"}
_GROUPS = {"group", "group_name", "process_group"}


@cache
def op_facts_of(target: Any) -> OpFacts:
    """Return the facts of a call's target; no facts for a target that is no torch op
    and has no row."""
    from fxpar.sharding.ops import FACTS, pointwise

    stated = dict(look_up(FACTS, target) or {})
    if not isinstance(target, _torch.inductor.OpOverload):
        return OpFacts(**stated)
    tags, schema = target.tags, _torch.objects.schema_of(target)
    draws = torch.Tag.nondeterministic_seeded in tags
    view = bool(getattr(target, "is_view", False))
    single = not view and (torch.Tag.pointwise in tags or target in pointwise.ROWS)
    derived: dict[str, Any] = {
        "view": view,
        "moves": view,
        "pointwise": single,
        "by_row": single and not draws,
        "random": draws,
        "draws": draws,
        "mutates": schema.is_mutable,
        "communicates": target.namespace in _NAMESPACES
        or any(argument.name in _GROUPS for argument in schema.arguments),
    }
    if stated.get("reshapes"):
        derived["moves"] = True
    return OpFacts(**derived | stated)


def is_drawn_from_generator(node: fx.Node) -> bool:
    """Return whether a call takes numbers from a generator, so that earlier draws
    matter. Numbers by index (``fxpar::random``) do not."""
    return op_facts_of(node.target).draws and argument(node, "dropout_p") != 0.0


def has_random_numbers(node: fx.Node) -> bool:
    """Return whether a call makes random numbers, from a generator or by index."""
    return op_facts_of(node.target).random and argument(node, "dropout_p") != 0.0


def is_draw(node: fx.Node) -> bool:
    """Return whether a node draws numbers, the same ones on every rank."""
    return is_random(node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_random(node: fx.Node) -> bool:
    """Return whether a generator decides a node's value: draws, and attention with
    dropout."""
    facts = op_facts_of(node.target)
    return facts.draws or (facts.random and not node.all_input_nodes)


def name_of(target: Any) -> str:
    """Return the name of an op without its overload."""
    return str(target).rpartition(".")[0]


def names_of_ops(graph: fx.Graph) -> frozenset[str]:
    """Return the names of what a graph calls, of ops without overloads, and the kinds
    of its other nodes."""
    targets = {n.target if n.op == "call_function" else n.op for n in graph.nodes}
    return frozenset(
        x if isinstance(x, str) else name_of(x) or getattr(x, "__name__", "")
        for x in targets
    )


def has_any(names: Collection[str], ops: str) -> bool:
    """Return whether some name is one of ``ops``: words, with ``*`` for any letters."""
    return any(fnmatch.filter(names, word) for word in ops.split())


# Argument names of a mask or bias of attention, in addition to a causal mask.
BIASES = ("attn_mask", "attn_bias", "bias")

# A collective of a manual region.
COLLECTIVE = "fxpar.collective.default"


def group_axes_of(node: fx.Node) -> tuple[str, ...]:
    """Return the axes along which a collective of a manual region communicates."""
    return tuple(str(node.args[-1]).split("+"))
