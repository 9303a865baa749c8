"""What a request asks for, decided on its mesh.

In: a Program and a Request whose mesh is named. Out: a Decision. Of a batch that is cut
into microbatches without stages a search prices a step of all parts, each as small as
it is, gradients added to their sums, and looks for the plan whose parts together take
the least; what a rank holds is of the parts that wait for their backward. How many
there are depends on the rows of a rank, and so on the plan: as many as all rows have,
or those of a rank where the batch axes split them, whichever takes less. Compares no
meshes (``choose_mesh``), and knows no stages (``choose_stages``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from fxpar.errors import HintError, PlanError
from fxpar.sharding.cut_in_time import cut_in_time
from fxpar.sharding.decide import Decision, decide, searched
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan_request import Request
from fxpar.sharding.program import Program
from fxpar.sharding.propagate.conventions import batch_axes, batch_inputs
from fxpar.sharding.search.batch_parts import BatchCut, PartProgram, SharedKernels
from fxpar.sharding.search.run_search import SearchOptions, SearchResult


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
    constraints = constraints_of(program)
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


def constraints_of(program: Program) -> list[tuple[int, list[str]]]:
    """Hints in the code."""
    return [
        (op.results[0], op.node.args[1].split(","))
        for op in program.ops
        if op.target is torch.ops.fxpar.constrain.default
    ]


def split_evenly(program: Program) -> Program:
    """The program whose ranks get alike shards, as parts of a batch need."""
    ops = [replace(op, rule=replace(op.rule, even=True)) for op in program.ops]
    return replace(program, ops=ops, even=True)


@dataclass(frozen=True)
class BatchInParts:
    """Microbatches without stages that a search prices."""

    # What follows the batch.
    cut: BatchCut
    # So many, or the next fewer that the rows of a rank have.
    most: int
    # Forward and backward are one program: a part's activations go before the next.
    one_by_one: bool
    # As ``PartProgram.whole_kernels``.
    kernels: SharedKernels = field(default_factory=dict)

    def part(self, program: Program, count: int) -> PartProgram:
        """A program in so many parts, all of which are paid."""
        flying = 1 if self.one_by_one else count
        shared = self.kernels
        return PartProgram(
            program, self.cut, count, 1, flying, whole_kernels=shared, paid=count
        )

    def counts(self, mesh: Mesh) -> list[int]:
        """How many parts there may be: of all rows, and of those of a rank where the
        batch axes split them."""
        rows, ranks = self.cut.rows, mesh.count(batch_axes(mesh))
        of_a_rank = [rows // ranks] if rows % ranks == 0 else []
        counts = (parts_of(n, self.most) for n in (rows, *of_a_rank))
        return list(dict.fromkeys(counts))


def parts_of(rows: int, most: int) -> int:
    """Microbatches of so many rows: ``most``, or the next fewer that divide them."""
    return max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)


def batch_in_parts(
    program: Program, request: Request, kernels: SharedKernels | None = None
) -> BatchInParts | None:
    """The microbatches of a request; None where no search prices them. ``kernels``: of
    the program, as far as they are known."""
    most = request.microbatches or 1
    is_searched = isinstance(request.mode, SearchOptions)
    if most == 1 or request.pipeline is not None or not is_searched:
        return None
    cut = cut_in_time(program)
    if cut is None:
        return None
    return BatchInParts(cut, most, request.step, {} if kernels is None else kernels)


def decide_in_parts(
    program: Program,
    request: Request,
    batch: BatchInParts,
    before: SearchResult | None = None,
) -> Decision:
    """The decision on the request's mesh, searched for a step of all microbatches.
    ``before``: as for ``decide_on``. Where none is cut as it is priced the batch is
    searched as a whole. Raises as ``decide_on``.
    """
    assert isinstance(request.mode, SearchOptions)
    if before is not None:
        parts = before.formulation.parts
        program = program if parts is None else split_evenly(program)
        return decide_on(program, request, before, parts)
    best: Decision | None = None
    options, failure = request.mode, None
    for count in batch.counts(request.mesh):
        of_count = program if count == 1 else split_evenly(program)
        part = None if count == 1 else batch.part(of_count, count)
        try:
            here = replace(request, mode=options)
            decision = decide_on(of_count, here, parts=part)
        except (HintError, PlanError) as error:
            failure = failure or error
            continue
        search = decision.search
        if search is None or _parts_made(decision, batch.most) != count:
            continue
        if best is None or search.predicted < options.enough:
            best, options = decision, replace(options, enough=search.predicted)
    if best is not None:
        return best
    try:
        return decide_on(program, request)
    except PlanError as error:
        raise failure or error from None


def _parts_made(decision: Decision, most: int) -> int:
    """The parts that the batch is cut into under a decision, as
    ``passes.stages.microbatches`` does: those of the rows that a rank reads."""
    if not decision.is_even:
        return 1
    program, edges, mesh = decision.program, decision.edges, decision.mesh
    batch = set(batch_inputs(program, fed=True))
    specs = [(v, edges.specs[v]) for v in batch]
    specs += [(r.value, r.target) for r in edges.reshards if r.value in batch]
    rows = (program.values[v].shape[0] // mesh.count(x.dims[0]) for v, x in specs)
    return parts_of(min(rows, default=1), most)
