"""Finds the arguments of attention ops of torch and of fxpar.

In: the target of a call. Out: an ``AttentionForm``, read off the op's schema;
flex_attention has none, so that its form is written here. Never looks at a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.sharding.cost.op import is_contraction


@dataclass(frozen=True)
class AttentionForm:
    """Says which arguments an attention has at which positions.

    Its first results are the output and a log-sum-exp of each query, or the gradients
    of queries, keys and values.
    """

    # Position of the keys; the queries are before them, the values after.
    keys: int
    # Position of the first query's index, for a causal mask by index.
    ahead: int | None
    # Whether it gives gradients.
    backward: bool
    # Names of all arguments, in order; those by keyword too.
    names: tuple[str, ...]
    # Sets of queries: each has an output and a log-sum-exp, or gradients, of its own.
    sets: int = 1

    def argument(self, node: fx.Node, *names: str) -> Any:
        """Return the argument of a call that has one of these names; None if not
        given."""
        for name in names:
            if name in node.kwargs:
                return node.kwargs[name]
            place = self.names.index(name) if name in self.names else len(node.args)
            if place < len(node.args):
                return node.args[place]
        return None


_FLEX = "query key value {} block_mask scale kernel_options score_others mask_others"
_FLEX_BACKWARD = "out logsumexp grad_out grad_logsumexp fw_graph joint_graph"


def _flex(functions: str, *, backward: bool) -> AttentionForm:
    names = tuple(_FLEX.format(functions).split())
    return AttentionForm(keys=1, ahead=None, backward=backward, names=names)


FLEX: dict[str, AttentionForm] = {
    "higher_order::flex_attention": _flex("score_mod", backward=False),
    "higher_order::flex_attention_backward": _flex(_FLEX_BACKWARD, backward=True),
}


def form_of(target: Any) -> AttentionForm | None:
    """Return the form of an attention on [batch, heads, sequence, features]; None for
    any other op."""
    flex = FLEX.get(_torch.aot.higher_order_name(target))
    if flex is not None:
        return flex
    name, schema = str(target), _torch.objects.schema_of(target)
    if schema is None or not is_contraction(target) or "attention" not in name:
        return None
    names = tuple(argument.name for argument in schema.arguments)
    balanced = "near_ahead" in names and "gap" not in names
    if "_scaled_dot" not in name and "ahead" not in names and not balanced:
        return None
    return AttentionForm(
        keys=names.index("k" if "k" in names else "key"),
        ahead=names.index("ahead") if "ahead" in names else None,
        backward="backward" in name,
        names=names,
        sets=2 if balanced else 1,
    )
