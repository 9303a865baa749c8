"""Show a user's optimizer to a traced training step as tensors and numbers in slots.

In: a ``torch.optim.Optimizer``. Out: the tensors and numbers its step reads, by name,
and a stand-in of the same class that holds traced values in their place, whose own
``step`` is then traced; its plain values as text, which belong to what was traced; and
an error for what could change with no sign: tensors and optimizers among its
attributes, tensors in a dict of its state, state that is of no parameter. Never: a
change to the user's optimizer, except that ``prepare`` makes the state of its first
step and ``write`` puts values.

A number may be traced as a 0-dim float64 tensor, so that another value needs no other
graph. ``Numbers`` lets torch functions take such tensors where they take numbers, and
answers comparisons with the current value; the answers then belong to what was traced.
The result of ``item()`` stays a tensor, and ``choosing`` lets ``min`` and ``max`` take
it.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import inspect
import itertools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpar import _torch
from fxpar._torch.objects import parameters_of
from fxpar.errors import PlanError

# The precision that Python computes in.
NUMBER = torch.float64

# Settings of how an optimizer computes, not of its numbers: it is traced one tensor
# after the other.
_MANNERS = ("foreach", "fused")

# These branch on how many steps were done, unless they are capturable.
_BRANCHING = (torch.optim.RAdam, torch.optim.ASGD)


@dataclass(frozen=True)
class Slot:
    """Says where an optimizer keeps a value."""

    place: str  # "group" or "state"
    index: int  # position of the group, or of the parameter in the order of the groups
    key: str  # key of the value there, as "lr" or "exp_avg"
    item: int | None = None  # position in a tuple, as of ``betas``


def is_number(x: Any) -> bool:
    """Return whether ``x`` is a number, and no flag."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Slot, Any]]:
    """Yield every value of the groups and of the state, tuples by their items."""
    every = [("group", i, group) for i, group in enumerate(optimizer.param_groups)]
    for i, p in enumerate(parameters_of(optimizer)):
        every += [("state", i, optimizer.state[p])] if p in optimizer.state else []
    for place, index, entries in every:
        for key, value in entries.items():
            if place == "group" and (key == "params" or key in _MANNERS):
                continue
            if isinstance(value, (tuple, list)):
                for item, x in enumerate(value):
                    yield Slot(place, index, key, item), x
            else:
                yield Slot(place, index, key), value


def write(optimizer: torch.optim.Optimizer, slot: Slot, value: Any) -> None:
    """Put a value into its slot."""
    if slot.place == "group":
        entries: Any = optimizer.param_groups[slot.index]
    else:
        entries = optimizer.state[parameters_of(optimizer)[slot.index]]
    if slot.item is not None:
        values = list(entries[slot.key])
        values[slot.item] = value
        value = type(entries[slot.key])(values)
    entries[slot.key] = value


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer whose step cannot be traced together with the
    rest. Checked before each step, since hooks may come later."""
    kind = type(optimizer).__name__
    step_parameters = inspect.signature(type(optimizer).step).parameters
    closure = step_parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{kind} calls a closure several times in a step, so that there is no one "
            "graph of a step",
            fix="torch.compile the model, and call optimizer.step(closure) yourself",
        )
    if not all(map(_is_own, _torch.objects.step_pre_hooks(optimizer))):
        raise PlanError(
            f"{kind} has a hook that runs before its step, where fxpar.train_step has "
            "no gradients to show",
            fix="remove the hook (it may be one of all optimizers), or use "
            "train_step(..., clip=...) if it clips",
        )


def _is_own(hook: Any) -> bool:
    """Return whether a hook is one of fxpar's, whose checks a step makes otherwise."""
    function = inspect.unwrap(hook)
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith("fxpar.")


def prepare(optimizer: torch.optim.Optimizer, trained: Iterable[Any]) -> None:
    """Make the state that the first step would make, where torch's own optimizers say
    how, for the parameters ``trained``. Others make theirs while they are traced, and
    are traced once more when it is there. SGD gets a momentum of zero, with which a
    step gives what the first one gives; with dampening it would not, and none is
    made."""
    ids = {id(p) for p in trained}
    init: Any = getattr(type(optimizer), "_init_group", None)
    of_torch = init is not None and str(init.__module__).startswith("torch.optim.")
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if id(p) in ids):
            if isinstance(optimizer, torch.optim.SGD):
                momentum = is_number(group["momentum"]) and group["momentum"]
                if momentum and not group["dampening"]:
                    state = optimizer.state[p]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(p)
            elif of_torch and not optimizer.state.get(p):
                lists = len(inspect.signature(init).parameters) - 2  # self, the group
                before, p.grad = p.grad, torch.zeros_like(p)
                try:
                    own = {**group, "params": [p]}
                    init(optimizer, own, *([] for _ in range(lists)))
                finally:
                    p.grad = before


def stand_in(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor | None],
    values: Mapping[Slot, torch.Tensor],
) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
    """Return an optimizer of the same class on traced values, and by its position each
    parameter that it holds. Hooks, and ``step`` as schedulers wrap it, are left out.
    ``parameters``: in the order of ``parameters_of(optimizer)``, those with a gradient,
    None for the others."""
    double: Any = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    # Containers may be written to.
    vars(double).update({key: _copied(x) for key, x in _own(optimizer).items()})
    vars(double).pop("step", None)
    hooks: OrderedDict[int, Any] = OrderedDict()
    _torch.objects.share_step_hooks(double, hooks)
    double.state, double.param_groups = defaultdict(dict), []
    stand_ins = dict[int, torch.Tensor]()
    remaining = iter(enumerate(zip(parameters, parameters_of(optimizer), strict=True)))
    for group in optimizer.param_groups:
        own = dict(itertools.islice(remaining, len(group["params"])))
        mine = {i: fake for i, (fake, _) in own.items() if fake is not None}
        stand_ins |= mine
        for i, fake in mine.items():
            if optimizer.state.get(own[i][1]):
                double.state[fake] = _copied(optimizer.state[own[i][1]])
        copied = _copied(group) | {"params": list(mine.values())}
        copied |= {key: False for key in _MANNERS if key in group}
        if isinstance(optimizer, _BRANCHING):
            copied["capturable"] = True
        double.param_groups.append(copied)
    places = {position: i for i, position in enumerate(stand_ins)}
    for slot, value in values.items():
        if slot.place == "state":
            slot = replace(slot, index=places[slot.index])
        write(double, slot, value)
    return double, stand_ins


def refuse_changes(
    optimizer: torch.optim.Optimizer,
    double: torch.optim.Optimizer,
    stand_ins: Mapping[int, torch.Tensor],
    before: Mapping[Slot, str],
) -> None:
    """Raise PlanError for what a step did to state and groups that no graph gives:
    another number of values, values of no parameter, plain values inside of others.
    ``before``: the texts, before the step, of values that are no tensors, numbers or
    flags."""
    traced_ids = {id(x) for x in stand_ins.values()}
    for p in double.state:
        if id(p) not in traced_ids:
            name = repr(p) if isinstance(p, str) else "of another tensor"
            raise unseen(optimizer, f"keeps state that belongs to no parameter, {name}")
    plain, after = dict(slots(optimizer)), slots_of(double, stand_ins)
    for slot in plain:
        traced = slot.place == "group" or slot.index in stand_ins
        if traced and slot not in after:
            raise unseen(optimizer, f"takes {slot.key!r} away")
        if traced and slot in before and before[slot] != text_of(after[slot]):
            raise unseen(optimizer, f"changes what is inside of {slot.key!r}")
    for slot, x in after.items():
        refuse_inside(optimizer, slot.key, x)
        if slot not in plain and slot.item is not None:
            raise unseen(optimizer, f"makes {slot.key!r}, of several values, longer")


def slots_of(
    double: torch.optim.Optimizer, stand_ins: Mapping[int, torch.Tensor]
) -> dict[Slot, Any]:
    """Return the values of a stand-in, by slots of the optimizer that it replaces."""
    position = list(stand_ins)  # of each of its parameters
    return {
        replace(slot, index=position[slot.index]) if slot.place == "state" else slot: x
        for slot, x in slots(double)
    }


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """Return the step of its class, without the profiler's wrapping and hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# By the name of a torch function: the keyword by which it takes a number, and how its
# other operands are combined into the factor of that number.
_SCALED: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "add": ("alpha", lambda other: other),
    "sub": ("alpha", lambda other: other),
    "addcmul": ("value", operator.mul),
    "addcdiv": ("value", operator.truediv),
}

_COMPARISONS = {
    name: getattr(operator, name) for name in ["eq", "ne", "lt", "le", "gt", "ge"]
}


@dataclass(frozen=True)
class TracedComparison:
    """Is a comparison of a number of an optimizer, which a traced step relies on."""

    slot: Slot  # where the number is kept
    relation: str  # as module ``operator`` names it: "lt"
    other: Any  # the other side of the comparison
    holds: bool  # the answer when it was traced

    def has_same_answer(self, value: Any) -> bool:
        """Return whether the comparison has the same answer for another ``value``."""
        return bool(_COMPARISONS[self.relation](value, self.other)) == self.holds


class Numbers(TorchFunctionMode):
    """Is a mode inside which tensors that stand for numbers are taken where numbers
    are.

    ``by_id``: by id of a tensor the slot and the number it stands for. ``answers``:
    comparisons so far. A number changed in place is no longer known. ``item()`` of any
    tensor gives one that stands for its value. ``narrow``: by id of a tensor that is
    read in the precision of numbers, the state that it is read from, which is changed
    in its own precision.
    """

    def __init__(
        self,
        by_id: dict[int, tuple[Slot, Any]],
        narrow: dict[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.by_id, self.answers = by_id, list[TracedComparison]()
        self.narrow = narrow or {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.__name__.strip("_")
        if args and id(args[0]) in self.by_id:
            if name == "bool":
                return self._answer(args[0], "ne", 0)
            if name in _COMPARISONS and not isinstance(args[1], torch.Tensor):
                return self._answer(args[0], name, args[1])
            if _is_in_place(func.__name__):
                del self.by_id[id(args[0])]
        if args and id(args[0]) in self.narrow and _is_in_place(func.__name__):
            return self._in_own_precision(func, types, args, kwargs)
        if name == "item":
            return args[0].reshape(()).to(NUMBER)
        if name in _SCALED:
            keyword, product = _SCALED[name]
            if isinstance(kwargs.get(keyword), torch.Tensor):
                # As wide as what they are added to: torch rounds no product before.
                x, *factors = args
                factors = [
                    other.to(torch.promote_types(other.dtype, x.dtype))
                    if isinstance(other, torch.Tensor)
                    else other
                    for other in factors
                ]
                scaled = product(*factors) * kwargs.pop(keyword)
                verb = "sub" if name == "sub" else "add"
                verb += "_" if _is_in_place(func.__name__) else ""
                return getattr(torch.Tensor, verb)(x, scaled.to(x.dtype), **kwargs)
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        if name == "lerp" and isinstance(weight, torch.Tensor):
            kwargs["weight"] = weight.to(args[0].dtype)
            args = args[:2]
        return func(*args, **kwargs)

    def _in_own_precision(self, func, types, args, kwargs):
        """Change state in place, rounded as the optimizer rounds it."""
        x, narrow = args[0], self.narrow[id(args[0])]
        others = (
            other.to(narrow.dtype) if isinstance(other, torch.Tensor) else other
            for other in args[1:]
        )
        new = self.__torch_function__(func, types, (narrow.clone(), *others), kwargs)
        self.narrow[id(x)] = new
        return x.copy_(new)

    def _answer(self, x: torch.Tensor, relation: str, other: Any) -> bool:
        """Return the answer of a comparison for the current number, and record it."""
        slot, value = self.by_id[id(x)]
        holds = bool(_COMPARISONS[relation](value, other))
        self.answers.append(TracedComparison(slot, relation, other, holds))
        return holds


@contextlib.contextmanager
def choosing(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let ``min`` and ``max``, in the modules that define the optimizer's methods, take
    tensors that stand for numbers."""
    methods = [f for kind in type(optimizer).__mro__ for f in vars(kind).values()]
    scopes = [inspect.unwrap(f).__globals__ for f in methods if inspect.isfunction(f)]
    added: list[tuple[dict[str, Any], str]] = []
    for scope in scopes:
        for name, combine in (("min", torch.minimum), ("max", torch.maximum)):
            if name not in scope:
                scope[name] = functools.partial(
                    _extreme, getattr(builtins, name), combine
                )
                added.append((scope, name))
    try:
        yield
    finally:
        for scope, name in added:
            del scope[name]


def _extreme(plain: Any, combine: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``plain``, Python's own function, of the arguments; if some of several
    numbers are tensors, reduce them by ``combine``."""
    numbers = all(is_number(x) or isinstance(x, torch.Tensor) for x in args)
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if len(args) < 2 or kwargs or not numbers or not tensors:
        return plain(*args, **kwargs)
    device = tensors[0].device
    values = (torch.as_tensor(x, dtype=NUMBER, device=device) for x in args)
    return functools.reduce(combine, values)


def _is_in_place(name: str) -> bool:
    """Return whether a function writes to its argument: ``add_``, ``__iadd__``."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__int__")
    return name.endswith("_")


_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def is_flag(x: Any) -> bool:
    """Return whether a value is a flag, for which a graph is traced, and no number."""
    return isinstance(x, (bool, str, type(None)))


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return plain values that the object itself keeps, as text; a step that changes
    one, such as a counter, cannot be traced once for all steps."""
    return {key: text_of(value) for key, value in _own(optimizer).items()}


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
            name = repr(p) if isinstance(p, _PLAIN) else type(p).__name__
            raise unseen(optimizer, f"keeps state that belongs to no parameter, {name}")
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
    else the name of its class, and the plain values among its attributes."""
    if isinstance(value, Mapping):
        pairs = (f"{text_of(k)}: {text_of(x)}" for k, x in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, _CONTAINERS):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, _PLAIN):
        return repr(value)
    own = {k: x for k, x in getattr(value, "__dict__", {}).items() if type(x) in _PLAIN}
    return type(value).__name__ + (text_of(own) if own else "")


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
