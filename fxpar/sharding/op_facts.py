"""Facts about ops: what makes an op fast, not only right.

In: the target of a call. Out: its ``OpFacts``. Most follow from torch (views, tags,
schemas) and from the family of the op's rule (pointwise); rows of ops
(``sharding.ops``) state what neither says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.op_table import look_up


@dataclass(frozen=True)
class OpFacts:
    """What holds of every call of an op."""

    # It gives its operand's memory, seen in another way.
    view: bool = False
    # It takes the shape of its result and keeps the elements in order: a view where
    # strides allow.
    reshapes: bool = False
    # It gives the elements of its operand, all of them in the same order.
    keeps_order: bool = False
    # It gives the elements of its operand, all of them, the dims in another order.
    permutes: bool = False
    # It gives parts of its operand along a dim.
    splits: bool = False
    # It gives elements of its operands as they are, at other places, and constants.
    moves: bool = False
    # It goes through its operand's memory by strides that the call gives.
    by_strides: bool = False
    # It moves down with the wait whose result it rearranges: what lowering puts behind
    # a collective. (Of all that moves elements, some schedules come out slower.)
    sinks: bool = False
    # It gives its operand under another name.
    renames: bool = False
    # It gives its operand in another dtype.
    casts: bool = False
    # What it gives may be a copy of its whole operand.
    copies: bool = False
    # It multiplies or divides one operand by another.
    scales: bool = False
    # Each element of the result is made of one element of each operand.
    pointwise: bool = False
    # Along a free factor of its rule it makes rows one by one, wherever they lie.
    by_row: bool = False
    # It goes by the order of rows along a dim that it needs whole: an axis that splits
    # that dim splits another one instead.
    orders: bool = False
    # Which of its results counts places along a dim.
    places: int | None = None
    # Of all that an operand holds it reads as much as it gives.
    gathers: bool = False
    # Its threads write at indices, in any order.
    scatters: bool = False
    # Made of no operand's elements: "filled" with one value (or any), or "counted".
    constant: str = ""
    # Which argument is the dim along which it needs whole rows, though nothing gets
    # smaller.
    rows: int | None = None
    # Which argument is the dim, or dims, along which it goes: it makes each row of the
    # other dims of the rows at its place in all tensors that it reads.
    along: int | None = None
    # It is one number of all elements, in any order.
    of_all: bool = False
    # Inductor has a kernel of its own for it, which nothing is fused with.
    alone: bool = False
    # Inductor chooses the strides of what it gives, with what is around it.
    chosen_strides: bool = False
    # It makes random numbers.
    random: bool = False
    # It takes random numbers from a generator, in order.
    draws: bool = False
    # It writes to an operand.
    mutates: bool = False
    # Compiled, it writes over its first operand where nothing reads that later.
    over_first: bool = False
    # Ranks meet in it.
    communicates: bool = False
    # What it does with each point, a class of ``hardware.LIGHT``.
    work: str = "step"
    # Of a pool and of its backward, which argument is the window; ``work`` is done with
    # each element of each window.
    window: int | None = None
    # Of a product of matrices, which argument is its first factor.
    product: int | None = None
    # The factors of the product, as in a rule; "" if it does more than multiply and
    # add.
    equation: str = ""


# Ops of these namespaces communicate, and those that take one of these arguments.
_NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"}
_GROUPS = {"group", "group_name", "process_group"}


@cache
def op_facts_of(target: Any) -> OpFacts:
    """The facts of a call's target; of what is no op of torch's, none hold."""
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


def takes_from_generator(node: fx.Node) -> bool:
    """Whether a call takes numbers from a generator, so that what draws before it
    counts. Numbers by index (``fxpar::random``) do not."""
    return op_facts_of(node.target).draws and not _drops_nothing(node)


def makes_random_numbers(node: fx.Node) -> bool:
    """Whether a call makes random numbers, from a generator or by index."""
    return op_facts_of(node.target).random and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a call is attention without dropout, which draws no numbers."""
    schema = _torch.objects.schema_of(node.target)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            positional = node.args[i] if i < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", positional) == 0.0
    return False


@cache
def _stated() -> dict[str, Mapping[str, Any]]:
    from fxpar.sharding.ops import FACTS

    return {
        op.replace("::", ".") + ".default" if isinstance(op, str) else str(op): facts
        for op, facts in FACTS.items()
    }


def stated_facts(name: str) -> Mapping[str, Any]:
    """What the row of an overload states, ``"aten.view.dtype"``."""
    return _stated().get(name, {})


def name_of(target: Any) -> str:
    """An op without its overload."""
    return str(target).rpartition(".")[0]


# A collective of a manual region.
COLLECTIVE = "fxpar.collective.default"


def group_axes_of(node: fx.Node) -> tuple[str, ...]:
    """The axes along which a collective of a region goes."""
    return tuple(str(node.args[-1]).split("+"))
