"""Reads from a local graph what one rank launches (kernels, collectives, waits, in
order) and what it sends.

In: a local graph. Out: ``Launches``, data that ``simulate_step`` times and adds up.
``cost.fused_kernels`` decides which ops are one kernel; this module, which ops are
collectives and waits, and which lines must be equal on all ranks.

For a lowered and scheduled graph, before ``bucket_collectives`` joins small ones, it
also gives facts of a plan: the collectives in the order in which they run, with those
of the forward that the backward repeats (gathers of parameters at rest, checkpointed
ones) in both places; and the reshards that they belong to. Never changes the graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.fake import is_data_dependent
from fxpar._torch.objects import tensors_in
from fxpar.errors import PlanError
from fxpar.graph import exact_ops
from fxpar.graph.builder import ORIGINS
from fxpar.graph.custom_ops import GROUP_PREFIX, group_axes, group_of_call
from fxpar.graph.pipeline_ops import CROSSINGS
from fxpar.passes.lower import LOWERINGS
from fxpar.sharding.cost.fused_kernels import KernelReader, Launches, TensorView
from fxpar.sharding.cost.op import bytes_of, nbytes_of
from fxpar.sharding.cost.recompute import phases
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Collective
from fxpar.sharding.program import backward_of, user_line
from fxpar.sharding.row_moves import Exchange, message

if TYPE_CHECKING:  # routes take NumPy, which kernels do without
    from fxpar.sharding.reshard.route import Reshard


c10d = torch.ops._c10d_functional
ours = torch.ops.fxpar

# Ops that exchange exact numbers of rows, known when they run.
EXACT = {exact_ops.SEND, exact_ops.RETURN}
# Collective of a local graph -> its kind in ``reshard.steps``.
KINDS: dict[Any, str] = {
    op: kind for kind, lowering in LOWERINGS.items() for op in lowering.emulations()
} | dict.fromkeys(EXACT, "all_to_all")
# Op that fuses a matmul with a collective -> the collective's kind.
PRODUCTS = {
    ours.gather_matmul.default: "all_gather",
    ours.matmul_scatter.default: "reduce_scatter",
}
WAIT = c10d.wait_tensor.default


def launches_of(graph: fx.Graph, *, fused: bool = True) -> Launches:
    """Return the launches of a local graph; ``fused=False``: a kernel for each op.

    Raises PlanError for an unknown collective, or one whose group is not named by axes,
    as in a bound graph.
    """
    reader = _LocalReader(fused)
    backward = backward_of(graph)
    for i, node in enumerate(graph.nodes):
        reader.step(node, float(i), node in backward)
    return reader.launches()


def launches_among(nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> Launches:
    """Return the launches of some nodes of one phase, given in order, as if only these
    were compiled, to return ``results``. The graph may be bound."""
    reader, inside = _LocalReader(is_bound=True), set(nodes)
    reads = (read for node in nodes for read in node.all_input_nodes)
    for node in dict.fromkeys(reads):
        if node not in inside:
            reader.add_inputs(node)
    for i, node in enumerate(nodes):
        reader.step(node, float(i), False)
    reader.returned(results)
    return reader.launches()


def is_collective(node: fx.Node) -> bool:
    """Return whether a node is a collective; a ``move_rows`` is one if some rows change
    ranks."""
    moves = node.target is ours.move_rows.default
    return node.target in KINDS and not (moves and not message_of(node)[1])


def communicates(node: fx.Node) -> bool:
    """Return whether a node is a collective, of any graph, or a message of torch's."""
    is_started = "c10d" in str(node.target) or is_collective(node)
    return is_started and node.target is not WAIT


def message_of(node: fx.Node) -> tuple[str, float]:
    """Return (kind, bytes before) of the collective that exchanges the rows of a
    ``fxpar::move_rows`` (``row_moves.message``)."""
    x, dim, _, text, mesh, _ = node.args
    value = x.meta["val"]
    others = math.prod(n for d, n in enumerate(value.shape) if d != dim)
    row = others * value.dtype.itemsize
    return message(Exchange.parse(text), Mesh.parse(mesh), row)


@cache
def _role_of(target: Any) -> str:
    """Return what a target does in addition to computing: "waits", "sends", "unknown"
    for other functional collectives, or ""."""
    if target is WAIT:
        return "waits"
    if target in KINDS:
        return "sends"
    namespace = getattr(target, "namespace", "")
    return "unknown" if namespace == "_c10d_functional" else ""


class _LocalReader(KernelReader):
    """Reads the nodes of a local graph, including collectives; ``is_bound``: their
    groups may be process groups of a rank."""

    def __init__(self, fused: bool = True, *, is_bound: bool = False) -> None:
        super().__init__(fused)
        self.is_bound = is_bound

    def call(self, node: fx.Node) -> list[TensorView | None]:
        role = _role_of(node.target)
        if role == "waits":
            return self._wait(node)
        if role == "sends" and is_collective(node):
            return self._collective(node)
        if role == "unknown":
            raise PlanError(f"cannot simulate {node.target} ({node.name})")
        return super().call(node)

    def _wait(self, node: fx.Node) -> list[TensorView | None]:
        source = self.values[node.args[0]]
        for value in source:
            assert value is not None and value.buffer is not None
            of = value.buffer.late
            if of is not None:
                self.settle(of, [node], self.at)
        return source

    def _collective(self, node: fx.Node) -> list[TensorView | None]:
        group = group_of_call(node)
        has_axes = group.startswith(GROUP_PREFIX)
        if not (has_axes or self.is_bound):
            raise PlanError(
                f"{node.name} runs on group {group!r}, which names no mesh axes",
                fix="simulate the local graph, before it is bound to process groups",
            )
        launch = self.alone_launch(node, KINDS[node.target])
        launch.axes = group_axes(group) if has_axes else (group,)
        launch.before = sum(self.read(launch, v) for v in self.operands(node))
        views = self.make(node, launch)
        launch.after = sum(buffer.nbytes for buffer in launch.makes)
        if node.target is ours.move_rows.default:
            launch.kind, sent = message_of(node)
            launch.before = launch.after = round(sent)
        if node.target in EXACT:
            launch.before = launch.after = _bytes_sent(node)
        for buffer in launch.makes:
            buffer.late = launch
        return views


def crossings(
    graph: fx.Graph, *, even: bool = True, among: Collection[fx.Node] | None = None
) -> list[str]:
    """Return the collectives of a graph in order, a line for each, with the op that it
    is for: two of one size in another order would mix values. The lines must be equal
    on all ranks that run the graph together, whatever else they compute. Unless
    shards are ``even``, sizes are equal only within a group, and are left out; so are
    those of uneven exchanges. ``among``: nodes to read, of a graph whose like at other
    places may have other ops, which are left out; None: all."""
    out: list[str] = []
    for node in graph.nodes if among is None else among:
        if node.target is _torch.inductor.invoke_subgraph():
            body: Any = getattr(graph.owning_module, str(node.args[1]))
            out += crossings(body.graph, even=even)
        if not communicates(node):
            continue
        exchanges = node.target is c10d.all_to_all_single.default
        is_uneven = exchanges and len({*node.args[1], *node.args[2]}) > 1
        with_sizes = even and not is_uneven and node.target not in EXACT
        operands = [
            f"{value.dtype}{_sizes(value) if with_sizes else ''}".removeprefix("torch.")
            for value in tensors_in([n.meta.get("val") for n in node.all_input_nodes])
        ]
        name = str(node.target).removeprefix("_c10d_functional.")
        meta = node.meta if among is None else {}
        origin = meta.get(ORIGINS) or meta.get("fxpar_origin")
        line = f"{name} of {', '.join(operands)}"
        out.append(f"{line} for {origin}" if origin else line)
    return out


def _sizes(value: torch.Tensor) -> str:
    """Return the sizes of a tensor as text. Data-dependent ones are "?": the names of
    their symbols differ between ranks."""
    sizes = ["?" if is_data_dependent(size) else str(size) for size in value.shape]
    return f"[{', '.join(sizes)}]"


def facts_of(
    graph: fx.Graph,
) -> tuple[tuple[Collective, ...], tuple[tuple[Reshard, int], ...]]:
    """Return the collectives of one step in order, and the reshards that these belong
    to, for each phase, with the bytes of their collectives."""
    sent: list[Collective] = []
    reshards: list[tuple[Reshard, int]] = []
    for phase in phases(graph):
        sent_bytes: dict[Reshard, int] = defaultdict(int)
        for node in phase:
            is_sent = node.target in PRODUCTS or node.target in CROSSINGS
            is_sent = is_sent or is_collective(node)
            if is_sent and group_of_call(node).startswith(GROUP_PREFIX):
                sent.append(_collective(node))
                if "fxpar_reshard" in node.meta:
                    sent_bytes[node.meta["fxpar_reshard"]] += sent[-1].bytes
        reshards += sent_bytes.items()
    return tuple(sent), tuple(reshards)


def _collective(node: fx.Node) -> Collective:
    axes, source = group_axes(group_of_call(node)), source_of(node)
    if node.target is ours.move_rows.default:
        kind, nbytes = message_of(node)
        return Collective(kind, axes, round(nbytes), source)
    kind = (KINDS | PRODUCTS | CROSSINGS)[node.target]
    return Collective(kind, axes, _size(node), source)


def _size(node: fx.Node) -> int:
    """Return the bytes that a rank has before or after a collective, the larger."""
    if node.target in EXACT:
        return _bytes_sent(node)
    if node.target not in PRODUCTS:
        return max(bytes_of(node), sum(map(bytes_of, node.all_input_nodes)))
    (value, *_), count = tensors_in(node.meta["val"]), node.args[-2]
    return nbytes_of(value) * (1 if PRODUCTS[node.target] == "all_gather" else count)


def _bytes_sent(node: fx.Node) -> int:
    """Return the bytes of an exchange of exact numbers of rows."""
    value, rows = (n.meta["val"] for n in node.args[:2])
    return exact_ops.bytes_sent(value, rows)


def source_of(node: fx.Node) -> str:
    """Return the node and the user's line that made a collective necessary."""
    if "fxpar_cause" in node.meta:
        return node.meta["fxpar_cause"]
    name, line = node.meta.get("fxpar_origin", node.name), user_line(node)
    return f"{name} ({line})" if line else name
