"""The only file that imports private torch names. Written for torch 2.13; 2.11 works.

Each name is imported where it is used first, since importing fxpar must stay light.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

__all__ = ["Partial", "Replicate", "Shard"]

# Ops that fxpar names and torch 2.11 lacks: this file defines them there.
NEWER = ("_c10d_functional::isend", "_c10d_functional::irecv")


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement for a dim that more major axes of later mesh dims split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def inductor_seeds() -> Any:
    """Inductor's ``inductor_seeds(count, device)``."""
    from torch._inductor import inductor_prims

    return inductor_prims.seeds


def inductor_random() -> Any:
    """Inductor's ``inductor_random(size, seed, mode)``."""
    from torch._inductor import inductor_prims

    return inductor_prims.random


def inductor_randint() -> Any:
    """Inductor's ``inductor_randint(low, high, size, seed)``."""
    from torch._inductor import inductor_prims

    return inductor_prims.randint


def higher_order_name(target: Any) -> str:
    """``"higher_order::cond"`` for an op that runs graphs; "" for others."""
    from torch._ops import HigherOrderOperator

    if not isinstance(target, HigherOrderOperator):
        return ""
    return f"higher_order::{target.name()}"


def depends_on_data(x: torch.Tensor) -> bool:
    """Whether the shape of a fake tensor is known only once it is computed."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(x))


def replace_random(gm: fx.GraphModule, fake_mode: Any) -> None:
    """ATen random ops -> Inductor's seed-and-index form, seeds numbered as on one
    device. Does nothing under Inductor's ``fallback_random``."""
    from torch._inductor.fx_passes.joint_graph import lazy_init
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    lazy_init(None)
    with V.set_fake_mode(fake_mode):
        replace_random_passes(gm)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table Inductor traces with."""
    import torch._inductor.lowering  # noqa: F401  (some decompositions call it)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def fake_mode_of(values: Any) -> Any:
    """The FakeTensorMode of some fake values, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def mode_of(values: Any) -> Any:
    """The mode in which ops on the values of a graph are traced: their FakeTensorMode,
    or None; of values on the meta device, of which each op gives the shape by itself, a
    context that does nothing."""
    if any(type(value) is torch.Tensor and value.is_meta for value in values):
        return contextlib.nullcontext()
    return fake_mode_of(values)


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Ops on values of the meta device give such values, whatever mode is on."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        yield


def new_fake_mode(*, symbols: bool = False, scalars: bool = False) -> Any:
    """A FakeTensorMode for tracing with static shapes. ``symbols``: it can make some,
    which ``while_loop`` (2.13) asks for; ``scalars``: also of what a tensor holds, as
    Inductor needs to lower loops. All inputs must then be fakes already."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not symbols:
        return FakeTensorMode(allow_non_fake_inputs=True)
    made = ShapeEnv(allow_scalar_outputs=scalars, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=made, static_shapes=True
    )


def export_joint(
    stack: Any, module: torch.nn.Module, args: Any, *, grad: bool
) -> fx.GraphModule:
    """The joint (``grad``) or inference graph of a module on fake arguments, after
    Inductor's decompositions; placeholders and output carry ``meta["desc"]``."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with torch.set_grad_enabled(grad):
        joint = aot_export_joint_with_descriptors(
            stack, module, args, decompositions=decompositions()
        )
    return joint.graph_module


def export_forward(
    module: torch.nn.Module, fakes: Sequence[torch.Tensor], mode: Any
) -> fx.GraphModule:
    """As ``export_joint``, without gradients, while a graph is being compiled or not:
    what Dynamo traces with is left alone."""
    from torch._guards import tracing

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(None))
        stack.enter_context(mode)
        return export_joint(stack, module, tuple(fakes), grad=False)


def untraceable(error: BaseException) -> str | None:
    """Why a program cannot be one graph of fixed shapes: it reads a "value", a "shape"
    depends on data, it writes to a "constant" or, by an op that is not functional, to
    a "list" of tensors. None if ``error`` says none of these."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = str(error)
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return "value"
    if isinstance(error, DynamicOutputShapeException):
        return "shape"
    if isinstance(error, AssertionError) and "entirely functional graph" in text:
        return "constant"
    if isinstance(error, RuntimeError) and "non-functional tensor with a fun" in text:
        return "list"
    return None


def reparametrize(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Any:
    """Context in which a module uses ``tensors`` as its parameters and buffers."""
    from torch.nn.utils.stateless import _reparametrize_module

    # A module that stands in two places is swapped twice: it is restored in reverse.
    return _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True)


def trace_flat(fn: Callable[..., Any], args: Any, mode: Any) -> fx.GraphModule:
    """What ``fn`` does with fake tensors of ``mode`` and numbers, as one ATen graph: it
    writes in place where ``fn`` does; backward passes inside are ops of it."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, preserve_node_meta(), enable_python_dispatcher():
        return make_fx(fn)(*args)


def nodes_being_traced() -> Any:
    """The nodes traced so far, inside ``trace_flat``."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    proxies = get_proxy_mode()
    assert proxies is not None, "nothing is being traced"
    return proxies.tracer.graph.nodes


def keep_lines_in_backward(result: torch.Tensor) -> None:
    """Give what is traced of the backward of ``result`` the user's lines of the
    forward."""
    from torch._functorch._aot_autograd import logging_utils

    if result.grad_fn is not None:
        logging_utils.setup_stacktrace_preservation_hooks([result.grad_fn])


def written_input(desc: Any) -> Any:
    """The descriptor of a new value of the input that ``desc`` describes."""
    from torch._functorch._aot_autograd import descriptors as d

    return d.InputMutationAOTOutput(desc)


def compile_as_one(fn: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """``torch.compile`` into one graph, apart from others of the same code: Dynamo
    counts recompilations per code object. Python's floats are constants of the graph,
    and guarded, since what they become otherwise is read back inside it. Calls of
    loggers are left out of it, since they would break it."""
    import logging
    import types

    from torch._dynamo import config

    own = types.FunctionType(
        fn.__code__.replace(),
        fn.__globals__,
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    compiled = torch.compile(own, backend=backend, fullgraph=True)

    names = ("debug", "info", "warning", "warning_once", "error", "critical", "log")
    silent = "ignore_logging_functions"
    if not hasattr(config, silent):
        silent = "ignore_logger_methods"  # 2.11

    def call(*args: Any, **kwargs: Any) -> Any:
        # Libraries add methods to loggers when they are imported.
        found = {getattr(logging.Logger, name, None) for name in names} - {None}
        ignored = getattr(config, silent) | found
        with config.patch({"specialize_float": True, silent: ignored}):
            return compiled(*args, **kwargs)

    return call


def why_not_one_graph(error: BaseException) -> tuple[str, str | None] | None:
    """Of an error of Dynamo: what it could not trace, and at which of the user's lines;
    None of other errors."""
    from torch._dynamo import exc

    if not isinstance(error, (exc.Unsupported, exc.UserError)):
        return None
    stack = getattr(error, "real_stack", None)
    where = None
    if stack:
        where = f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}"
    return str(error).splitlines()[0], where


def preserve_node_meta() -> Any:
    """Context in which traced nodes take the metadata set by ``set_stack_trace``."""
    from torch.fx import traceback

    return traceback.preserve_node_meta()


def set_stack_trace(lines: list[str]) -> None:
    """Stack trace of the nodes traced from here on."""
    from torch.fx import traceback

    traceback.set_stack_trace(lines)


def tree_leaves(tree: Any) -> list[Any]:
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.tree_map(fn, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def descriptor(desc: Any) -> tuple[str, Any]:
    """What an AOTAutograd descriptor says: (kind, payload).

    Inputs: ("parameter", name), ("buffer", name), ("input", index), ("tangent", output
    desc), ("state", "token") of what keeps effects in order, ("state", None). Outputs:
    ("output", index), ("gradient", input desc), ("mutation", input desc), ("state",
    None).
    """
    from torch._functorch._aot_autograd import descriptors as d

    if not _is_bare(desc):
        return "state", None
    desc = bare(desc)
    if isinstance(desc, d.ParamAOTInput):
        return "parameter", desc.target
    if isinstance(desc, d.BufferAOTInput):
        return "buffer", desc.target
    if isinstance(desc, d.PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, d.TangentAOTInput):
        return "tangent", desc.output
    if isinstance(desc, (d.ForwardTokenAOTInput, d.BackwardTokenAOTInput)):
        return "state", "token"
    if isinstance(desc, d.PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, d.GradAOTOutput):
        return "gradient", desc.grad_of
    if isinstance(desc, d.InputMutationAOTOutput):
        return "mutation", desc.mutated_input
    return "state", None


_LOCAL = "_local_tensor"  # the one tensor of a DTensor


def _is_bare(desc: Any) -> bool:
    """Whether a descriptor is of a tensor, or of the tensor inside a DTensor."""
    return getattr(desc, "attr", _LOCAL) == _LOCAL


def bare(desc: Any) -> Any:
    """A descriptor of a DTensor's own tensor as that of the DTensor."""
    from torch._functorch._aot_autograd import descriptors as d

    parts = (d.SubclassGetAttrAOTInput, d.SubclassGetAttrAOTOutput)
    return desc.base if isinstance(desc, parts) and desc.attr == _LOCAL else desc


def as_fake(x: torch.Tensor, mode: Any) -> torch.Tensor:
    """A detached fake of ``x`` in ``mode``; a fake one of that mode stays itself.

    One on the meta device is traced as on the CPU: of a cross entropy there the joint
    graph (2.13) has no gradients."""
    from torch._subclasses.fake_tensor import FakeTensor

    x = x.detach()
    if x.device.type == "meta":
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, FakeTensor) and x.fake_mode is mode:
        return x
    with mode:
        return mode.from_tensor(x)


def compile_fx(
    gm: fx.GraphModule,
    examples: Any,
    *,
    joint_pass: Callable[[fx.GraphModule], fx.Graph | None] | None = None,
    schedule: Callable[[fx.Graph, bool], None] | None = None,
    inner: Callable[..., Any] | None = None,
    key: str = "",
    local_border: bool = False,
) -> Callable[..., Any]:
    """Inductor's ``compile_fx``, ``joint_pass`` hung on the joint (or inference) graph.

    ``joint_pass(gm)`` returns the graph to compile instead, with the shapes one rank
    holds; None leaves the graph. ``schedule(graph, backward)`` changes each graph that
    is compiled (forward, backward) in place. ``inner(gm, examples)`` replaces
    Inductor's codegen.
    ``key`` enters Inductor's cache keys. ``local_border``: results have the shapes one
    rank holds, so their gradients may not be forced into the shapes traced.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if joint_pass is None:
        return cast(Callable[..., Any], inductor(gm, examples))
    parallelize = joint_pass

    class Hook(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            owner = graph.owning_module
            new = parallelize(owner)
            if new is not None:
                new.set_codegen(graph._codegen)
                owner.graph = new
                owner.recompile()

        def uuid(self) -> str:
            return f"{own_version()}|{key}"

    def compile_inner(graph: fx.GraphModule, given: Any, **kwargs: Any) -> Any:
        local = _local_examples(graph.graph, given)
        if schedule is not None:
            schedule(graph.graph, bool(kwargs.get("is_backward")))
            graph.recompile()
        if inner is not None:
            return inner(graph, local)
        return _in_order(graph, local, **kwargs)

    # A hit in AOTAutograd's cache would skip the joint pass, and with it the agreement
    # of the ranks. Inductor's own cache, keyed by the bound graph, stays.
    settings = {"enable_autograd_cache": False}
    if local_border:
        settings["guess_tangent_strides_as_outputs"] = False
    with functorch_config.patch(settings):
        compiled = inductor(
            gm,
            _with_symbols(gm, examples),
            inner_compile=compile_inner,
            config_patches={"joint_custom_pre_pass": Hook()},
        )
    return cast(Callable[..., Any], compiled)


def _with_symbols(gm: fx.GraphModule, examples: Sequence[Any]) -> Sequence[Any]:
    """Examples of a graph with a loop as fakes among which symbols can be made."""
    from torch._subclasses.fake_tensor import FakeTensor

    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    names = {higher_order_name(n.target) for graph in graphs for n in graph.nodes}
    loops = {f"higher_order::{op}" for op in ("while_loop", "scan", "map_impl")}
    if not names & loops:
        return examples
    mode = new_fake_mode(symbols=True, scalars=True)

    def fake(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            return fake_like(x, tuple(x.shape), mode)
        if isinstance(x, torch.Tensor):
            return mode.from_tensor(x, static_shapes=True)
        return x

    return list(map(fake, examples))


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Inside, ops run as in compiled code, though compiling goes on around them: on
    real tensors, and without Python's dispatcher, for which gloo's threads would need
    the interpreter's lock, which a wait for them holds."""
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher():
        yield


def compile_inner(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's code for a graph of ATen ops, called with one list of arguments."""
    return cast(Callable[..., Any], _in_order(gm, list(fakes)))


def _in_order(gm: fx.GraphModule, fakes: list[Any], **how: Any) -> Any:
    """Inductor's code; of a graph with collectives in the order of the graph: else
    Inductor (2.13) moves ops to what reads them, behind waits, and waits to where that
    frees memory, at once, so that nothing runs beside a collective."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    waits = any("::wait_" in _name(node.target) for node in gm.graph.nodes)
    names = ("reorder_for_locality", "reorder_for_peak_memory") if waits else ()
    with config.patch(dict.fromkeys(names, False)):
        return compile_fx_inner(gm, fakes, **how)


def _name(target: Any) -> str:
    return str(target.name()) if isinstance(target, OpOverload) else ""


def shares_memory(x: torch.Tensor, group: str) -> bool:
    """Whether the ranks of a group can use PyTorch's fused ops on symmetric memory:
    GPUs of one machine. Alike on all ranks of it."""
    if x.device.type != "cuda":
        return False
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    return group_size(group) <= local == torch.distributed.get_world_size()


def fused_all_gather_matmul(
    x: torch.Tensor, ws: list[torch.Tensor], dim: int, group: str
) -> list[torch.Tensor]:
    """What is gathered, and its products."""
    import torch.distributed._symmetric_memory  # noqa: F401  (registers the op)

    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, ws, dim, group)
    return [x.contiguous() for x in (whole, *products)]


def fused_matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, op: str, dim: int, group: str
) -> Any:
    """This rank's part of the reduced product."""
    import torch.distributed._symmetric_memory  # noqa: F401  (registers the op)

    made = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, op, dim, group)
    return made.contiguous()


def _local_examples(graph: fx.Graph, given: Any) -> list[Any]:
    """Example inputs as one rank holds them. Where AOTAutograd's have that shape they
    know better: saved activations come in the strides the forward gave them."""
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    return [
        value
        if isinstance(value, torch.Tensor) and value.shape != example.shape
        else example
        for value, example in zip(values, given, strict=True)
    ]


def make_boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` in AOTAutograd's calling convention: one list of arguments."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(fn)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that compiling may consume, bodies of its regions included; parameters and
    constants are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for name, body in list(copy.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(copy, name, copy_graph(body))
    copy.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    return copy


def fake_like(x: torch.Tensor, shape: tuple[int, ...], mode: Any) -> torch.Tensor:
    """A fake tensor like ``x`` in another shape, contiguous."""
    with mode:
        made = torch.empty(shape, dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)


def trace_again(reason: str) -> None:
    """Make Dynamo, which is calling the backend, analyse the frame once more."""
    from torch._dynamo import exc

    # The first is let through from a backend, the second forgets the way it took.
    class Again(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
        pass

    raise Again(restart_reason=reason)


@contextlib.contextmanager
def as_compiling() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` holds, as it does under Dynamo, so that
    code takes the branches it takes when compiled."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def inductor_lowering() -> tuple[Any, Any, Any]:
    """Inductor's (register_lowering, Pointwise, ops): what a lowering is made of."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    return register_lowering, Pointwise, ops


def lower_collective(launch: OpOverload, wait: OpOverload) -> None:
    """Let Inductor treat an op that starts a collective, and the op on its result that
    ends it, as those of its own: from one to the other it neither frees, reuses nor
    writes the operand's buffer, and nothing reads the result."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    class Wait(ir._WaitKernel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.set_cpp_kernel_name()  # its own, not that of torch's wait

    @register_lowering(launch, type_promotion_kind=None)
    def lower_launch(x: Any, *args: Any) -> Any:
        x = ir.ExternKernel.require_contiguous(x)
        made: Any = ir._CollectiveKernel.create_out_of_place(launch, x, *args)
        return ir.TensorBox.create(made)

    @register_lowering(wait, type_promotion_kind=None)
    def lower_wait(result: Any) -> None:
        Wait.create_wait(wait, result)


def inductor_integer(ops: Any, value: Any, dtype: torch.dtype) -> Any:
    """Of an integer known when it compiles: a value of Inductor's."""
    from torch._inductor.ops_handler import OpsHandler

    # 2.11 has one op for both; in 2.13 that for indices may give it fewer bits.
    name = "value_expr" if hasattr(OpsHandler, "value_expr") else "index_expr"
    return getattr(ops, name)(value, dtype)


def triton_random_lanes() -> int:
    """How many neighbours draw from one Philox counter in Inductor's Triton kernels:
    four where it packs them (2.13), else one (2.11)."""
    from torch._inductor.codegen.triton import TritonOverrides

    packs = hasattr(TritonOverrides, "_can_use_4x_random")
    return 4 if packs else 1


def device_name(device: torch.device) -> str:
    """Of the kind of GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def own_version() -> str:
    """Of fxpar; "" of a checkout that is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version("fxpar")
    return ""


def versions() -> tuple[str, ...]:
    """Of what compiles generated kernels."""
    found = [str(torch.__version__)]
    with contextlib.suppress(PackageNotFoundError):
        found.append(version("triton"))
    return tuple(found)


def cache_dir() -> str:
    """Where Inductor keeps its caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as directory

    return directory()


def profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of this name in a profile, if one is taken."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()


def caches_disabled() -> bool:
    """Whether the user turned off all caches of torch."""
    from torch._inductor import config

    return bool(config.force_disable_caches)


def default_group() -> Any:
    """The default process group, or None before there is one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_group()


def group_size(name: str) -> int:
    """Members of the process group of a name."""
    from torch.distributed import distributed_c10d

    found: Any = distributed_c10d
    return int(found._resolve_process_group(name).size())


def group_store(name: str) -> tuple[Any, int, int]:
    """The key-value store of a process group, this rank in it, and its members."""
    from torch.distributed import distributed_c10d

    found: Any = distributed_c10d
    group = found._resolve_process_group(name)
    return found._get_process_group_store(group), group.rank(), group.size()


def group_named(name: str) -> Any:
    """The process group of a name; None if there is none."""
    from torch.distributed import distributed_c10d

    found: Any = distributed_c10d
    try:
        return found._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError):
        return None


def symmetric_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of a GPU (uint8) that other ranks may be let reach. Raises RuntimeError
    where there is none."""
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    return memory.empty(nbytes, dtype=torch.uint8, device=device)


def symmetric_meet(own: torch.Tensor, group: str) -> tuple[tuple[int, ...], Any]:
    """Let the ranks of a group reach each other's memory: addresses of all ranks' as
    they are known here, and what keeps them. Every rank calls it. Raises RuntimeError
    where one cannot."""
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    handle = memory.rendezvous(own, group)
    return tuple(handle.buffer_ptrs), (own, handle)


def symmetric_tensors(keep: Any, ranks: int) -> list[torch.Tensor]:
    """All ranks' memory (uint8) of what ``symmetric_meet`` keeps, as tensors here."""
    own, handle = keep
    return [handle.get_buffer(r, own.shape, own.dtype) for r in range(ranks)]


def write_on_stream(words: torch.Tensor, at: int, value: int) -> bool:
    """Write one of ``words`` (int32, on a GPU) when the current stream comes to it,
    visibly behind all that the stream wrote. False where torch has no op for it."""
    import torch.distributed._symmetric_memory  # noqa: F401  (registers the op)

    op = getattr(torch.ops.symm_mem, "stream_write_value32_", None)
    if op is None:
        return False
    op(words.view(torch.uint32), at, value)
    return True


def multicast_address(keep: Any) -> int:
    """Of what ``symmetric_meet`` keeps: the address through which a switch between GPUs
    reaches all ranks' memory, 0 if there is none."""
    _, handle = keep
    return int(handle.multicast_ptr)


def forget_meshes() -> None:
    """Empty DTensor's caches of results, which hold the meshes they were made on. Equal
    meshes are one to them (2.13), although another process group's names mean others.
    """
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def default_store() -> Any:
    """The key-value store that the default process group was started with."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def same_store(store: Any) -> Any:
    """The same keys through a connection of its own, so that threads do not wait for
    one another."""
    return store.clone() if hasattr(store, "clone") else store


def group_timeout(group: Any) -> datetime.timedelta:
    """How long a collective of a process group may take; NCCL's where there are two."""
    devices = sorted(group._device_types, key=lambda device: device.type != "cuda")
    for device in devices:
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # not of this machine, or a fake group
            continue
    return datetime.timedelta(minutes=30)


OpOverload = torch._ops.OpOverload


def maybe_mark_dynamic(x: torch.Tensor, dim: int) -> None:
    """Ask Dynamo to keep a dim symbolic, if the program lets it."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(x, dim)


def is_marked_dynamic(x: torch.Tensor) -> bool:
    return hasattr(x, "_dynamo_weak_dynamic_indices")


def graph_break_line(gm: fx.GraphModule) -> str | None:
    """The user's line where Dynamo broke the graph that ``gm`` ends, or None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    if not reason.user_stack:
        return str(reason.reason).splitlines()[0]
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def surrounding_ddp() -> torch.nn.Module | None:
    """The DistributedDataParallel whose forward is running."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


def on_random_op(draw: Callable[..., Any]) -> None:
    """Let ``draw(op, args, kwargs, shape, start)`` run random ops on DTensors on CPU.

    ``args[0]``: this rank's part, which begins at ``start`` of the global ``shape``.
    """
    from torch.distributed.tensor import _random
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.utils._python_dispatch import TorchDispatchMode

    class Draw(TorchDispatchMode):
        def __init__(self, more: dict[str, Any], *where: Any) -> None:
            super().__init__()
            self.more, self.where = more, where

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return draw(func, args, {**(kwargs or {}), **self.more}, *self.where)

    class Tracker(_random.OffsetBasedRNGTracker):
        def __init__(self) -> None:
            self._use_distribute_region = True
            if torch.cuda.is_available():
                self._device = torch.device("cuda", torch.cuda.current_device())
                self._device_handle = torch.cuda

        @contextlib.contextmanager
        def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[Any]:
            if spec.mesh.device_type != "cpu":
                with super()._distribute_region(spec, generator):
                    yield
                return
            _, start = compute_local_shape_and_global_offset(
                spec.shape, spec.mesh, spec.placements
            )
            with Draw({"generator": generator} if generator else {}, spec.shape, start):
                yield

    _random._rng_tracker = Tracker()


def reduce_before_item() -> None:
    """Let ``item()`` and ``bool()`` of a partial DTensor give the reduced value, where
    torch 2.13 gives this rank's summand (pytorch issue 166638): loops that end when no
    element is left, as in ``trunc_normal_``, must take as many rounds on every rank."""
    from torch.distributed.tensor import DTensor

    def item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        partial = any(placement.is_partial() for placement in x.placements)
        return op(x.full_tensor() if partial else x.to_local())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = item


def on_compile(
    backend: Callable[..., Any],
    watch: Callable[[Any, Any], tuple[Callable[[], Any], Callable[..., None]]],
) -> None:
    """Let ``watch(fn, options)`` see what ``torch.compile`` is given ``backend`` for.

    It returns two callables. The first is called before each call of the compiled
    ``fn``, and what it returns after it. The second is called with each frame that
    Dynamo met there and could not compile, and Dynamo's error; with None for the error
    of other frames. ``backend`` alone is told of graphs, and not of what has none.
    Inside DistributedDataParallel graphs stay whole: Dynamo would cut them as large as
    its buckets, for its all-reduces to begin early. Sizes that are equal by chance, as
    of the batch and of a sequence, are different symbols.
    """
    from torch._dynamo import config
    from torch._dynamo.eval_frame import (
        OptimizeContext,
        innermost_backend,
        innermost_fn,
    )
    from torch.fx.experimental import _config as shapes

    plain = OptimizeContext.__call__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()  # it calls itself for a module

    def call(self: Any, fn: Any) -> Any:
        found: Any = innermost_backend(self.callback)
        if getattr(found, "compiler_fn", found) is backend and self not in seen:
            seen.add(self)
            options = getattr(found, "kwargs", {}).get("options")
            enter, met = watch(innermost_fn(fn), options)
            whole = config._make_closure_patcher(optimize_ddp=False)
            own = shapes._make_closure_patcher(use_duck_shape=False)
            self.enter_exit_hooks += [enter, whole, own]
            frames = self.callback._torchdynamo_orig_backend
            if hasattr(frames, "_inner_convert"):  # not so of ``fullgraph=True``
                frames._inner_convert = _Overheard(frames._inner_convert, met)
        return plain(self, fn)

    OptimizeContext.__call__ = call  # type: ignore[method-assign]


class _Overheard:
    """Dynamo's conversion of frames, with what ``met`` hears of each."""

    def __init__(self, convert: Any, met: Callable[..., None]) -> None:
        self._convert, self._met = convert, met

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)

    def __call__(self, frame: Any, *args: Any, skip: int = 0, **how: Any) -> Any:
        try:
            converted = self._convert(frame, *args, skip=skip + 1, **how)
        except Exception as error:
            self._met(frame, error)
            raise
        self._met(frame, None)
        return converted


def graph_breaks() -> dict[str, int]:
    """How often Dynamo broke or gave up a graph, by its reasons."""
    from torch._dynamo.utils import counters

    return {**counters["unimplemented"], **counters["graph_break"]}


def between_graph_and_caller() -> int:
    """How many functions stand between the graph of fxpar that is running and the call
    of what ``torch.compile`` gave: 1 where the graph is that of the outermost one."""
    import sys

    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        inlined = name == "inner" and file.endswith("_dynamo/external_utils.py")
        if inlined or not _is_machinery(frame):
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _is_machinery(frame: Any) -> bool:
    """Whether a frame is of what calls modules and compiled graphs."""
    name = frame.f_globals.get("__name__", "")
    return name.startswith(("torch._dynamo", "fxpar.")) or (
        name == "torch.nn.modules.module"
    )


def current_backward() -> int:
    """Number of the backward pass that is running."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Call ``fn`` when the backward pass that is running ends, in its thread."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def recurrent_members(cls: Any) -> dict[str, Any]:
    """What a subclass of an RNN (``nn.LSTM`` and the like) needs whose parameters are
    properties: the list of weights that it hands to its kernel is made in each forward,
    of what the parameters are there, and let go after it."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            list_recurrent_weights(self)

    def nothing(self: Any) -> None:
        pass

    names = ("flatten_parameters", "_update_flat_weights")
    return {"forward": not_compiled(forward), **dict.fromkeys(names, nothing)}


def not_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as it stands, also where Dynamo is at work; it is loaded when ``fn`` is
    called first."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(fn)


def compile_inlined_only(fn: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling ``fn`` by itself, where it runs under code that is not
    compiled; in code that is compiled it is traced."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)


def lists_recurrent_weights(module: torch.nn.Module, key: str) -> bool:
    """Whether an attribute of a module is an RNN's list of its weights."""
    return isinstance(module, torch.nn.RNNBase) and key == "_flat_weights"


def list_recurrent_weights(module: Any) -> None:
    """Make that list anew, of the parameters that an RNN has by now."""
    module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]


def reduce_norms(norm: Callable[..., Any]) -> None:
    """Let ``norm(x, order, dims, keepdim, dtype)`` compute norms of DTensors."""
    from torch.distributed.tensor import DTensor

    def vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        defaults = (2.0, None, False)
        x, order, dims, keepdim = (*args, *defaults[len(args) - 1 :])[:4]
        return norm(x, order, dims, keepdim, kwargs.get("dtype"))

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.linalg_vector_norm.default] = vector_norm


def _define_messages() -> None:
    """Functional sends and receives where torch has none (2.11), by the same names."""
    import torch.distributed as dist

    c10d: Any = torch.ops._c10d_functional
    if not dist.is_available() or hasattr(c10d, "isend"):
        return
    lib = torch.library.Library("_c10d_functional", "FRAGMENT")
    found: Any = dist.distributed_c10d

    def noted(work: Any, tensor: torch.Tensor) -> torch.Tensor:
        torch._C._distributed_c10d._register_work(tensor, work)
        return tensor

    def isend(tensor: torch.Tensor, dst: int, tag: int, group: str) -> torch.Tensor:
        # A copy: compiled code does not know that it must keep what is sent.
        given = [tensor.clone(memory_format=torch.contiguous_format)]
        work = found._resolve_process_group(group).send(given, dst, tag)
        return noted(work, tensor.new_empty(0))

    def irecv(tensor: torch.Tensor, src: int, tag: int, group: str) -> torch.Tensor:
        made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        work = found._resolve_process_group(group).recv([made], src, tag)
        return noted(work, made)

    def sent(tensor: torch.Tensor, dst: int, tag: int, group: str) -> torch.Tensor:
        return tensor.new_empty(0)

    def received(tensor: torch.Tensor, src: int, tag: int, group: str) -> torch.Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    for fn, fake, peer in ((isend, sent, "dst"), (irecv, received, "src")):
        name, rest = fn.__name__, "int tag, str group_name"
        lib.define(f"{name}(Tensor tensor, int {peer}, {rest}) -> Tensor")
        lib.impl(name, fn, "CompositeExplicitAutograd")
        lib.impl(name, fake, "Meta")
        fx.node.has_side_effect(getattr(c10d, name).default)
    _KEPT.append(lib)


_KEPT: list[Any] = []  # libraries: their ops last as long as they do
_define_messages()


def record_overflow(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: torch.Tensor
) -> None:
    """Tell a scaler whether gradients were not finite, 1.0 or 0.0, for ``update()``."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found.device: found}


def newton_schulz() -> Callable[..., Any]:
    """``iterate(gradient, *settings)``, by which ``torch.optim.Muon`` makes a matrix
    orthogonal."""
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz


def replace_newton_schulz(iterate: Callable[..., Any]) -> None:
    """Let ``torch.optim.Muon`` call this."""
    from torch.optim import _muon

    _muon._zeropower_via_newtonschulz = iterate
