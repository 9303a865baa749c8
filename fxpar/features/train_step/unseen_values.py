"""Find values of an optimizer that change without a traced step seeing it.

In: an optimizer. Out: its plain values as text, which belong to what was traced; and an
error for what could change with no sign: tensors and optimizers among its attributes,
tensors in a dict of its state, state that is of no parameter. Never: a change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fxpar import _torch
from fxpar._torch.objects import parameters_of
from fxpar.errors import PlanError

_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def is_flag(x: Any) -> bool:
    """Return whether a value is a flag, for which a graph is traced, and no number."""
    return isinstance(x, (bool, str, type(None)))


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return plain values that the object itself keeps, as text; a step that changes
    one, such as a counter, cannot be traced once for all steps."""
    return {key: text_of(value) for key, value in _own(optimizer).items()}


def copied_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes, with copies of containers, which may be written to."""
    return vars(optimizer) | {k: _copied(x) for k, x in _own(optimizer).items()}


def refuse_unseen(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for values that a step may read and write unseen."""
    kind = type(optimizer).__name__
    for key, value in _own(optimizer).items():
        for x in _leaves(value):
            if isinstance(x, (torch.Tensor, torch.optim.Optimizer, nn.Module)):
                raise PlanError(
                    f"{kind} keeps an object of {type(x).__name__} in its attribute "
                    f"{key!r}, where fxpar.train_step does not see what its step does "
                    "to it",
                    fix="keep tensors in the state of a parameter, or in a group; "
                    "give fxpar.train_step the optimizer inside, or torch.compile the "
                    "model and call optimizer.step()",
                )
    ids = set(map(id, parameters_of(optimizer)))
    for p, state in optimizer.state.items():
        if id(p) not in ids or not isinstance(state, dict):
            raise unseen(
                optimizer, f"keeps state that belongs to no parameter, {_name(p)}"
            )
        for key, value in state.items():
            refuse_inside(optimizer, key, value)


def refuse_inside(optimizer: torch.optim.Optimizer, key: str, value: Any) -> None:
    """Raise PlanError if a value of the state has tensors further inside than the items
    of a tuple."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    for x in items:
        if isinstance(x, _CONTAINERS) and any(
            isinstance(leaf, torch.Tensor) for leaf in _leaves(x)
        ):
            raise unseen(optimizer, f"keeps tensors inside of {key!r} of its state")


def unseen(optimizer: torch.optim.Optimizer, does: str) -> PlanError:
    """Return the error for an optimizer whose step ``does`` what no graph can."""
    return PlanError(
        f"the step of {type(optimizer).__name__} {does}, which a graph of it cannot",
        fix="keep a tensor, or a number, under each key of the state of a parameter, "
        "or torch.compile the model and call optimizer.step()",
    )


def text_of(value: Any) -> str:
    """Return the text of a plain value, or of plain values in containers; for anything
    else the name of its class."""
    if isinstance(value, Mapping):
        pairs = (f"{text_of(k)}: {text_of(x)}" for k, x in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, _CONTAINERS):
        return f"[{', '.join(map(text_of, value))}]"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of its class, without those of every optimizer of torch."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _torch.objects.OPTIMIZER_ATTRIBUTES
    }


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in a container, at any depth, keys included."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, _CONTAINERS):
        for x in value:
            yield from _leaves(x)
    else:
        yield value


def _copied(value: Any) -> Any:
    """Return a value, with copies of the dicts, lists and sets in it."""
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update({key: _copied(x) for key, x in value.items()})
        return twin
    if isinstance(value, list):
        items = copy.copy(value)
        items[:] = map(_copied, value)
        return items
    return copy.copy(value) if isinstance(value, set) else value


def _name(x: Any) -> str:
    return repr(x) if isinstance(x, _PLAIN) else f"an object of {type(x).__name__}"
