"""Calls AOTAutograd: traces graphs of a program with its backward, and compiles them.

In: a module or a Dynamo graph, and examples. Out: graphs with fake values, or compiled
code; and what a descriptor says of an input or output of a graph. Never: a setting of
torch changed after a call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from fxpar._fast.cpp_kernels import BEHIND_ALL, probe_in_background
from fxpar._fast.switch import is_taken
from fxpar._torch.checkpoints import GradModeRead
from fxpar._torch.dynamo import not_compiled
from fxpar._torch.fake import failures_unlogged, fake_like, new_fake_mode
from fxpar._torch.inductor import (
    _in_order,
    _local_examples,
    _take_strides,
    decompositions,
    keep_scales,
    shortcuts,
)
from fxpar._torch.loops import calls_rewritten
from fxpar._torch.node_texts import is_complete
from fxpar._torch.traced_once import FindKinds, traced_once
from fxpar._torch.version import own_version

# A checkpointed region, as Dynamo writes it.
CHECKPOINT = "higher_order::tag_activation_checkpoint"
# Metadata key of its body, for the user's choice of the ops to save or to recompute.
CHOOSES_SAVED = "_checkpoint_context_fn"


def higher_order_name(target: Any) -> str:
    """Return ``"higher_order::cond"``, for example, for an op that runs graphs; "" for
    others."""
    from torch._ops import HigherOrderOperator

    if not isinstance(target, HigherOrderOperator):
        return ""
    return f"higher_order::{target.name()}"


def gives_gradients(joint: Any, captured: Sequence[Any]) -> tuple[bool, ...]:
    """Return for each captured value whether the backward of flex_attention has its
    gradient among its results: on torch 2.13 always, on later ones if it has one in
    ``joint``."""
    module = importlib.import_module("torch._higher_order_ops.flex_attention")
    mask = getattr(module, "_captured_grad_buffer_mask", None)
    return (True,) * len(captured) if mask is None else mask(joint, len(captured))


def export_joint(
    stack: Any, module: torch.nn.Module, args: Any, *, grad: bool
) -> fx.GraphModule:
    """Return the joint (``grad``) or inference graph of a module on fake arguments,
    after Inductor's decompositions; placeholders and output carry ``meta["desc"]``."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with torch.set_grad_enabled(grad), calls_rewritten(), failures_unlogged():
        joint = aot_export_joint_with_descriptors(
            stack, module, args, decompositions=decompositions()
        )
    return joint.graph_module


_LOCAL = "_local_tensor"  # the one tensor of a DTensor


def descriptor(desc: Any) -> tuple[str, Any]:
    """Return the (kind, payload) of an AOTAutograd descriptor.

    Inputs: ("parameter", name), ("buffer", name), ("input", index), ("tangent", output
    desc), ("state", "token") for what keeps effects in order, ("state", None). Outputs:
    ("output", index), ("gradient", input desc), ("mutation", input desc), ("state",
    None).
    """
    from torch._functorch._aot_autograd import descriptors as d

    if not _is_bare(desc):
        return "state", None
    if isinstance(desc, (d.ForwardTokenAOTInput, d.BackwardTokenAOTInput)):
        return "state", "token"
    desc = bare(desc)
    kinds = {
        d.ParamAOTInput: ("parameter", "target"),
        d.BufferAOTInput: ("buffer", "target"),
        d.PlainAOTInput: ("input", "idx"),
        d.TangentAOTInput: ("tangent", "output"),
        d.PlainAOTOutput: ("output", "idx"),
        d.GradAOTOutput: ("gradient", "grad_of"),
        d.InputMutationAOTOutput: ("mutation", "mutated_input"),
    }
    kind, field = kinds.get(type(desc), ("state", ""))
    return kind, getattr(desc, field) if field else None


def _is_bare(desc: Any) -> bool:
    """Return whether a descriptor is of a tensor, or of the tensor inside a DTensor."""
    return getattr(desc, "attr", _LOCAL) == _LOCAL


def bare(desc: Any) -> Any:
    """Return the descriptor of a DTensor, given that of its local tensor; others as
    they are."""
    from torch._functorch._aot_autograd import descriptors as d

    parts = (d.SubclassGetAttrAOTInput, d.SubclassGetAttrAOTOutput)
    return desc.base if isinstance(desc, parts) and desc.attr == _LOCAL else desc


def written_input(desc: Any) -> Any:
    """Return the descriptor of a new value of the input that ``desc`` describes."""
    from torch._functorch._aot_autograd import descriptors as d

    return d.InputMutationAOTOutput(bare(desc))


class GradientsAccumulated(RuntimeError):
    """Says that a program that is traced accumulates gradients in ``.grad``."""


@contextlib.contextmanager
def refusing_accumulation() -> Iterator[None]:
    """Let ``torch.autograd.backward`` raise GradientsAccumulated inside.

    A graph has no place for such gradients, and the tensors that would hold them may be
    the caller's; ``torch.autograd.grad`` is not affected.
    """
    from unittest import mock

    run = cast(Any, torch.autograd)._engine_run_backward

    def refusing(*args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if accumulate_grad:
            raise GradientsAccumulated
        return run(*args, accumulate_grad=accumulate_grad, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", refusing):
        yield


def untraceable(error: BaseException) -> str | None:
    """Return why a program cannot be one graph of fixed shapes: it reads a "value", a
    "shape" depends on data, it writes to a "constant" or, by an op that is not
    functional, to a "list" of tensors, it accumulates a "gradient", a reentrant
    checkpoint reads the "grad mode", or it makes a "sparse" tensor of rows or blocks.
    None if ``error`` says none of these."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = str(error)
    if isinstance(error, GradientsAccumulated):
        return "gradient"
    if isinstance(error, GradModeRead):
        return "grad mode"
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return "value"
    if isinstance(error, DynamicOutputShapeException):
        return "shape"
    if isinstance(error, AssertionError) and "entirely functional graph" in text:
        return "constant"
    if isinstance(error, RuntimeError) and "non-functional tensor with a fun" in text:
        return "list"
    if isinstance(error, RuntimeError) and "layout_impl is only" in text:
        return "sparse"
    return None


def failed_node(error: BaseException) -> str | None:
    """Return the name of the node of a graph that failed while the graph was traced."""
    name = re.search(r"While executing %(\w+) :", str(error))
    return name[1] if name else None


def reparametrize(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a context in which a module uses ``tensors`` as its parameters and
    buffers."""
    from torch.nn.utils.stateless import _reparametrize_module

    # A module that is in two places is swapped twice: it is restored in reverse.
    return _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True)


@contextlib.contextmanager
def attributes_kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore, at the end, the attributes, parameters and buffers that modules had
    before."""
    namespaces = [
        (names, dict(names))
        for each in module.modules()
        for names in (vars(each), each._parameters, each._buffers, each._modules)
    ]
    try:
        yield
    finally:
        for names, before in namespaces:
            for name in names.keys() - before.keys():
                del names[name]
            names.update(before)


def trace_flat(fn: Callable[..., Any], args: Any, mode: Any) -> fx.GraphModule:
    """Return what ``fn`` does with fake tensors of ``mode`` and numbers, as one ATen
    graph: it writes in place where ``fn`` does; backward passes inside are ops of it.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    with (
        mode,
        preserve_node_meta(),
        enable_python_dispatcher(),
        calls_rewritten(),
        failures_unlogged(),
    ):
        return make_fx(fn)(*args)


def nodes_being_traced() -> Any:
    """Return the nodes traced so far, inside ``trace_flat``."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    proxies = get_proxy_mode()
    assert proxies is not None, "nothing is being traced"
    return proxies.tracer.graph.nodes


def compile_fx(
    gm: fx.GraphModule,
    examples: Any,
    *,
    joint_pass: Callable[[fx.GraphModule], fx.Graph | None] | None = None,
    lower: Callable[[fx.Graph, str, Callable[[str | None], Any]], Any] | None = None,
    inner: Callable[..., Any] | None = None,
    key: str = "",
    cached: bool = False,
    local_border: bool = False,
    symbolic: bool = False,
    repeated: FindKinds | None = None,
    inductor_settings: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Run Inductor's ``compile_fx`` with ``joint_pass`` on the joint (or inference)
    graph.

    ``joint_pass(gm)`` returns the graph to compile instead, with the shapes one rank
    holds; None leaves the graph. ``lower(graph, "forward", generate)`` returns what
    runs each graph (forward, backward): it may change the graph in place, then calls
    ``generate(text)``, Inductor's codegen (see ``_in_order``) or
    ``inner(gm, examples)`` in its place. A backward is lowered when it is first called,
    unless ``cached`` or ``symbolic``. ``key`` enters the keys of torch's caches.
    ``cached``: a program that was compiled under it before is taken from AOTAutograd's
    cache; nothing is called then. A program that was not is left there, and so its
    backward is compiled with its forward. ``symbolic``: ``examples`` are fakes with
    symbols for sizes that are to stay open. ``repeated``: finds layers that repeat, one
    of which is traced for all. ``inductor_settings``: what the user asks of Inductor,
    by name. ``local_border``: results have the shapes one rank holds, so their
    gradients may not be forced into the shapes traced.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass

    keep_scales()
    if joint_pass is None:
        graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
        of_autograd: dict[str, Any] = (
            {} if all(map(is_complete, graphs)) else {"enable_autograd_cache": False}
        )
        # Torch (2.13) draws other numbers in a backward that computes a body again.
        with functorch_config.patch(of_autograd), calls_rewritten():
            chosen = {**(inductor_settings or {})}
            plain: Any = inductor(gm, examples, config_patches=chosen)
        return cast(Callable[..., Any], plain)
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

    def compile_inner(graph: fx.GraphModule, examples: Any, **kwargs: Any) -> Any:
        local = _local_examples(graph.graph, examples)
        if "get_decomp_fn" in kwargs:  # in the key of Inductor's cache, by its name
            kwargs["get_decomp_fn"] = decompositions

        def generate(text: str | None) -> Any:
            graph.recompile()
            if inner is not None:
                return inner(graph, local)
            return _in_order(graph, local, text, **kwargs)

        if lower is None:
            return generate(None)
        _take_strides(graph.graph, local)
        which = "backward" if kwargs.get("is_backward") else "forward"
        return lower(graph.graph, which, generate)

    # A hit in AOTAutograd's cache skips the joint pass, and with it the agreement of
    # the ranks. Inductor's own cache, keyed by the bound graph, is always in use.
    settings = {"enable_autograd_cache": cached}
    if local_border:
        settings["guess_tangent_strides_as_outputs"] = False
    if symbolic or cached:  # a backward is compiled with its forward
        settings["force_non_lazy_backward_lowering"] = True
    with (
        functorch_config.patch(settings),
        _views_recomputed(),
        _objects_of_generators(),
        traced_once(repeated if is_taken("traced_once") else None),
        failures_unlogged(),
        calls_rewritten(),
        _backwards_repeatable(),
        shortcuts(BEHIND_ALL),
    ):
        tensors = [x for x in examples if isinstance(x, torch.Tensor)]
        if inner is None and all(x.device.type == "cpu" for x in tensors):
            probe_in_background()
        compiled = inductor(
            gm,
            examples if symbolic else with_symbols(gm, examples),
            inner_compile=compile_inner,
            config_patches={
                **(inductor_settings or {}),
                "joint_custom_pre_pass": Hook(),
            },
            decompositions=decompositions(),
            ignore_shape_env=not symbolic,  # known sizes become no symbols
        )
    return cast(Callable[..., Any], compiled)


def _backwards_repeatable() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no backward is compiled to write over what its forward
    saved, so that it can run again (``retain_graph=True``); peaks of memory are the
    same."""
    from unittest import mock

    from torch._functorch._aot_autograd import graph_compile

    # The setting ``donated_buffer`` is read again when a backward runs, in user code.
    name = "collect_bw_donated_buffer_idxs"
    return mock.patch.object(graph_compile, name, lambda *_: [])


_VIEWS: list[Any] = []  # op packets


def recompute_as_view(op: Any) -> None:
    """Let AOTAutograd's partitioner treat ``op`` as a view, which costs nothing to
    recompute."""
    if op not in _VIEWS:
        _VIEWS.append(op)


def _views_recomputed() -> Any:
    """Return a context in which AOTAutograd's partitioner recomputes ``_VIEWS`` as
    views."""
    from unittest import mock

    from torch._functorch import partitioners

    default = partitioners.get_default_op_list

    def with_views() -> Any:
        ops = default()
        for kind in (ops.view_ops, ops.recomputable_ops, ops.fusible_ops):
            kind.update(_VIEWS)
        return ops

    return mock.patch.object(partitioners, "get_default_op_list", with_views)


def _objects_of_generators() -> Any:
    """Return a context in which states of random generators that a forward saves come
    with its tensors. Before 2.14 AOTAutograd counts saved objects, as the DeviceMesh of
    a DTensor, from the end, but puts such states after them."""
    if torch.__version__ >= "2.14":
        return contextlib.nullcontext()
    from unittest import mock

    from torch._functorch import partitioners

    default = partitioners.functionalize_rng_ops

    def in_order(
        joint: fx.GraphModule,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        symbols: int,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        is_object = getattr(partitioners, "is_opaque_node", lambda node: False)
        inputs = backward.graph.find_nodes(op="placeholder")
        objects = [x for x in inputs if is_object(x) and "tangent" not in x.name]
        modules = default(joint, forward, backward, symbols + len(objects))
        for node in backward.graph.find_nodes(op="placeholder"):
            if objects and node not in inputs:  # a state
                objects[0].prepend(node)
        backward.recompile()
        return modules

    return mock.patch.object(partitioners, "functionalize_rng_ops", in_order)


def with_symbols(gm: fx.GraphModule, examples: Sequence[Any]) -> Sequence[Any]:
    """Return examples as fakes among which symbols can be made: Inductor asks for that
    to keep what it compiled on disk, and to lower loops."""
    from torch._subclasses.fake_tensor import FakeTensor

    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    names = {higher_order_name(n.target) for graph in graphs for n in graph.nodes}
    loops = {f"higher_order::{op}" for op in ("while_loop", "scan", "map_impl")}
    mode = new_fake_mode(symbols=True, scalars=bool(names & loops))

    def fake(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            return fake_like(x, tuple(x.shape), mode)
        if isinstance(x, torch.Tensor):
            return mode.from_tensor(x, static_shapes=True)
        return x

    return list(map(fake, examples))


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Run ops inside as in compiled code, though compiling goes on around them: on real
    tensors, and without Python's dispatcher, for which gloo's threads would need the
    interpreter's lock, which a wait for them holds."""
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher():
        yield


@contextlib.contextmanager
def as_compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` hold inside, and distributions check their
    arguments only if asked to, as under Dynamo, so that code takes the branches it
    takes when compiled."""
    from unittest import mock

    validates = mock.patch.object(
        torch.distributions.Distribution, "_validate_args", False
    )
    with validates, mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        yield


def current_backward() -> int:
    """Return the number of the backward pass that is running."""
    return torch._C._current_graph_task_id()


def wrap_backward(
    outputs: Sequence[Any],
    run_around: Callable[[Any, Sequence[Any], Callable[[], Any]], Any],
) -> Any:
    """Run ``run_around(node, gradients, run)`` as each backward of a compiled graph,
    which gave these outputs: ``run()`` returns the gradients of the graph's arguments,
    ``node`` is autograd's. Return the class of autograd's nodes for the graph; None if
    it has no backward."""
    node = _backward_of(outputs)
    if node is None:
        return None
    function = node._forward_cls
    plain = function.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        is_boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        return run_around(
            ctx,
            gradients[0] if is_boxed else gradients,
            functools.partial(plain, ctx, *gradients),
        )

    function.backward = staticmethod(not_compiled(backward))
    return function


def before_backward(outputs: Sequence[Any], do: Callable[[], None]) -> None:
    """Call ``do()`` before each backward of the call of a graph that gave
    ``outputs``."""
    node = _backward_of(outputs)
    if node is not None:
        node.register_prehook(not_compiled(lambda _: do()))


def _backward_of(outputs: Sequence[Any]) -> Any:
    """Return autograd's node of the compiled graph that gave outputs; None if it has no
    backward."""
    nodes = (x.grad_fn for x in outputs if isinstance(x, torch.Tensor))
    functions = ((node, getattr(node, "_forward_cls", None)) for node in nodes)
    return next((node for node, of in functions if hasattr(of, "_aot_id")), None)


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Call ``fn`` when the backward pass that is running ends, in its thread."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def surrounding_backward() -> Any:
    """Return, at the end of a backward, the node of autograd that it ran in, as in a
    reentrant checkpoint; None if it is the outermost one."""
    return torch._C._current_autograd_node()


def accumulating(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradient a node of autograd accumulates in the backward
    that is running; None if it accumulates none."""
    leaf = getattr(node, "variable", None)
    if leaf is None:
        return None
    try:
        is_run = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of ``torch.autograd.grad``
        return None
    return leaf if is_run else None


def leaves_under(
    x: torch.Tensor, is_known: Callable[[Any], bool]
) -> Iterator[torch.Tensor]:
    """Yield the leaves that a tensor was computed from, in an order that depends only
    on how it was computed; leaves under nodes of autograd that are known are left out.
    """
    stack, seen = [x.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or is_known(node):
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack += [next_node for next_node, _ in reversed(node.next_functions)]
