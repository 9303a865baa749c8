"""Memory and time of a predicted step by layer of the model.

In: a local graph as it runs, its plan, and the hardware. Out: a ``LayerRow`` for all
layers of one name but for their number, and for each other module; their sums are the
plan's own. The plan has no stages, and all ranks are alike. Never plans, and changes no
graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxpar.passes.simulate.launches import launches_of, source_of
from fxpar.passes.simulate.peak_memory import optimizer_bytes, residency
from fxpar.passes.simulate.simulate_step import simulate
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.launch import Launches
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Signature
from fxpar.units import short_bytes, short_seconds

# What is no layer's, such as arguments and the loss.
_OTHER = "other"
# The path of a layer, which ends in its number, before that of a module in it.
_LAYER = re.compile(r"(?:[^.]+\.)*?(\d+)(?=\.|$)")


@dataclass
class LayerRow:
    """What all layers of a name take."""

    # Their path, ``*`` for the number.
    name: str
    # Their numbers.
    numbers: set[str] = field(default_factory=set)
    # Bytes of a rank at the peak: parameters, their gradients, the optimizer's state.
    at_rest: float = 0
    # Bytes of all else.
    activations: float = 0
    # Seconds of kernels.
    forward: float = 0
    # Seconds of kernels, of what is computed again as well.
    backward: float = 0
    # Seconds of collectives, whether or not they run beside kernels.
    communication: float = 0

    @property
    def title(self) -> str:
        count = len(self.numbers)
        return f"{self.name} ({count} layers)" if count > 1 else self.name


class _Rows(dict[str, LayerRow]):
    """By name, in the order they are asked for."""

    def of(self, path: str) -> LayerRow:
        """The row of a module."""
        layer = _LAYER.match(path)
        name = path or _OTHER
        if layer:
            name = path[: layer.start(1)] + "*"
        row = self.setdefault(name, LayerRow(name))
        if layer:
            row.numbers.add(layer[1])
        return row


def layer_rows(
    graph: fx.Graph,
    plan: Plan,
    signature: Signature,
    hardware: Hardware,
    *,
    fused: bool,
) -> list[LayerRow]:
    """The rows, in order of the program. ``graph``: as it runs; ``signature``: of the
    program; ``fused``: as of ``simulate``, whose errors are raised."""
    mesh, rows = plan.mesh, _Rows()
    launches = launches_of(graph, fused=fused)
    machine = hardware.at_speed(mesh.slowest)
    line = simulate(graph, machine.on(mesh), machine, fused=fused, launches=launches)
    paths = _paths(plan, signature, graph)
    for path in dict.fromkeys(paths.values()):
        rows.of(path)
    for launch, event in zip(launches.launches, line.events, strict=True):
        row = rows.of(_path(launch.nodes[-1], paths))
        if event.axes:
            row.communication += event.duration
        elif event.of is None and launch.backward:
            row.backward += event.duration
        elif event.of is None:
            row.forward += event.duration
    for path, nbytes, at_rest in _held(signature, graph, launches, paths):
        row = rows.of(path)
        if at_rest:
            row.at_rest += nbytes
        else:
            row.activations += nbytes
    return sorted(rows.values(), key=lambda row: row.name == _OTHER)


def _paths(plan: Plan, signature: Signature, graph: fx.Graph) -> dict[str, str]:
    """Module by the name of an op of the program, or of an input of the graph."""
    paths = {node.name: (node.module or "").partition("/")[2] for node in plan.nodes}
    for node, x in zip(
        graph.find_nodes(op="placeholder"), signature.inputs, strict=True
    ):
        if x.kind in ("parameter", "buffer"):
            paths[node.name] = x.name.rpartition(".")[0]
    return paths


def _path(node: fx.Node, paths: Mapping[str, str]) -> str:
    """The module that a node of a local graph belongs to."""
    return paths.get(node.name) or paths.get(source_of(node).partition(" (")[0], "")


def _held(
    signature: Signature, graph: fx.Graph, launches: Launches, paths: Mapping[str, str]
) -> Iterator[tuple[str, int, bool]]:
    """(module, bytes, whether a rank has them between steps) of what there is at the
    peak. Gradients count as what there is between."""
    inputs = graph.find_nodes(op="placeholder")
    parameters = {
        node
        for node, x in zip(inputs, signature.inputs, strict=True)
        if x.kind == "parameter"
    }
    gradients = {
        buffer
        for out, buffers in zip(signature.outputs, launches.outputs, strict=True)
        if out.kind == "gradient"
        for buffer in buffers
    }
    resident = residency(launches)
    for buffer in resident.at(resident.peak[1]):
        at_rest = buffer.node in parameters or buffer in gradients
        yield _path(buffer.node, paths), buffer.nbytes, at_rest
    for node, nbytes in optimizer_bytes(inputs, signature).items():
        yield _path(node, paths), nbytes, True


# Columns of the table: what a row adds up, its heading, and its text.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("at_rest", "at rest", short_bytes),
    ("activations", "else at the peak", short_bytes),
    ("forward", "forward", short_seconds),
    ("backward", "backward", short_seconds),
    ("communication", "communication", short_seconds),
)


def layers_text(rows: Sequence[LayerRow]) -> str:
    """The rows as a table, with their sums, a line each."""
    total = LayerRow("all")
    for row in rows:
        for name, *_ in _COLUMNS:
            setattr(total, name, getattr(total, name) + getattr(row, name))
    table = [("layer", *(heading for _, heading, _ in _COLUMNS))]
    for row in (*rows, total):
        cells = (
            text(x) if (x := getattr(row, name)) else "-" for name, _, text in _COLUMNS
        )
        table.append((row.title, *cells))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for first, *cells in table
    )
