"""The solver of the strategy search chooses one strategy per node, at least cost,
within memory.

In: a ``Problem``, plain arrays. Out: a ``Solution`` with a proved gap. Never: looks at
torch, graphs or meshes; numba and scipy are imported when first needed.
"""

from fxpar.sharding.solver.problem import (
    Edge,
    Infeasible,
    Live,
    Problem,
    Solution,
    evaluate,
)
from fxpar.sharding.solver.solve import solve

__all__ = [
    "Edge",
    "Infeasible",
    "Live",
    "Problem",
    "Solution",
    "evaluate",
    "solve",
]
