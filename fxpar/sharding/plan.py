"""The plan: a spec for every value, what was chosen, and why. Frozen data.

Printable, JSON round-trip, stable hash. ``decide`` makes the decisions, ``describe``
writes them down as a Plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fxpar.errors import PlanError
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

FORMAT = 1


@dataclass(frozen=True)
class Collective:
    """One collective a rank takes part in. ``kind``: all_reduce, all_gather,
    reduce_scatter, all_to_all or permute. ``bytes``: of the tensor it completes on one
    rank, or, for a reduce_scatter, of what goes in. ``source``: node and user line."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    source: str


@dataclass(frozen=True)
class NodePlan:
    """One op: its strategy, the specs it reads, makes, and its results settle in.

    ``module``: as ``owners`` writes it, ``forward/layers.0.mlp``; None if unknown."""

    name: str
    op: str
    factors: tuple[tuple[str, tuple[str, ...]], ...]
    passes: tuple[tuple[str, str, int], ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    settled: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    rule: str
    line: str | None = None
    module: str | None = None


# Of a NodePlan, what the program does not depend on.
_ASIDE = ("line", "module")


@dataclass(frozen=True)
class Plan:
    """A spec for every value of one graph on one mesh.

    ``inputs``/``outputs``: specs of the user's tensor arguments and results.
    ``parameters``/``gradients``: specs by name. ``values``: spec of every named value.
    ``unknown``: ops without a rule, whose operands were made whole.
    """

    mesh: Mesh
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    parameters: tuple[tuple[str, Spec], ...]
    gradients: tuple[tuple[str, Spec], ...]
    values: tuple[tuple[str, Spec], ...]
    nodes: tuple[NodePlan, ...]
    collectives: tuple[Collective, ...]
    unknown: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return {**dict(self.values), **dict(self.parameters)}

    def spec(self, name: str) -> Spec:
        """Spec of a value or parameter by name. Raises PlanError if unknown."""
        try:
            return self._specs[name]
        except KeyError:
            near = [known for known in self._specs if name in known][:5]
            raise PlanError(
                f"the plan has no value named {name!r}",
                fix=f"names are such as {near or list(self._specs)[:5]}",
            ) from None

    def why(self, name: str) -> str:
        """Why a value has its spec: for each axis the seed and the way it came."""
        spec = self.spec(name)
        found = dict(self.reasons).get(name)
        return f"{name}: {spec}\n{found or '  whole: no axis reached it'}"

    @cached_property
    def hash(self) -> str:
        """Stable digest of everything that decides which program the ranks run."""
        data = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(data.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; timings, reasons, modules and source lines are left out: they may
        differ between runs of the same plan."""

        def plain(x: Any) -> Any:
            if isinstance(x, Spec):
                return str(x)
            if isinstance(x, (list, tuple)):
                return [plain(y) for y in x]
            return x

        nodes = [
            {k: plain(v) for k, v in asdict_shallow(node).items() if k not in _ASIDE}
            for node in self.nodes
        ]
        return {
            "format": FORMAT,
            "mesh": str(self.mesh),
            "inputs": plain(self.inputs),
            "outputs": plain(self.outputs),
            "parameters": plain(self.parameters),
            "gradients": plain(self.gradients),
            "values": plain(self.values),
            "nodes": nodes,
            "unknown": plain(self.unknown),
            "collectives": [
                {k: plain(v) for k, v in asdict(c).items() if k != "source"}
                for c in self.collectives
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write as JSON, with reasons and source lines beside what ``hash`` covers."""
        data = self.to_dict()
        data["reasons"] = list(self.reasons)
        data["notes"] = list(self.notes)
        data["sources"] = [c.source for c in self.collectives]
        data["lines"] = [node.line for node in self.nodes]
        data["modules"] = [node.module for node in self.nodes]
        Path(path).write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote. Raises PlanError if it cannot be read."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"cannot read the plan file {path}: {error}",
                fix="FXPAR_PLAN takes propagate, replicate, or a file of plan.save()",
            ) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f"{path} is not a plan of this version of fxpar")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of ``to_dict`` (and of what ``save`` adds)."""

        def specs(texts: Sequence[str]) -> tuple[Spec, ...]:
            return tuple(Spec.parse(text) for text in texts)

        def named(pairs: Sequence) -> tuple[tuple[str, Spec], ...]:
            return tuple((name, Spec.parse(text)) for name, text in pairs)

        lines = data.get("lines") or [None] * len(data["nodes"])
        modules = data.get("modules") or [None] * len(data["nodes"])
        nodes = tuple(
            NodePlan(
                name=n["name"],
                op=n["op"],
                factors=tuple((f, tuple(axes)) for f, axes in n["factors"]),
                passes=tuple((a, op, p) for a, op, p in n["passes"]),
                operands=specs(n["operands"]),
                results=specs(n["results"]),
                settled=specs(n["settled"]),
                shapes=tuple(tuple(s) for s in n["shapes"]),
                dtypes=tuple(n["dtypes"]),
                rule=n["rule"],
                line=line,
                module=module,
            )
            for n, line, module in zip(data["nodes"], lines, modules, strict=True)
        )
        sources = data.get("sources") or [""] * len(data["collectives"])
        collectives = tuple(
            Collective(c["kind"], tuple(c["axes"]), c["bytes"], source)
            for c, source in zip(data["collectives"], sources, strict=True)
        )
        return cls(
            Mesh.parse(data["mesh"]),
            specs(data["inputs"]),
            specs(data["outputs"]),
            named(data["parameters"]),
            named(data["gradients"]),
            named(data["values"]),
            nodes,
            collectives,
            tuple(data["unknown"]),
            tuple((name, text) for name, text in data.get("reasons", ())),
            tuple(data.get("notes", ())),
        )

    def diff(self, other: Plan) -> str:
        """What differs from another plan, one line per value; empty if nothing."""
        mine, theirs = dict(self.values), dict(other.values)
        lines = [] if self.mesh == other.mesh else [f"mesh: {self.mesh} | {other.mesh}"]
        for name in dict.fromkeys([*mine, *theirs]):
            a, b = mine.get(name), theirs.get(name)
            if a != b:
                lines.append(f"{name}: {a} | {b}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Mesh, specs of parameters, and collectives by kind and axes with bytes."""
        from fxpar.explain.text import summary_text

        return summary_text(self)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one HTML page that needs no network and no other file."""
        from fxpar.explain.html import render

        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        from fxpar.explain.text import plan_text

        return plan_text(self)


def asdict_shallow(record: Any) -> dict[str, Any]:
    """Fields of a dataclass by name, values as they are."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
