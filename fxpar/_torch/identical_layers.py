"""Decides whether a layer is of the same kind as one that Dynamo traced as a region.

In: the layer that was traced, with the guards that Dynamo set on it, and another one.
Out: whether the region is right for that, and the guards on it: those of the traced
layer, at the place of the other. Guards say what was read; what they do not say is
compared: the modules of a layer, hooks, which of its tensors are one, the modes of
torch. Never: changes a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from collections.abc import Set as Sources
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpar._torch.traced_values import modes

# Attributes of a module by which a call of it is more than its class's forward.
_OWN_CALLS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "forward",
)

# Dynamo's names of guards: on a tensor, and on two sources that give one object.
_TENSOR, _SAME = "TENSOR_MATCH", "DUPLICATE_INPUT"


@dataclass(frozen=True)
class LayerGuard:
    """Holds a guard on a layer that was traced."""

    # Dynamo's guard.
    guard: Any
    # Dynamo's check of a value; None if the guard says nothing of a value.
    check: Any
    # The value that the check compares with, read from the traced layer.
    expected: Any


def has_own_calls(layer: nn.Module) -> bool:
    """Return whether hooks, or functions of an object, are called in a layer."""
    from torch.nn.modules import module

    everywhere = (getattr(module, f"_global{name}", None) for name in _OWN_CALLS)
    return any(everywhere) or any(
        vars(each).get(name) for each in layer.modules() for name in _OWN_CALLS
    )


def kind_of(layer: nn.Module) -> Any:
    """Return what has to be the same for a region to be used again, and no guard says:
    the modules of a layer, which of its tensors are one, and the modes of torch."""
    order: dict[int, int] = {}
    tensors = (layer.named_parameters, layer.named_buffers)
    return (
        [(name, type(m)) for name, m in layer.named_modules(remove_duplicate=False)],
        [
            (name, type(x), order.setdefault(id(x), len(order)))
            for named in tensors
            for name, x in named(remove_duplicate=False)
        ],
        modes(),
        repr(torch.fx.traceback.get_current_meta().get("custom")),
    )


def is_in_transform(tx: Any) -> bool:
    """Return whether code is traced under a transform of ``torch.func``, forward
    derivatives or a mode that changes calls: there a region would not give what its ops
    give."""
    from torch._C._functorch import peek_interpreter_stack
    from torch.autograd import forward_ad

    return (
        peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or tx.symbolic_torch_function_state.in_torch_function_mode()
    )


def has_changed_state(tx: Any, layer: nn.Module) -> bool:
    """Return whether a trace has set an attribute in a layer, or changed a list, dict
    or set that was there before: guards no longer say what the layer reads."""
    from torch._dynamo.variables.base import (
        AttributeMutationExisting,
        ValueMutationExisting,
    )
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    effects, own = tx.output.side_effects, set(map(id, layer.modules()))
    if any(id(getattr(x, "value", None)) in own for x in effects.store_attr_mutations):
        return True
    for x in effects.id_to_variable.values():
        kind, is_object = x.mutation_type, isinstance(x, UserDefinedObjectVariable)
        if isinstance(kind, ValueMutationExisting) and kind.is_modified:
            return True
        if is_object and isinstance(kind, AttributeMutationExisting):
            # A dict, for example; its content is a value itself from torch 2.15 on.
            is_changed = getattr(x, "is_base_vt_modified", None)
            if is_changed is not None and is_changed(effects):
                return True
    return False


def has_more_reads(tx: Any, condition: Any, operands: Sources[Any], layer: Any) -> bool:
    """Return whether a layer reads one of its operands in another way too, as by the
    name of a module: Dynamo then no longer knows which of the two is meant.
    ``operands``: sources."""
    if not operands.isdisjoint(condition.traced_sources):
        return True
    own = {id(x) for x in (*layer.value.parameters(), *layer.value.buffers())}
    if any(id(tx.output.resolve_source_value(each)) in own for each in operands):
        return True
    same = (g for g in tx.output.guards if g.create_fn_name() == _SAME)
    return any(
        guard.originating_source in operands
        or guard.create_fn.keywords.get("source_b") in operands
        for guard in same
    )


def is_reading_tensors(tx: Any, entry: Any, source: Any) -> bool:
    """Return whether a region reads nothing of its layer but tensors of fixed sizes,
    and makes no sizes of data: numbers that Dynamo leaves open belong to one layer, and
    no guard says to which."""
    from torch._dynamo.source import is_from_source
    from torch._dynamo.variables.invoke_subgraph import LiftedCapturedSource
    from torch.fx.experimental.symbolic_shapes import (
        free_symbols,
        free_unbacked_symbols,
    )

    inputs = entry.subgraph_input_mapping
    captured = (x.source for x in inputs if isinstance(x, LiftedCapturedSource))
    read = map(tx.output.resolve_source_value, captured)
    if not all(isinstance(x, torch.Tensor) for x in read):
        return False
    shapes = tx.output.shape_env
    own = {
        symbol
        for symbol, sources in shapes.var_to_sources.items()
        if any(is_from_source(each, source) for each in sources)
    }
    values = (node.meta.get("example_value") for node in entry.body_gmod.graph.nodes)
    sized = [x for x in values if isinstance(x, (torch.Tensor, torch.SymInt))]
    used = set(shapes.replacements).union(
        *(guard.expr.free_symbols for guard in shapes.guards),
        *map(free_symbols, sized),
    )
    return own.isdisjoint(used) and not any(map(free_unbacked_symbols, sized))


def guards_on(tx: Any, source: Any) -> tuple[LayerGuard, ...] | None:
    """Return the guards on the value of a source, and on what is in it; None if Dynamo
    cannot say for one of them whether it holds for another value."""
    from torch._dynamo import guards
    from torch._dynamo.source import is_from_source

    each = []
    for guard in tx.output.guards:
        if not is_from_source(guard.originating_source, source):
            continue
        check: Any = guards.GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        expected = None
        if check is guards.SKIP_GUARD:
            check = None
        elif not isinstance(check, guards.GuardCheckSpec):
            return None
        else:
            value = tx.output.resolve_source_value(guard.originating_source)
            expected = check.get_metadata_fn(guard, value)
        each.append(LayerGuard(guard, check, expected))
    return tuple(each)


def moved_guards(
    tx: Any, guards: Sequence[LayerGuard], instead: Mapping[Any, Any]
) -> list[Any] | None:
    """Return the guards on the traced layer as guards on the one that is called; None
    if one does not hold for it. ``instead``: Dynamo's sources of the operands of the
    traced call -> the sources of this call's. Tensors become inputs of the graph, which
    Dynamo guards itself."""
    from torch._dynamo.variables.builder import VariableBuilder

    values = _values(tx)
    here, tensors = [], []

    def moved(source: Any) -> Any:
        return instead.get(source, source)

    for each in guards:
        source = each.guard.originating_source.clone(moved)
        name = each.guard.create_fn_name()
        create = each.guard.create_fn
        try:
            value = source.get_value(*values)
            if name == _SAME:
                other = create.keywords["source_b"].clone(moved)
                create = functools.partial(create.func, source_b=other)
                holds = value is other.get_value(*values)
            else:
                holds = each.check is None or each.check.eval_fn(value, each.expected)
        except (LookupError, AttributeError, TypeError):
            return None
        if not holds:
            return None
        if name == _TENSOR:
            tensors.append((source, value))
        else:
            here.append(source.make_guard(create))
    for source, value in tensors:
        VariableBuilder(tx, source)(value)
    return here


def _values(tx: Any) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """Return what sources are read from, and what was read."""
    root = tx.output.root_tx
    return {"G": root.f_globals, "L": root.f_locals}, {}, {}
