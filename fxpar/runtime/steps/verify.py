"""Check a local graph against its one-device graph before it runs: ``FXPAR_VERIFY``.

In: the graphs of the pipeline and the arguments of the first call. Out: a PlanError
that names the first output that differs, or nothing. The local graph runs for all ranks
in lockstep in this process, the one-device graph as well; the shards of every output
are put together and compared. Every rank does the same. Never: changes, or
communication but for gathers of parameters at rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar.errors import PlanError
from fxpar.graph.graph_bodies import module_of
from fxpar.passes.simulate.emulate_collectives import gather, scatter
from fxpar.passes.simulate.lockstep import run_global, run_ranks
from fxpar.sharding.decide import Decision
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.ops import user_row_of
from fxpar.sharding.spec import Spec


def verify(
    local: fx.Graph,
    normalized: fx.Graph,
    decision: Decision,
    root: torch.nn.Module,
    feeds: Sequence[Any],
) -> None:
    """Raise PlanError naming the first output of the ``local`` graph that differs from
    the ``normalized`` one's. ``feeds``: one global value per graph input; ``root``
    holds the graphs' constants."""
    program, edges, mesh = decision.program, decision.edges, decision.mesh
    rank_module, whole = (_module(root, graph) for graph in (local, normalized))
    with torch.no_grad(), torch.random.fork_rng():
        state = torch.get_rng_state()
        ranks = run_on_ranks(rank_module, decision, feeds, copied=True)
        torch.set_rng_state(state)
        want = run_global(whole, mesh, _copies(feeds))
    for k, (spec, expected) in enumerate(zip(edges.outputs, want, strict=True)):
        if spec is None or not isinstance(expected, torch.Tensor):
            continue
        name = program.signature.outputs[k].name
        try:
            actual = gather([outs[k] for outs in ranks], spec, mesh)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
        except AssertionError as error:
            ruled = {str(x.target) for x in program.ops if user_row_of(x.target)}
            fix = (
                "report it, with FXPAR_DUMP of this run; FXPAR_PLAN=replicate avoids it"
            )
            if ruled:
                rules = f"the rules that fxpar.rule gave to {', '.join(sorted(ruled))}"
                fix = f"look first at {rules}; if they are right, {fix}"
            raise PlanError(
                f"FXPAR_VERIFY: output {name} differs from one device: {error}", fix=fix
            ) from error


def run_on_ranks(
    module: fx.GraphModule,
    decision: Decision,
    values: Sequence[Any],
    *,
    copied: bool = False,
) -> list[Any]:
    """Return the results of a local graph on each rank. ``values``: global ones of its
    inputs, ``copied`` for each rank if it writes to them."""
    mesh, specs = decision.mesh, decision.edges.specs
    parts = [
        [x] * mesh.size if v is None else scatter(x, specs[v], mesh)
        for x, v in zip(values, decision.program.inputs, strict=True)
    ]
    ranks = [[part[r] for part in parts] for r in range(mesh.size)]
    return run_ranks(module, mesh, [*map(_copies, ranks)] if copied else ranks)


def _module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph with flat arguments as a module."""
    graph.set_codegen(fx.graph.CodeGen())
    return module_of(root, graph)


def _copies(values: Iterable[Any]) -> list[Any]:
    """Return copies of tensors, as graphs may write to their inputs."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in values]


def feeds_of(
    normalized: fx.Graph, args: Sequence[Any], places: Sequence[int | None]
) -> list[Any]:
    """Return values for the inputs of a graph: the call's own arguments where they have
    the global shape, ones elsewhere; all ranks call this, for parameters of which each
    holds a part. ``places``: position of each input among ``args``."""
    feeds: list[Any] = []
    nodes = [n for n in normalized.nodes if n.op == "placeholder"]
    for node, i in zip(nodes, places, strict=True):
        value, argument = node.meta.get("val"), None if i is None else args[i]
        if not isinstance(value, torch.Tensor):
            feeds.append(argument)
        elif argument is not None and argument.shape == value.shape:
            argument = argument.detach()
            is_part = isinstance(argument, DTensor)
            feeds.append(_gathered(argument) if is_part else argument)
        else:
            feeds.append(
                torch.ones(value.shape, dtype=value.dtype, device=value.device)
            )
    return feeds


def _gathered(x: DTensor) -> torch.Tensor:
    """Return the global value of a parameter of which each rank holds a part."""
    # Not by DTensor, whose gathers on gloo (2.13) may end before their threads do.
    mesh = Mesh.from_device_mesh(x.device_mesh)
    spec = Spec.from_placements(x.placements, mesh, x.dim())
    where = str(spec), "", str(mesh), "", -1
    whole: torch.Tensor = torch.ops.fxpar.to_global(x.to_local(), list(x.shape), *where)
    return whole
