"""Makes and reads tensors that stand for nodes while a graph is traced, and copies such
nodes, with fake values on memory of their own.

A value is a fake tensor, or functionalization's tensor around one where ops are made
functional; it may be the part of a DTensor. Its node is that of the fake tensor. In:
values, and nodes as they were traced. Out: values, and copies in a graph. Never:
computes on real data, or writes to the nodes that it copies.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar._torch.fake import new_fake
from fxpar._torch.objects import memory_of, tensors_in


def fake_on(storage: Any, x: Any) -> Any:
    """Return a fake tensor like ``x`` on some memory."""
    meta = torch.empty(0, dtype=x.dtype, device="meta")
    meta.set_(storage, x.storage_offset(), x.shape, x.stride())
    return new_fake(x.fake_mode, meta, x.fake_device)


def fake_like(x: Any) -> tuple[Any, Any]:
    """Return a fake tensor like ``x`` on memory of its own, as large, and the
    memory."""
    shape, stride, size = x.shape, x.stride(), x.untyped_storage().nbytes()
    meta = torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")
    own = meta.untyped_storage()
    if own.nbytes() != size or x.storage_offset():
        own = torch.UntypedStorage(size, device="meta")
        return fake_on(own, x), own
    return new_fake(x.fake_mode, meta, x.fake_device), own


def is_plain(x: Any) -> bool:
    """Return whether a value is no tensor, or a strided one of known sizes and
    strides."""
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided or x.is_complex() or x.is_quantized:
            return False
        return all(type(n) is int for n in (*x.shape, *x.stride(), x.storage_offset()))
    return x is None or isinstance(x, (int, float, bool))


@contextlib.contextmanager
def untraced() -> Iterator[Any]:
    """Trace nothing that is done to tensors inside; yield the function that makes a
    fake tensor a value."""
    from torch._subclasses.functional_tensor import PythonFunctionalizeAPI
    from torch.utils._python_dispatch import _disable_current_modes

    mode = functional_mode()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield (
            (lambda x: x) if mode is None else PythonFunctionalizeAPI(mode).wrap_tensors
        )


def functional_mode() -> Any:
    """Return the mode that makes ops functional; None where there is none."""
    from torch.utils._python_dispatch import _detect_infra_mode

    return _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def modes() -> tuple[Any, ...]:
    """Return what the meaning of ops depends on in addition to their operands; first
    whether autograd records."""
    sdp = torch.backends.cuda
    autocast = (
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_cache_enabled(),
        *autocast,
        *(sdp.flash_sdp_enabled(), sdp.math_sdp_enabled()),
        *(sdp.mem_efficient_sdp_enabled(), sdp.cudnn_sdp_enabled()),
    )


def tokens() -> dict[Any, Any]:
    """Return the tokens of the effects that were kept in order so far."""
    mode = functional_mode()
    return {} if mode is None else dict(mode._tokens)


def tracer() -> Any:
    """Return the tracer that makes nodes of ops; None where there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def is_value(x: Any) -> bool:
    """Return whether ``x`` is a fake tensor, functional where functionalization is
    on."""
    from torch._subclasses.fake_tensor import FakeTensor

    if functional_mode() is not None:
        return is_functional(x)
    return type(x) is FakeTensor


def is_functional(x: Any) -> bool:
    """Return whether ``x`` is a tensor of functionalization."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return type(x) is FunctionalTensor


def part_of(x: Any) -> Any:
    """Return the one tensor that a DTensor holds; another value as it is."""
    from torch.distributed.tensor import DTensor

    return x._local_tensor if isinstance(x, DTensor) else x


def layout_of(x: Any) -> Any:
    """Return the placements and the mesh of a DTensor; None for another value."""
    return None if part_of(x) is x else (x.placements, x.device_mesh)


def around(part: Any, like: Any) -> Any:
    """Return a DTensor that is laid out as ``like`` and holds ``part``; ``part`` itself
    if ``like`` is none."""
    if part is None or part_of(like) is like:
        return part
    names, context = like.__tensor_flatten__()
    inner = {name: getattr(like, name) for name in names} | {"_local_tensor": part}
    with untraced():
        return type(like).__tensor_unflatten__(
            inner, context, like.shape, like.stride()
        )


def fake_of(x: Any) -> Any:
    """Return the fake tensor that stands for a value now."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.from_functional(x) if is_functional(x) else x


def writes_to(x: Any) -> int:
    """Return how often a value, or one that shares its memory, was written to."""
    if is_functional(x):
        return torch._functionalize_mutation_counter(x.elem)
    return x._version


def form_of(x: Any) -> Any:
    """Return what of a value, except its elements, an op may change: storage, shape,
    strides and whether it requires grad."""
    moves = 0
    if is_functional(x):
        moves = torch._functionalize_storage_changed_counter(x.elem)
    return moves, tuple(x.shape), x.stride(), x.requires_grad


def write(x: Any, fake: Any) -> None:
    """Let a functional tensor stand for another fake tensor, as if an op had written
    that to it."""
    x.replace_(fake)
    x.commit_update()
    x.sync()


def node_of(x: Any, tracer: Any) -> fx.Node | None:
    """Return the node that a value stands for; None for a constant."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    slot = get_proxy_slot(fake_of(x), tracer, None)
    return None if slot is None else slot.proxy.node


def fake_for(node: fx.Node, tracer: Any) -> Any:
    """Return a fake tensor that stands for a node."""
    from torch.fx.experimental.proxy_tensor import _ProxyTensor, set_proxy_slot

    value = node.meta["val"]
    fake = fake_on(value.untyped_storage(), value)
    set_proxy_slot(fake, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))
    return fake


def value_of(node: fx.Node | None, tracer: Any) -> Any:
    """Return a value that stands for a node."""
    if node is None:
        return None
    with untraced() as value:
        return value(fake_for(node, tracer))


def last_number() -> int:
    """Return autograd's number of the last node so far."""
    from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

    return int(_get_sequence_nr()) - 1


def skip_numbers(count: int) -> None:
    """Let autograd number its next node as if it had numbered ``count`` more."""
    with untraced(), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = torch.empty(0).requires_grad_()
        for _ in range(count):
            x.view_as(x)


@dataclass(frozen=True)
class TracedNode:
    """Is a node as it was traced."""

    node: fx.Node  # the node that others read; it may have been erased since
    op: str  # as in the node
    target: Any  # as in the node
    args: Any  # as in the node: it names nodes as traced
    kwargs: Any  # as ``args``, by name
    meta: dict[str, Any]  # as in the node, without ``from_node``

    @staticmethod
    def of(node: fx.Node) -> TracedNode:
        meta = dict(node.meta)
        meta.pop("from_node", None)
        return TracedNode(node, node.op, node.target, node.args, node.kwargs, meta)

    def copy(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Add a copy of the node, which reads what ``copies`` has in place of its
        operands; then enter it in ``copies``. It shares its value with the node."""

        def mapped(node: fx.Node) -> fx.Node:
            return copies.get(node, node)

        args, kwargs = fx.node.map_arg((self.args, self.kwargs), mapped)
        name = None
        if isinstance(self.target, torch._ops.OpOverload):
            name = graph._target_to_str(self.target.overloadpacket.__name__)
        copy = graph.create_node(self.op, self.target, args, kwargs, name)
        copies[self.node] = copy
        copy.meta = dict(self.meta)
        return copy


def last_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def traced_since(last: fx.Node, graph: fx.Graph) -> list[TracedNode]:
    """Return the nodes after ``last``, in order."""
    traced = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        traced.append(TracedNode.of(node))
    return traced[::-1]


@contextlib.contextmanager
def taken_out(graph: fx.Graph) -> Iterator[None]:
    """Remove the nodes that are added inside from the graph at the end, and free their
    names."""
    last, names = last_node(graph), graph._graph_namespace
    before = names._used_names.copy(), names._base_count.copy()
    yield
    for traced in reversed(traced_since(last, graph)):
        graph.erase_node(traced.node)
        names._obj_to_name.pop(traced.node, None)
    names._used_names, names._base_count = before


class Memories:
    """Makes fake tensors like others; copies share memory where the originals do."""

    def __init__(self, stand_ins: Mapping[fx.Node, fx.Node]) -> None:
        """Start with memory that exists. ``stand_ins``: node with a value -> the node
        whose memory is in its place."""
        self._storages: dict[int, Any] = {}
        for node, other in stand_ins.items():
            values = (tensors_in(n.meta.get("val")) for n in (node, other))
            for x, y in zip(*values, strict=False):
                self._storages.setdefault(memory_of(x), y.untyped_storage())
        self._nodes = list(stand_ins)  # their memory lives, and keeps its number

    def like(self, value: Any) -> Any:
        """Return a value like a node's, on the memory in its place."""
        if isinstance(value, torch.Tensor):
            number = memory_of(value)
            if number not in self._storages:
                fake, own = fake_like(value)
                self._storages[number] = own
                return fake
            return fake_on(self._storages[number], value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.like(x) for x in value)
        return value


def can_be_copied(nodes: Sequence[TracedNode]) -> bool:
    """Return whether values are plain tensors, of fixed sizes, and no graphs are
    called."""
    for traced in nodes:
        value = traced.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        if not all(map(is_plain, values)):
            return False
        if isinstance(traced.target, torch._ops.HigherOrderOperator):
            return False
    return True


# Metadata of a node that comes from the user's code.
_USERS = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def users_texts(nodes: Sequence[fx.Node]) -> list[dict[str, str]]:
    """Return the texts of the user's metadata at each node, by name, and at the nodes
    of bodies."""
    return [
        {name: repr(node.meta[name]) for name in _USERS if name in node.meta}
        for node in _with_bodies(nodes)
    ]


def users_metadata(
    texts: Sequence[dict[str, str]], nodes: Sequence[fx.Node]
) -> dict[str, dict[str, Any]] | None:
    """Return name of metadata -> its text at a node -> its value at the one of
    ``nodes`` in the same place; None if equal texts have different values there.
    ``texts``: of the former, by ``users_texts``."""
    renamed: dict[str, dict[str, Any]] = {name: {} for name in _USERS}
    for of_node, node in zip(texts, _with_bodies(nodes), strict=True):
        for name, text in of_node.items():
            value = node.meta.get(name)
            other = renamed[name].setdefault(text, value)
            if other is not value and repr(other) != repr(value):
                return None
    return renamed


def _with_bodies(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield nodes, and after one that holds a body the nodes of that."""
    for node in nodes:
        yield node
        body = attribute(node) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from _with_bodies(list(body.graph.nodes))


def attribute(node: fx.Node) -> Any:
    """Return the value of a ``get_attr``."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
