"""Reads and sets private attributes of torch's ops, tensors, graphs, modules,
optimizers.

In: such an object. Out: its attributes. Never: names of Dynamo or Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn


def define_op(
    schema: str, fake: Callable[..., Any], run: Callable[..., Any] | None = None
) -> None:
    """Register an op, such as ``"fxpar::name(Tensor x) -> Tensor"``, with what it gives
    for fake tensors and, if it runs, what it does for real ones."""
    name = schema.partition("(")[0]
    torch.library.define(name, schema.removeprefix(name))
    torch.library.register_fake(name)(fake)
    if run is not None:
        torch.library.impl(name, "CompositeExplicitAutograd")(run)


def schema_of(target: Any) -> Any:
    """Return the schema of an ATen or custom op; None for other targets."""
    return getattr(target, "_schema", None)


@functools.cache
def defaults_of(target: Any) -> dict[str, Any]:
    """Return the arguments of an op by name, in order: their defaults."""
    schema = schema_of(target)
    declared = schema.arguments if schema is not None else ()
    return {x.name: x.default_value for x in declared}


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict:
    """Return all arguments of a call by the names of its op's schema, with defaults."""
    defaults = defaults_of(target)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a call, its default if it is left out; None if its op has
    none of this name."""
    return arguments_of(node.target, node.args, node.kwargs).get(name)


def is_mutable(target: Any) -> bool:
    """Return whether an op writes to an operand, by its schema."""
    schema = schema_of(target)
    return schema is not None and schema.is_mutable


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an op writes to, by its schema."""
    if not is_mutable(node.target):
        return []
    out: list[fx.Node] = []
    for declared in schema_of(node.target).arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            fx.node.map_arg(argument(node, declared.name), out.append)
    return out


def version_of(x: torch.Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return x._version


def versions_of(xs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return ``version_of`` each tensor; 0 for those that count no writes."""
    try:
        return tuple([x._version for x in xs])
    except RuntimeError:
        return tuple(0 if x.is_inference() else x._version for x in xs)


def memory_of(x: torch.Tensor) -> int:
    """Return a number for the memory of a tensor, real or fake, valid while that
    lives."""
    return int(x.untyped_storage()._cdata)


def memory_uses(x: torch.Tensor) -> int:
    """Return how many tensors use the memory of ``x``; a constant may be added."""
    registry: Any = torch._C
    return int(registry._storage_Use_Count(x.untyped_storage()._cdata))


def base_of(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``x`` is a view of; ``x`` itself if it is no view."""
    return x if x._base is None else x._base


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a node's value."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]


def calls_where(graph: fx.Graph, holds: Callable[[Any], bool]) -> list[fx.Node]:
    """Return the calls of functions for whose targets ``holds`` is true, in order; it
    is asked once for each target."""
    table = graph._find_nodes_lookup_table.table
    calls = [
        node
        for (op, target), nodes in table.items()
        if op == "call_function" and nodes and holds(target)
        for node in nodes
    ]
    return sorted(calls)


def rename(node: fx.Node, name: str) -> None:
    """Give a node another name, which no other node of the graph has."""
    node._rename(name)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module by name, as it holds them, without
    submodules'."""
    return module._parameters


def inplace_call(module: nn.Module) -> Any:
    """Return what ``nn.Module.compile`` compiles: the bound method that calls
    forward."""
    return module._call_impl


def hooks_of(x: Any) -> tuple[list[Any], list[Any]]:
    """Return a tensor's hooks on its gradient, and those on its accumulation."""
    each = x._backward_hooks, x._post_accumulate_grad_hooks
    before, after = (list((hooks or {}).values()) for hooks in each)
    return before, after


# The attributes that torch itself keeps on any optimizer, schedulers included.
OPTIMIZER_ATTRIBUTES = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "step",
        "_opt_called",
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_step_count",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    }
)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextlib.contextmanager
def thawed() -> Iterator[None]:
    """Let the garbage collector list frozen objects inside as well."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if is_frozen:
        gc.freeze()


def live(kind: type) -> list[Any]:
    """Return the objects of a class and its subclasses that there are: those that refer
    to one of the classes, since a look at every object takes half a second of a process
    that has imported much, and copies its memory in a fork."""
    kinds = [kind]
    for each in kinds:
        kinds += each.__subclasses__()
    with thawed():
        return [x for x in gc.get_referrers(*kinds) if type(x) in kinds]


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers there are, without those that are being made."""
    return [x for x in live(torch.optim.Optimizer) if hasattr(x, "param_groups")]


def after_step(optimizer: torch.optim.Optimizer) -> None:
    """Do what ``step`` does around its update: schedulers see it, post hooks run."""
    from torch.optim import optimizer as module

    optimizer._opt_called = True  # type: ignore[attr-defined]
    own = optimizer._optimizer_step_post_hooks.values()
    for hook in [*own, *module._global_optimizer_post_hooks.values()]:
        hook(optimizer, (), {})


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks that run before a step of an optimizer: its own, and those of
    all."""
    from torch.optim import optimizer as module

    own = getattr(optimizer, "_optimizer_step_pre_hooks", None) or {}
    return [*own.values(), *module._global_optimizer_pre_hooks.values()]


def share_step_hooks(optimizer: torch.optim.Optimizer, hooks: Any) -> None:
    """Let an optimizer made without its constructor have these step hooks."""
    optimizer._optimizer_step_pre_hooks = hooks
    optimizer._optimizer_step_post_hooks = hooks


# Cycles of a GPU in a second, about.
CYCLES = 2e9


def keep_busy(seconds: float) -> None:
    """Let the current stream wait about so long, while the host launches more."""
    torch.cuda._sleep(int(seconds * CYCLES))
