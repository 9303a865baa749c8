"""Gives steps over axes of the mesh their rules and local forms for a batch in parts.

In: a graph that is planned over parts of its batch with its steps in it. Out: rows of
the op table and local forms, one step for each part. ``gather_rows``, ``scatter_rows``,
``exchange_rows`` and ``return_rows`` are steps around rows that are stored part after
part (``rows_of_parts``): from the rows of one part they make the rows of that part. In
a graph in parts they are plain steps again. Never: runs an op itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar.graph import collective_nodes as steps
from fxpar.sharding.factors import Axes, Rule
from fxpar.sharding.op_table import Row, Word, make, words_of
from fxpar.sharding.ops import LOCAL, add_rows
from fxpar.sharding.ops.local_call import LocalCall
from fxpar.sharding.row_moves import Exchange

# The metadata that a step keeps of the reshard that it belongs to.
NOTED = "fxpar_noted"


def _of_parts() -> NoReturn:
    raise RuntimeError("steps over rows of parts run as steps of each part")


def gather_rows(x: Any, dim: int, axes: Axes, count: int) -> Any:
    """Gather all ranks' rows along ``dim``; ``count``: how many ranks there are."""
    _of_parts()


def scatter_rows(x: Any, dim: int, op: str, axes: Axes, count: int) -> Any:
    """Return this rank's rows along ``dim`` of the reduction of all ranks' values."""
    _of_parts()


def exchange_rows(
    x: Any, source_dim: int, target_dim: int, axes: Axes, count: int
) -> Any:
    """Gather all ranks' rows along ``source_dim``, with ``target_dim`` split."""
    _of_parts()


def return_rows(
    x: Any, source_dim: int, target_dim: int, axes: Axes, count: int
) -> Any:
    """Return this rank's rows along ``target_dim``, with ``source_dim`` gathered."""
    _of_parts()


# The step that each of them is on one part.
STEP_OF: dict[Callable[..., Any], Callable[..., Any]] = {
    gather_rows: steps.all_gather,
    scatter_rows: steps.reduce_scatter,
    exchange_rows: steps.all_to_all,
    return_rows: steps.all_to_all,
}


def _same_dims_rule(x: torch.Tensor, *_: Any) -> Rule:
    """Return a rule in which all dims of the result are those of the operand."""
    words = words_of(x)
    return make([words], [words])


def _resized_words(x: torch.Tensor, *settings: Any) -> tuple[list[Word], list[Word]]:
    """Return words of the operand and of the result. The dims that a step names have
    other sizes in the result: they stay whole."""
    before, after = list[Word](words_of(x)), list[Word](words_of(x))
    for d in settings:
        if isinstance(d, int):
            before[d], after[d] = f"before{d}!", f"after{d}!"
    return before, after


def _resized_dims_rule(x: torch.Tensor, *settings: Any) -> Rule:
    before, after = _resized_words(x, *settings)
    return make([before], [after])


def _moved_rows_rule(x: torch.Tensor, text: str, *_: Any) -> Rule:
    """Return a rule in which the dim whose rows move stays whole."""
    return _resized_dims_rule(x, Exchange.parse(text).moves.dim)


def _more_rows_rule(x: torch.Tensor, dim: int, *rest: Any) -> Rule:
    """Return a rule in which the result has the rows of all ranks along ``dim``, with
    the rows of one part together."""
    before, after = _resized_words(x, dim, *rest[:-2])
    before[dim], after[dim] = "rows", ("rows", "ranks!")
    return make([before], [after], {"rows": x.shape[dim], "ranks": rest[-1]})


def _fewer_rows_rule(x: torch.Tensor, *rest: Any) -> Rule:
    """Return a rule in which the operand has the rows of all ranks along the last dim
    given, with the rows of one part together."""
    dims = [arg for arg in rest[:-2] if isinstance(arg, int)]
    before, after = _resized_words(x, *dims)
    before[dims[-1]], after[dims[-1]] = ("rows", "ranks!"), "rows"
    ranks = rest[-1]
    return make([before], [after], {"rows": x.shape[dims[-1]] // ranks, "ranks": ranks})


add_rows(
    dict.fromkeys(
        (steps.all_reduce, steps.mask, steps.permute, steps.recv), Row(_same_dims_rule)
    )
    | dict.fromkeys(
        (steps.slice_, steps.all_gather, steps.reduce_scatter, steps.all_to_all),
        Row(_resized_dims_rule),
    )
    | {steps.move_rows: Row(_moved_rows_rule)}
    | dict.fromkeys((gather_rows, exchange_rows), Row(_more_rows_rule))
    | dict.fromkeys((scatter_rows, return_rows), Row(_fewer_rows_rule))
)


def _step(call: LocalCall, x: fx.Node, *args: Any) -> fx.Node:
    """Return a step over axes of the mesh on a part."""
    target = call.node.target
    if target in STEP_OF:
        target, args = STEP_OF[target], args[:-1]
    node = call.build.graph.call_function(target, (x, *args))
    value = call.node.meta["val"]
    with call.build.fake_mode:
        node.meta["val"] = value.new_empty(call.local_shape())
    call.build.stamp(node)
    node.meta[NOTED] = call.node.meta[NOTED]
    return node


LOCAL.update(dict.fromkeys((*steps.NODES.values(), *STEP_OF), _step))
