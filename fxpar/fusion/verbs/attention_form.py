"""Where attention ops of torch and of fxpar have their arguments: read off schemas,
which flex_attention has none of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar import _torch
from fxpar.sharding.cost.op import contracts


@dataclass(frozen=True)
class AttentionForm:
    """Where an attention has its arguments. Its first results are the output and a
    log-sum-exp of each query, or the gradients of queries, keys and values."""

    # Of the keys; the queries stand before them, the values behind.
    keys: int
    # Of a causal mask by places: where queries begin.
    ahead: int | None
    # Whether it gives gradients.
    backward: bool
    # Of all, in order; those by keyword too.
    names: tuple[str, ...]
    # Sets of queries: each has an output and a log-sum-exp, or gradients, of its own.
    sets: int = 1

    def argument(self, node: fx.Node, *names: str) -> Any:
        """What a call gives for the argument that has one of these names."""
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
    """The form of an attention on [batch, heads, sequence, features]; None of any other
    op."""
    flex = FLEX.get(_torch.aot.higher_order_name(target))
    if flex is not None:
        return flex
    name, schema = str(target), _torch.objects.schema_of(target)
    if schema is None or not contracts(target) or "attention" not in name:
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
