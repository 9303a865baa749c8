"""Lets Dynamo trace one of the layers that repeat, and call its region for the others.

In: a frame that Dynamo traces for a backend, with calls of the modules of a list
(``nn.ModuleList``, ``nn.Sequential``). Out: a graph in which layers of the same kind
call one region; ``flat_regions`` turns it into the graph that tracing each layer gives.
Dynamo can use a region again (``torch.compiler.nested_compile_region``) if the operands
of a call are of the same kind; whether the layers are, it leaves to the user. Here
Dynamo's guards on the layer that was traced say what was read of it; what they do not
say is compared: the modules of a layer, hooks, which of its tensors are one, the modes
of torch. A layer that is called gets these guards, too. Never: changes a layer, or
makes a region for layers that cannot be one, or are of many kinds, or on torch 2.11,
which cannot use a region again: each of these is traced.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx, nn

from fxpar._torch.dynamo import SERVED, is_served, trace_again
from fxpar._torch.flat_regions import LINES, RENAMED, RenamedModules
from fxpar._torch.inductor import invoke_subgraph
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

# Layers of one class in a list are regions if there are at least so many.
_LEAST = 3

# If a class has more kinds of layers than this, each of its layers is traced.
_KINDS = 3

# Dynamo's methods that set an attribute of an object that was there before the trace,
# and read one that was set.
_STORE, _LOAD = "store_attr", "load_attr"

# Compilation by Dynamo -> classes whose layers are traced each: it begins anew when one
# is found.
_refused: weakref.WeakKeyDictionary[Any, set[type]] = weakref.WeakKeyDictionary()

# Classes that break the graph, by their code alone, so equal on all ranks: what comes
# after a break is compiled by itself, and has the next layer in it.
_broken: weakref.WeakSet[type] = weakref.WeakSet()


def serve(backend: Callable[..., Any]) -> None:
    """Let frames that Dynamo traces for ``backend`` have regions for their layers."""
    SERVED.add(backend)
    _teach_dynamo()


@functools.cache
def _teach_dynamo() -> None:
    """Make Dynamo ask this module when it calls a module, and when it would use a
    region."""
    try:
        from torch._dynamo.variables import invoke_subgraph as regions
    except ImportError:
        return
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.base import AttributeMutationExisting as Existing
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    dynamo: Any = regions
    plain, fits = UnspecializedNNModuleVariable.call_function, regions.is_reusable
    flattened = regions.build_input_fingerprint

    @functools.wraps(plain)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        trace = _trace_of(tx)
        if type(self) is UnspecializedNNModuleVariable and trace.can_call(tx, self):
            return trace.call(tx, self, args, kwargs)
        return plain(self, tx, args, kwargs)

    @functools.wraps(fits)
    def is_reusable(tx: Any, condition: Any, operands: Any, entry: Any) -> bool:
        is_same_kind: bool = fits(tx, condition, operands, entry)
        return is_same_kind and _trace_of(tx).fits(tx, operands, entry)

    @functools.wraps(flattened)
    def build_input_fingerprint(tx: Any, args: Any, kwargs: Any) -> Any:
        of_layer = _trace_of(tx).called is not None
        return _operands(args, kwargs) if of_layer else flattened(tx, args, kwargs)

    def note(name: str) -> None:
        """Note changes of objects, and reads of what was changed, in a trace."""
        method = getattr(SideEffects, name)

        @functools.wraps(method)
        def noted(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            trace = getattr(self.output_graph_weakref(), "fxpar_layers", None)
            if trace is not None and isinstance(item.mutation_type, Existing):
                trace.counts[name] += 1
            return method(self, item, *args, **kwargs)

        setattr(SideEffects, name, noted)

    note(_STORE)
    note(_LOAD)
    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
    dynamo.is_reusable = is_reusable
    dynamo.build_input_fingerprint = build_input_fingerprint


@dataclass(frozen=True)
class _TracedLayer:
    """Holds a layer that was traced as a region."""

    # Dynamo's record of the region, by which it is used again.
    entry: Any
    # The layer's ``kind_of``, which must be the same.
    kind: Any
    # All guards on the layer: of what was there before the trace.
    guards: Sequence[LayerGuard]
    # How many attributes had been set in the trace.
    stores: int


@dataclass(frozen=True)
class _Body:
    """Is a body that regions call: Dynamo has one body for all regions of the same
    ops."""

    # The layer that was traced to it, a variable of Dynamo.
    layer: Any
    # Its call in the graph.
    call: fx.Node

    def renamed(self, layer: Any, call: fx.Node) -> RenamedModules:
        """Return the names of its modules where another layer is called."""
        traced = self.layer.value.named_modules(remove_duplicate=False)
        ours = layer.value.named_modules(remove_duplicate=False)
        keys = {
            str(id(a)): str(id(b)) for (_, a), (_, b) in zip(traced, ours, strict=True)
        }
        return RenamedModules(
            keys,
            (_path(self.layer), _path(layer)),
            (self.call.meta.get(LINES, ""), call.meta.get(LINES, "")),
        )


def _trace_of(tx: Any) -> _Trace:
    """Return what is known of the layers of a trace."""
    if not hasattr(tx.output, "fxpar_layers"):
        tx.output.fxpar_layers = _Trace(_is_served(tx))
        tx.output.add_cleanup_hook(tx.output.fxpar_layers.forget)
    trace: _Trace = tx.output.fxpar_layers
    return trace


def _is_served(tx: Any) -> bool:
    from torch._dynamo.eval_frame import innermost_backend

    innermost: Any = innermost_backend(tx.output.compiler_fn)
    backend = getattr(innermost, "compiler_fn", innermost)
    return not tx.output.export and is_served(backend)


def _compilation() -> Any:
    """Return the object that stands for all that Dynamo does for one frame."""
    from torch._guards import CompileContext

    return CompileContext.get()


class _Trace:
    """Tracks the layers of one trace. ``called``: the layer whose call is under way;
    ``used``: the region that was found for it; ``counts``: calls of _STORE and
    _LOAD."""

    def __init__(self, is_served: bool) -> None:
        self.is_served = is_served
        self.regions: dict[int, _TracedLayer] = {}  # by id of the entry
        self.bodies: dict[str, _Body] = {}  # by name
        self.called: Any = None
        self.used: _TracedLayer | None = None
        self.counts: Counter[str] = Counter()

    def forget(self) -> None:
        """Drop the records of the trace, which is at its end."""
        self.regions.clear()
        self.bodies.clear()

    def can_call(self, tx: Any, layer: Any) -> bool:
        """Return whether the call of a module becomes a call of a region."""
        return (
            self.is_served
            and self.called is None
            and tx.output.current_tracer.parent is None
            and not is_in_transform(tx)
            and type(layer.value) not in _broken
            and type(layer.value) not in _refused.get(_compilation(), ())
            and _is_one_of_several(tx, layer)
            and not has_own_calls(layer.value)
            and not has_changed_state(tx, layer.value)
        )

    def call(self, tx: Any, layer: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a layer, from a region that was traced or is traced for
        it."""
        from torch._dynamo import exc
        from torch._dynamo.variables.higher_order_ops import (
            TorchHigherOrderOperatorVariable,
        )

        op = invoke_subgraph()
        self.called, self.used = layer, None
        loads = self.counts[_LOAD]
        try:
            of_layer = _call_of_layer()(type(layer.value).forward)
            variable = TorchHigherOrderOperatorVariable.make(op)
            _operands(args, kwargs)  # read outside of the region, where its call is
            results = variable.call_function(tx, [of_layer, layer, *args], kwargs)
            if self.used is not None:
                is_region = True
                _no_leaves(results, tx.fake_mode)
            else:
                is_region = (
                    self.counts[_LOAD] == loads
                    and _has_distinct_tensors(results)
                    and self._record_region(tx, layer)
                )
        except exc.RestartAnalysis:
            raise
        except Exception as error:  # whatever it is, it comes again without regions
            is_region = False
            if isinstance(error, exc.Unsupported):
                _broken.add(type(layer.value))
        finally:
            self.called = None
        if not is_region:
            _refused.setdefault(_compilation(), set()).add(type(layer.value))
            trace_again("a layer is no region")
        nodes = reversed(tx.output.current_tracer.graph.nodes)
        call = next(node for node in nodes if node.target is op)
        first = self.bodies.setdefault(call.args[1], _Body(layer, call))
        call.meta[RENAMED] = first.renamed(layer, call)
        return results

    def _record_region(self, tx: Any, layer: Any) -> bool:
        """Record the region that a layer became. Return whether it can be used again,
        and its class does not have too many."""
        from torch._dynamo.source import is_from_source
        from torch._guards import InvokeSubgraphCache
        from torch.utils._ordered_set import OrderedSet

        def is_other(source: Any) -> bool:
            return not is_from_source(source, layer.source)

        caches = tx.output.tracing_context.hop_dispatch_set_cache
        cache = caches.get_cache(invoke_subgraph())
        if not isinstance(cache, InvokeSubgraphCache):
            return False
        entries = cache.subgraph_reuse_cache.get(type(layer.value).forward.__code__, [])
        new = [each for each in entries if id(each[1]) not in self.regions]
        if len(new) != 1 or len(entries) > _KINDS:
            return False
        ((condition, entry),) = new
        guards = guards_on(tx, layer.source, captured_by(entry))
        if guards is None:
            return False
        operands = set(entry.arg_sources) - {None, layer.source}
        if has_more_reads(tx, condition, operands, layer):
            return False
        if not is_reading_tensors(tx, entry, layer.source):
            return False
        # ``fits`` compares all that Dynamo would compare of the layer, and more.
        sources, checks = condition.traced_sources, condition.guards
        condition.traced_sources = OrderedSet(s for s in sources if is_other(s))
        condition.guards = [check for check in checks if is_other(check[0])]
        kind = kind_of(layer.value)
        traced = _TracedLayer(entry, kind, guards, self.counts[_STORE])
        others = list(self.regions.values())
        self.regions[id(entry)] = traced
        # Dynamo has one body for the same ops, although they may give other results in
        # other modes.
        return all(
            other.kind == traced.kind
            for other in others
            if other.entry.body_name == traced.entry.body_name
        )

    def fits(self, tx: Any, operands: Any, entry: Any) -> bool:
        """Return whether a region, whose operands fit, fits the layer that is
        called."""
        region = self.regions.get(id(entry))
        if region is None:  # a region of the user's
            return True
        if region.kind != kind_of(self.called.value):
            return False
        if region.stores != self.counts[_STORE]:
            return False
        from torch._dynamo.guards import install_guard
        from torch._dynamo.variables.invoke_subgraph import build_source_replacement

        instead = build_source_replacement(entry.arg_sources, operands.arg_sources)
        guards = moved_guards(tx, region.guards, instead) if instead else []
        if guards is None:
            return False
        install_guard(*guards)
        self.used = region
        return True


@functools.cache
def _call_of_layer() -> Any:
    from torch._dynamo.variables.functions import UserFunctionVariable

    class CallOfLayer(UserFunctionVariable):
        """Calls its first operand, a module, as Dynamo does without regions."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            layer, *operands = args
            return layer.call_function(tx, operands, kwargs)

    return CallOfLayer


def _operands(args: Any, kwargs: Any) -> Any:
    """Return the operands of a layer for Dynamo to compare: its own way traces how
    torch flattens Python's containers, at each call."""
    from torch._dynamo.variables import ConstDictVariable, ListVariable, TupleVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.invoke_subgraph import InputFingerprint, classify_vt
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
    from torch.utils._pytree import TreeSpec

    leaves: list[Any] = []
    nodes: dict[fx.Node, int] = {}
    unknown = False

    def value_of(variable: Any) -> Any:
        """Return what Dynamo does not compare of a leaf: which other leaves it equals,
        and the type of a number."""
        nonlocal unknown
        if isinstance(variable, ConstantVariable):
            return type(variable.value), repr(variable.value)
        if isinstance(variable, (TensorVariable, SymNodeVariable)):
            node = variable.as_proxy().node
            unknown = unknown or not _is_plain(node.meta.get("example_value"))
            # Inputs of the graph may be read in another way inside.
            return nodes.setdefault(node, len(nodes)), variable.source
        return None

    def structure(variable: Any) -> Any:
        nonlocal unknown
        variable, inside = variable.realize(), None
        tag = classify_vt(variable)
        if tag is not None:
            leaves.append((tag, variable))
            inside = value_of(variable)
        elif type(variable) in (ListVariable, TupleVariable):
            inside = [structure(item) for item in variable.items]
        elif type(variable) is ConstDictVariable:
            inside = [(k.vt, structure(v)) for k, v in variable.items.items()]
            inside = [(k.as_python_constant(), v) for k, v in inside]
        else:
            unknown = True
        return type(variable), inside

    spec: Any = [structure(each) for each in args]
    spec = spec, {name: structure(each) for name, each in kwargs.items()}
    spec = TreeSpec(tuple, spec, [])  # torch 2.15 looks into it
    sources = [getattr(variable, "source", None) for _, variable in leaves]
    return InputFingerprint(leaves, sources, unknown, spec)


def _is_plain(value: Any) -> bool:
    """Return whether a fake value is a tensor or number, and no subclass that holds
    others."""
    return not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)


def _has_distinct_tensors(results: Any) -> bool:
    """Return whether a layer gives one plain tensor, or a tuple of several: what Dynamo
    gives for a region that is used again."""
    from torch._dynamo.variables import TupleVariable
    from torch._dynamo.variables.tensor import TensorVariable

    each = results.items if type(results) is TupleVariable else [results]
    if not each or not all(type(x) is TensorVariable for x in each):
        return False
    nodes = [x.as_proxy().node for x in each]
    values = [node.meta.get("example_value") for node in nodes]
    return len(set(nodes)) == len(nodes) and all(map(_is_plain, values))


def _no_leaves(results: Any, mode: Any) -> None:
    """Give fake results of a region that is used again a gradient function, so that
    code may write to them: Dynamo makes them leaves, though the traced ones are none.
    """
    for x in getattr(results, "items", [results]):
        meta = x.as_proxy().node.meta
        value = meta["example_value"]
        if value.requires_grad and value.is_leaf:
            with mode, torch.enable_grad():
                result = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
                meta["example_value"] = result.copy_(value)


def _is_one_of_several(tx: Any, layer: Any) -> bool:
    """Return whether a module of the user's own is one of several in a list of
    modules."""
    from torch._dynamo.source import NNModuleSource

    kind, source = type(layer.value), layer.source
    if kind.__module__.startswith("torch.nn."):
        return False
    while isinstance(source, NNModuleSource):
        source = source.base
    if not hasattr(source, "index") or not hasattr(source, "base"):
        return False
    siblings = tx.output.resolve_source_value(source.base)
    if isinstance(siblings, Mapping):
        siblings = siblings.values()
    if isinstance(siblings, nn.Module):
        siblings = siblings.children()
    return sum(type(each) is kind for each in siblings) >= _LEAST


def _path(layer: Any) -> str:
    """Return the path of a module, as Dynamo writes it in the metadata of nodes."""
    name = layer.get_nn_module_stack_source().name
    within = r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]"
    return re.sub(within, r".\2", name)


@dataclass(frozen=True)
class LayerGuard:
    """Holds a guard on a layer that was traced."""

    # Dynamo's guard.
    guard: Any
    # Dynamo's check of a value; None if the guard says nothing of a value.
    check: Any
    # The value that the check compares with, read from the traced layer.
    expected: Any
    # Whether it is on a tensor that the region reads: where a region is called, Dynamo
    # makes this an input of the graph, and guards it.
    is_captured: bool


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


def has_more_reads(tx: Any, condition: Any, operands: Set[Any], layer: Any) -> bool:
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


def captured_by(entry: Any) -> list[Any]:
    """Return the sources of what a region reads that is no operand of its call."""
    from torch._dynamo.variables.invoke_subgraph import LiftedCapturedSource

    inputs = entry.subgraph_input_mapping
    return [x.source for x in inputs if isinstance(x, LiftedCapturedSource)]


def is_reading_tensors(tx: Any, entry: Any, source: Any) -> bool:
    """Return whether a region reads nothing of its layer but tensors of fixed sizes,
    and makes no sizes of data: numbers that Dynamo leaves open belong to one layer, and
    no guard says to which."""
    from torch._dynamo.source import is_from_source
    from torch.fx.experimental.symbolic_shapes import (
        free_symbols,
        free_unbacked_symbols,
    )

    read = map(tx.output.resolve_source_value, captured_by(entry))
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


def guards_on(
    tx: Any, source: Any, captured: Collection[Any]
) -> tuple[LayerGuard, ...] | None:
    """Return the guards on the value of a source, and on what is in it; None if Dynamo
    cannot say for one of them whether it holds for another value. ``captured``: sources
    of tensors that the region reads."""
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
        inside = any(is_from_source(guard.originating_source, c) for c in captured)
        each.append(LayerGuard(guard, check, expected, inside))
    return tuple(each)


def moved_guards(
    tx: Any, guards: Sequence[LayerGuard], instead: Mapping[Any, Any]
) -> list[Any] | None:
    """Return the guards on the traced layer as guards on the one that is called; None
    if one does not hold for it. ``instead``: Dynamo's sources of the operands of the
    traced call -> the sources of this call's. Tensors that the region does not read
    become inputs of the graph, too: Dynamo guards these itself."""
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._guards import ChainedSource, Source

    @functools.cache  # many sources share parts, which ``clone`` does not use again
    def moved(source: Any) -> Any:
        if source in instead or not isinstance(source, ChainedSource):
            return instead.get(source, source)
        parts = {field.name: getattr(source, field.name) for field in fields(source)}
        new = {name: moved(x) for name, x in parts.items() if isinstance(x, Source)}
        return replace(source, **new)

    root = tx.output.root_tx
    values: Any = {"G": root.f_globals, "L": root.f_locals}, {}, {}  # read from, read
    here, tensors = [], []
    for each in guards:
        source = moved(each.guard.originating_source)
        name = each.guard.create_fn_name()
        create = each.guard.create_fn
        try:
            value = source.get_value(*values)
            if name == _SAME:
                other = moved(create.keywords["source_b"])
                create = functools.partial(create.func, source_b=other)
                holds = value is other.get_value(*values)
            else:
                holds = each.check is None or each.check.eval_fn(value, each.expected)
        except (LookupError, AttributeError, TypeError):
            return None
        if not holds:
            return None
        if name == _TENSOR:
            if not each.is_captured:
                tensors.append((source, value))
        else:
            here.append(source.make_guard(create))
    for source, value in tensors:
        VariableBuilder(tx, source)(value)
    return here
