"""Calls Inductor: random numbers, decompositions, order of ops and caches.

In: a graph of ATen ops with fake values. Out: code, cache entries, tables and settings
of Inductor. Never: a setting of Inductor changed after a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx

from fxpar._fast.cpp_kernels import (
    LOADING,
    kernels_in_libraries,
    probes_remembered,
)
from fxpar._fast.known_values import values_known
from fxpar._torch.decompositions import TABLE
from fxpar._torch.node_texts import is_users_op
from fxpar._torch.objects import define_op
from fxpar._torch.version import own_version

aten = torch.ops.aten


def load() -> None:
    """Import what a graph is compiled with, and read the installed files that keys of
    torch's caches are made of, which takes a second and a half."""
    import torch._inductor.compile_fx
    import torch.utils.cpp_extension  # noqa: F401
    from torch._inductor import codecache
    from torch._inductor.codegen.common import init_backend_registration

    init_backend_registration()
    codecache.torch_key()
    codecache.CacheBase.get_system()


def modes() -> dict[str, dict[str, Any]]:
    """Return settings of Inductor by the ``mode=`` of ``torch.compile`` that has
    them."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def setting_types() -> dict[str, Any]:
    """Return the type of each setting of Inductor, by its name."""
    from torch._inductor import config

    module: Any = config
    return {name: module.get_type(name) for name in module.get_config_copy()}


def inductor_prim(name: str) -> Any:
    """Return Inductor's ``seeds(count, device)``, ``random(size, seed, mode)`` or
    ``randint(low, high, size, seed)``, which the import registers."""
    from torch._inductor import inductor_prims

    return getattr(inductor_prims, name)


def replace_random(gm: fx.GraphModule, fake_mode: Any) -> None:
    """Replace ATen random ops by Inductor's seed-and-index form, seeds numbered as on
    one device. Does nothing under Inductor's ``fallback_random``.

    Inductor (torch 2.13) takes no dtype for float32, not for torch's default."""
    from torch._inductor.fx_passes.joint_graph import lazy_init
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    for op in (torch.ops.aten.rand.default, torch.ops.aten.randn.default):
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.kwargs = dict(node.kwargs) | {"dtype": node.meta["val"].dtype}
    lazy_init(None)
    with V.set_fake_mode(fake_mode):
        replace_random_passes(gm)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition table Inductor traces with, ours in place of some of its
    rows. The backward of a pool stays an op: its local form is its decomposition."""
    table = {**_own_decompositions(), **TABLE}
    table.pop(aten.max_pool2d_with_indices_backward.default, None)
    return table


def _own_decompositions() -> dict[Any, Callable[..., Any]]:
    import torch._inductor.lowering  # noqa: F401  (some decompositions call it)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def is_decomposed(op: Any) -> bool:
    """Return whether Inductor decomposes an op while a program is traced, and cannot
    compile it after that."""
    from torch._inductor import lowering

    return op in _own_decompositions() and op not in lowering.lowerings


def compile_inner(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """Return Inductor's code for a graph of ATen ops, called with one list of
    arguments."""
    return cast(Callable[..., Any], _in_order(gm, list(fakes)))


def _in_order(
    gm: fx.GraphModule, fakes: list[Any], text: str | None = None, **how: Any
) -> Any:
    """Return Inductor's code; for a graph with collectives in the order of the graph:
    else Inductor (2.13) moves ops to their readers, after waits, and waits to where
    they free memory, at once, so that nothing overlaps with a collective. ``text``:
    stands for the graph and its inputs in the key of Inductor's cache."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    bodies = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for body in bodies:
        _hold_operands(body)
        _compute_scalars_once(body.graph)
        body.recompile()
    graphs = [body.graph for body in bodies]
    targets = {node.target for graph in graphs for node in graph.nodes}
    waits = any("::wait_" in _name(target) for target in targets)
    names = ["reorder_for_locality", "reorder_for_peak_memory"] if waits else []
    if text is None and any(map(is_users_op, targets)):
        # Torch's key of a graph does not have the shapes of results of the user's ops.
        names.append("fx_graph_cache")
    with (
        config.patch(dict.fromkeys(names, False)),
        _read_after_writes(),
        _parts_separate(graphs),
        _keyed_by(text),
        shortcuts(LOADING),
    ):
        return compile_fx_inner(gm, fakes, **how)


def shortcuts(phase: str) -> contextlib.ExitStack:
    """Return an entered context in which Inductor compiles in less time. ``phase``: as
    of ``kernels_in_libraries``."""
    stack = contextlib.ExitStack()
    stack.enter_context(kernels_in_libraries(phase))
    stack.enter_context(probes_remembered())
    stack.enter_context(values_known())
    return stack


@functools.cache
def keep_scales() -> None:
    """Let no pattern of Inductor leave a scale out: before 2.15 torch takes
    ``add(x, y @ z, alpha=2)`` for ``x + y @ z``, in which nothing is scaled."""
    if torch.__version__ >= "2.15":
        return
    from torch._inductor import pattern_matcher

    matches = pattern_matcher._TargetArgsExpr._match

    @functools.wraps(matches)
    def match(self: Any, node: Any, ctx: Any) -> Any:
        scale = node.kwargs.get("alpha", 1) if isinstance(node, fx.Node) else 1
        if scale != 1 and "alpha" not in self.kwargs:
            return pattern_matcher.FailedMatch("a scale: {}", node)
        return matches(self, node, ctx)

    pattern_matcher._TargetArgsExpr._match = match  # type: ignore[method-assign]
    # Code that was cached without this is not taken.
    torch.compiler.config.cache_key_tag += "scales kept"


def _read_after_writes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a kernel that Inductor loops over anew reads what it
    read: before 2.14 it forgets then that a collective wrote over it, and puts the
    kernel before that."""
    if torch.__version__ >= "2.14":
        return contextlib.nullcontext()
    from unittest import mock

    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    return mock.patch.object(
        SchedulerNode, "recompute_size_and_body", recompute_and_rename
    )


# Metadata key of a node: its part of the batch.
PART = "fxpar_part"


def _parts_separate(
    graphs: Iterable[fx.Graph],
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor fuses no ops of different parts of a batch
    that do not read one another. It (2.13) makes one kernel of light ops that read the
    same tensor, as the norms of two parts read one weight: the first part then waits
    for all operands of the second, which may have to arrive yet, and the activations of
    both are in memory."""
    from unittest import mock

    from torch._inductor.choices import InductorChoices

    if not any(PART in node.meta for graph in graphs for node in graph.nodes):
        return contextlib.nullcontext()
    may_fuse = InductorChoices.can_fuse_horizontal

    def can_fuse_horizontal(scheduler: Any, one: Any, other: Any, score: int) -> bool:
        first, second = _parts_of(one), _parts_of(other)
        if first and second and first != second:
            return False
        return may_fuse(scheduler, one, other, score)

    return mock.patch.object(
        InductorChoices, "can_fuse_horizontal", staticmethod(can_fuse_horizontal)
    )


def _parts_of(node: Any) -> set[int]:
    """Return the parts that a node of Inductor's schedule computes."""
    return {
        origin.meta[PART]
        for each in node.get_nodes()
        if each.node is not None
        for origin in each.node.get_origins()
        if PART in origin.meta
    }


# Inductor runs these in place, or in a copy of the operand.
_IN_PLACE = ("::all_reduce", "::broadcast")


def _hold_operands(body: fx.GraphModule) -> None:
    """Read the operands of a collective once more after its wait, by an op without a
    kernel: Inductor (2.13), whose order of buffers knows of the collective, makes ops
    write over an operand before the wait (``reinplace``) if no node of the graph reads
    it later."""
    for wait in [n for n in body.graph.nodes if "::wait_" in _name(n.target)]:
        launch = wait.args[0]
        name = _name(launch.target) if isinstance(launch, fx.Node) else ""
        if not name or any(kind in name for kind in _IN_PLACE):
            continue
        with body.graph.inserting_after(wait):
            for operand in launch.all_input_nodes:
                if not isinstance(operand.meta["val"], torch.SymInt):
                    hold = body.graph.call_function(_hold(), (operand,))
                    hold.meta["val"] = None


@functools.cache
def _hold() -> Any:
    """Return an op that does nothing, and stays in a graph; Inductor generates no code
    for it."""
    from torch._inductor.lowering import register_lowering
    from torch.fx.node import has_side_effect

    define_op("fxpar::hold(Tensor x) -> ()", lambda x: None, lambda x: None)
    op = torch.ops.fxpar.hold.default
    register_lowering(op, type_promotion_kind=None)(lambda x: None)
    has_side_effect(op)
    return op


# Ops that take far longer than the memory access of an element.
_SLOW = {
    getattr(aten, name).default
    for name in ("sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid")
} | {getattr(aten.pow, name) for name in aten.pow.overloads() if "out" not in name}
# The least elements of a reader for which a number is computed before it, by a kernel
# of its own.
_MANY = 1 << 16


def _compute_scalars_once(graph: fx.Graph) -> None:
    """Compute numbers that slow ops give, such as an optimizer's corrections of bias,
    before what reads them: Inductor (2.13) computes them again for each element, or
    each vector, of the reader."""
    slow = set[fx.Node]()  # numbers with a slow op among what they are computed of
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.shape:
            continue
        if node.target in _SLOW or not slow.isdisjoint(node.all_input_nodes):
            slow.add(node)
            large = [user for user in node.users if _is_large(user.meta.get("val"))]
            if large:
                with graph.inserting_after(node):
                    once = graph.call_function(_once(), (node,))
                once.meta = dict(node.meta)
                for user in large:
                    user.replace_input_with(node, once)


def _is_large(value: Any) -> bool:
    is_known = isinstance(value, torch.Tensor) and all(
        type(n) is int for n in value.shape
    )
    return is_known and value.numel() >= _MANY


@functools.cache
def _once() -> Any:
    """Return an op that gives its operand, which Inductor then computes by itself."""
    from torch._inductor.lowering import register_lowering

    def lower(x: Any) -> Any:
        x.realize()
        return x

    define_op("fxpar::once(Tensor x) -> Tensor", torch.empty_like, torch.clone)
    op = torch.ops.fxpar.once.default
    register_lowering(op, type_promotion_kind=None)(lower)
    return op


def _keyed_by(text: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the key of Inductor's cache has ``text`` in place of
    the graph and its inputs, and fxpar's version in place of the pass that made it. As
    torch pickles them, these hold a rank's own values (2.13: the DeviceMesh of a
    DTensor; the key of the pass, in which a rank is), so that keys of equal graphs
    differ."""
    from unittest import mock

    from torch._inductor import codecache

    if text is None:
        return contextlib.nullcontext()

    def key_of(
        gm: Any, fakes: Any, options: Any, checked: Any
    ) -> tuple[str, list[str]]:
        details: Any = codecache.FxGraphHashDetails(gm, [], options, checked)
        details.gm, details.joint_custom_pre_pass = text, own_version()
        pickler: Any = codecache.FxGraphCachePickler(gm)
        if hasattr(pickler, "get_key"):
            return pickler.get_key(details), []
        return "f" + pickler.get_hash(details), []  # torch 2.11

    return mock.patch.object(codecache, "compiled_fx_graph_hash", key_of)


def _name(target: Any) -> str:
    return str(target.name()) if isinstance(target, OpOverload) else ""


def _local_examples(graph: fx.Graph, examples: Any) -> list[Any]:
    """Return example inputs as one rank holds them. Where AOTAutograd's have that shape
    they are better: saved activations come in the strides the forward gave them."""
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    return [
        value
        if isinstance(value, torch.Tensor) and value.shape != example.shape
        else example
        for value, example in zip(values, examples, strict=True)
    ]


def _take_strides(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Give inputs the strides of their ``examples``, in place, and so results of ops on
    them: layers that read values saved with other strides are not equal. An op that
    does not run on fakes of those strides keeps the strides it was traced with."""
    restrided = set[fx.Node]()
    inputs = graph.find_nodes(op="placeholder")
    for node, example in zip(inputs, examples, strict=True):
        value = node.meta.get("val")
        if not isinstance(example, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        if not _has_numbers(value) or not _has_numbers(example):
            continue
        if value.shape == example.shape and value.stride() != example.stride():
            node.meta["val"] = value.as_strided(value.shape, example.stride())
            restrided.add(node)
    for node in graph.nodes if restrided else ():
        namespace = getattr(node.target, "namespace", "")
        if namespace in ("aten", "prims") and restrided & {*node.all_input_nodes}:
            value = node.meta.get("val")
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda n: n.meta["val"]
            )
            if not isinstance(value, torch.Tensor) or node.is_impure():
                continue
            with contextlib.suppress(RuntimeError, ValueError):
                result = node.target(*args, **kwargs)
                if result.stride() != value.stride():
                    node.meta["val"] = result
                    restrided.add(node)


def _has_numbers(x: torch.Tensor) -> bool:
    """Return whether a tensor has strides, and these and its sizes are no symbols."""
    if x.layout != torch.strided:
        return False
    return all(type(n) is int for n in (*x.shape, *x.stride()))


def make_boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` in AOTAutograd's calling convention: one list of arguments."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(fn)


def triton_random_lanes() -> int:
    """Return how many neighbours draw from one Philox counter in Inductor's Triton
    kernels: four where it packs them (2.13), else one (2.11)."""
    from torch._inductor.codegen.triton import TritonOverrides

    packs = hasattr(TritonOverrides, "_can_use_4x_random")
    return 4 if packs else 1


def cache_dir() -> str:
    """Return the folder of Inductor's caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as directory

    return directory()


def profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range of this name in a profile, if one is taken."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()


def invoke_subgraph() -> Any:
    """Return the op that calls a body."""
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    return invoke_subgraph


def can_call_bodies() -> bool:
    """Return whether Inductor turns ``invoke_subgraph`` into a call of one function.
    With CUDA graphs (2.13) it does not see which ops of a body cannot be recorded."""
    from torch._inductor import config

    return not (config.cpp_wrapper or config.triton.cudagraphs)


def keep_strides(body: fx.Graph) -> None:
    """Let the results of a body have the strides of its fakes, which callers assume."""
    output = next(iter(body.find_nodes(op="output")))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))


def is_cache_disabled() -> bool:
    """Return whether the user turned off all caches of torch."""
    from torch._inductor import config

    return bool(config.force_disable_caches)


OpOverload = torch._ops.OpOverload
