"""Tabulate memory and time of a predicted step by layer of the model.

In: a local graph in the order it runs, its plan, and the hardware; the plan has no
stages, and all ranks have equal shards and speeds. Out: a ``LayerRow`` for all layers
whose names differ in their number only, and for each other module; their sums are the
plan's totals. Never: planning, or a change to a graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxpar.passes.simulate.launches import launches_of, source_of
from fxpar.passes.simulate.simulate_step import kinds_at_peak, optimizer_bytes, simulate
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Signature
from fxpar.units import short_bytes, short_seconds

# The row of all that belongs to no module, such as arguments and the loss.
_OTHER = "other"
# The path of a layer up to its number; the path of a module inside it may follow.
_LAYER = re.compile(r"(?:[^.]+\.)*?(\d+)(?=\.|$)")


@dataclass
class LayerRow:
    """Holds memory and time on one rank of all layers that share a name."""

    name: str  # path of the layers, with ``*`` for the number
    numbers: set[str] = field(default_factory=set)  # numbers of the layers
    at_rest: float = 0  # peak bytes of parameters, gradients and optimizer state
    activations: float = 0  # all other bytes at the peak
    forward: float = 0  # seconds of kernels
    backward: float = 0  # seconds of kernels, recomputation included
    communication: float = 0  # seconds of collectives, hidden or not

    @property
    def title(self) -> str:
        count = len(self.numbers)
        return f"{self.name} ({count} layers)" if count > 1 else self.name


def _row_of(rows: dict[str, LayerRow], path: str) -> LayerRow:
    """Return the row of a module, made on the first call."""
    layer = _LAYER.match(path)
    name = path[: layer.start(1)] + "*" if layer else path or _OTHER
    row = rows.setdefault(name, LayerRow(name))
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
    """Return the rows in order of the program.

    graph: in the order it runs. signature: the program's. fused: as for ``simulate``,
    whose errors this raises.
    """
    mesh, rows = plan.mesh, dict[str, LayerRow]()
    launches = launches_of(graph, fused=fused)
    machine = hardware.at_speed(mesh.slowest)
    line = simulate(graph, machine.on(mesh), machine, fused=fused, launches=launches)
    paths = _paths(plan, signature, graph)
    for path in dict.fromkeys(paths.values()):
        _row_of(rows, path)
    for launch, event in zip(launches.launches, line.events, strict=True):
        row = _row_of(rows, _path(launch.nodes[-1], paths))
        if event.axes:
            row.communication += event.duration
        elif event.of is None and launch.backward:
            row.backward += event.duration
        elif event.of is None:
            row.forward += event.duration
    kinds = kinds_at_peak(graph, signature, launches)
    for buffer, kind in kinds.items():
        row = _row_of(rows, _path(buffer.node, paths))
        if kind in ("parameters", "gradients"):
            row.at_rest += buffer.nbytes
        else:
            row.activations += buffer.nbytes
    state = optimizer_bytes(graph, signature)
    for node, nbytes in state.items():
        _row_of(rows, _path(node, paths)).at_rest += nbytes
    return sorted(rows.values(), key=lambda row: row.name == _OTHER)


def _paths(plan: Plan, signature: Signature, graph: fx.Graph) -> dict[str, str]:
    """Map the name of each op of the program and input of the graph to its module."""
    paths = {node.name: (node.module or "").partition("/")[2] for node in plan.nodes}
    for node, x in zip(
        graph.find_nodes(op="placeholder"), signature.inputs, strict=True
    ):
        if x.kind in ("parameter", "buffer"):
            paths[node.name] = x.name.rpartition(".")[0]
    return paths


def _path(node: fx.Node, paths: Mapping[str, str]) -> str:
    """Return the module that a node of a local graph belongs to, or ""."""
    return paths.get(node.name) or paths.get(source_of(node).partition(" (")[0], "")


# Columns of the table: field of a row, heading, and format.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("at_rest", "at rest", short_bytes),
    ("activations", "else at the peak", short_bytes),
    ("forward", "forward", short_seconds),
    ("backward", "backward", short_seconds),
    ("communication", "communication", short_seconds),
)


def layers_text(rows: Sequence[LayerRow]) -> str:
    """Format the rows as a table, with a last line of their sums."""
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
