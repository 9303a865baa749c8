"""The mesh with the fastest plan, of those that a request leaves open.

In: a Program and a Request with ``meshes``. Out: the Decision on the best, with a note
of what the others would take. ``decide_on`` decides on one mesh. Never searches longer
than asked for, pricing apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxpar.errors import FxparError, HintError, MeshError, PlanError, SpecError
from fxpar.sharding.decide import Decision, decide, searched
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.refine_mesh import refine, rounded
from fxpar.sharding.search.batch_parts import PartProgram
from fxpar.sharding.search.mesh_candidates import unlike
from fxpar.sharding.search.run_search import SearchOptions, SearchResult
from fxpar.sharding.search.unequal_shards import best_shares
from fxpar.sharding.solver.message_passing import warm

# Plans of so nearly the same time are alike: then fewer axes are better.
ALIKE = 1e-3

# What a mesh may do to a plan that it has none: hints and specs name axes, memory.
_UNFIT = (HintError, MeshError, PlanError, SpecError)


def decide_on(
    program: Program,
    request: Request,
    before: SearchResult | None = None,
    parts: PartProgram | None = None,
) -> Decision:
    """The decision on the request's mesh. ``before``: a shorter search of the same,
    from which a search goes on; ``parts``: as for ``run_search.search``.

    Raises HintError for hints that do not fit, PlanError if no searched plan does.
    """
    mesh, hints, mode = request.mesh, request.hints, request.mode
    constraints = _constraints(program)
    if isinstance(mode, SearchOptions):
        return searched(
            program,
            mesh,
            hints,
            constraints,
            mode,
            keep_gathered=request.keep_gathered,
            before=before,
            parts=parts,
        )
    assert isinstance(mode, str)
    hardware = request.named_hardware
    return decide(program, mesh, hints, constraints, mode=mode, hardware=hardware)


def balanced(
    decision: Decision, request: Request, axes: Sequence[str], rows: int
) -> Decision:
    """A searched decision on unlike ranks, or one with the shares along ``axes`` with
    which its ranks would finish together, if that is faster. ``rows``: of the batch.
    """
    mesh, mode, before = decision.mesh, request.mode, decision.found
    assert isinstance(mode, SearchOptions) and before is not None
    best = best_shares(decision, mode.hardware)
    shares = {axis: best[axis] for axis in axes if axis in best}
    here = rounded(mesh.unrefined.with_shares(shares), axes, rows)
    if all(here.weights_of(axis) == mesh.weights_of(axis) for axis in axes):
        return decision
    other = decide_on(decision.program, request.on(here.refined(mesh.names)))
    assert other.found is not None
    return other if other.found.predicted < before.predicted else decision


def _constraints(program: Program) -> list[tuple[int, list[str]]]:
    """Hints in the code."""
    return [
        (op.results[0], op.node.args[1].split(","))
        for op in program.ops
        if op.target is torch.ops.fxpar.constrain.default
    ]


def open_meshes(program: Program, request: Request) -> tuple[Mesh, ...]:
    """The meshes to search: where nothing names an axis, one of each order alike.

    Raises MeshError if nothing searches.
    """
    if not isinstance(request.mode, SearchOptions):
        raise MeshError(
            f"FXPAR_MESH=auto is chosen by a search, FXPAR_PLAN is {request.mode}",
            fix="set FXPAR_PLAN=search, or name the axes: FXPAR_MESH=dp="
            f"{request.mesh.size}",
        )
    if _names_axes(program, request):
        return request.meshes
    return unlike(request.meshes, request.mode.hardware)


def _names_axes(program: Program, request: Request) -> bool:
    """Whether anything but the plan says which axis splits what."""
    signature = request.laid
    rests = [declared.rest for declared in signature.inputs]
    rests += [declared.rest for declared in signature.outputs]
    split = any(rest is not None and not rest.is_whole for rest in rests)
    used = any(declared.use is not None for declared in signature.inputs)
    return bool(split or used or request.hints or _constraints(program))


def _attempt(
    program: Program,
    request: Request,
    mesh: Mesh,
    asked: SearchOptions,
    before: SearchResult | None = None,
) -> Decision:
    """A search on one mesh; of a shorter search before, it goes on from that."""
    here = replace(request.on(mesh), mode=asked)
    here = here.on(refine(program, here))
    return decide_on(replace(program, signature=here.laid), here, before)


@dataclass(frozen=True)
class _Tried:
    """What is known of a mesh: seconds of the plan found, and of no plan less."""

    mesh: Mesh
    seconds: float = math.inf
    bound: float = 0.0
    error: FxparError | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.mesh} {str(self.error.what).splitlines()[0]}"
        known = math.isfinite(self.seconds)
        return f"{self.mesh} {ms(self.seconds) if known else 'not tried'}"


def fastest(program: Program, request: Request) -> Decision:
    """The decision on the mesh with the fastest plan found, with ``rivals`` set and a
    note of every candidate.

    Half of the seconds go to a glance at each mesh, in the order given, which ends as
    soon as it is proved to be no faster than the best so far. Pricing takes time too:
    once all seconds have passed, what is left is not tried. The rest goes to the best,
    unless its plan is proved to be. Raises MeshError if nothing searches, and what
    ``decide_on`` does if no mesh has a plan.
    """
    meshes = open_meshes(program, request)
    warm()
    assert isinstance(request.mode, SearchOptions)
    # Meshes are compared by one ruler.
    asked = replace(request.mode, ranked=False)
    begun, spent = time.perf_counter(), 0.0
    share = asked.seconds / 2 / len(meshes) if len(meshes) > 1 else asked.seconds
    glance = replace(asked, seconds=share)
    tried: list[_Tried] = []
    best: Decision | None = None
    for mesh in meshes:
        if best is not None and time.perf_counter() - begun > asked.seconds:
            tried.append(_Tried(mesh))
            continue
        try:
            decision = _attempt(program, request, mesh, glance)
        except _UNFIT as error:
            tried.append(_Tried(mesh, bound=math.inf, error=error))
            continue
        found = found_of(decision)
        spent += found.took
        tried.append(_Tried(mesh, found.predicted, found.bound))
        if best is None or found.predicted < found_of(best).predicted * (1 - ALIKE):
            best = decision
            glance = replace(glance, enough=found.predicted)
    if best is None:
        return _hopeless(tried, asked, program, request)
    return _finished(best, tried, spent, asked, program, request)


def found_of(decision: Decision) -> SearchResult:
    """The search that decided."""
    assert decision.found is not None, "what is chosen was searched"
    return decision.found


def _finished(
    best: Decision,
    tried: Sequence[_Tried],
    spent: float,
    asked: SearchOptions,
    program: Program,
    request: Request,
) -> Decision:
    """The best mesh searched with the time that is left."""
    before = found_of(best)
    if not before.is_proved and len(tried) > 1:
        left = max(asked.seconds - spent, asked.seconds / 2)
        more = replace(asked, seconds=left)
        longer = _attempt(program, request, before.mesh, more, before)
        spent += found_of(longer).took
        if found_of(longer).predicted <= before.predicted:
            best = longer
    found = found_of(best)
    others = [t for t in tried if t.mesh.axes != found.mesh.unrefined.axes]
    rivals = min((t.bound for t in others), default=math.inf)
    found = replace(found, took=spent, rivals=rivals)
    note = f"mesh {found.mesh} chosen of {len(tried)}: {ms(found.predicted)} a step"
    if others:
        listed = sorted(others, key=lambda t: t.seconds)
        note += f"; {', '.join(map(str, listed))}"
    return replace(best, found=found, notes=(*best.notes, note))


def _hopeless(
    tried: Sequence[_Tried], asked: SearchOptions, program: Program, request: Request
) -> Decision:
    """No glance found a plan. The mesh of most axes has most plans: all of the time
    goes to it, unless hints fit none."""
    searches = [t for t in tried if isinstance(t.error, PlanError)]
    if not searches:
        error = tried[-1].error
        assert error is not None
        raise error
    return _attempt(program, request, searches[-1].mesh, asked)


def ms(seconds: float) -> str:
    """As text."""
    return f"{seconds * 1e3:.4g} ms"
