"""Programs that are refused in local mode: what a rank's part of the batch is.

Dynamo traced a graph with the sizes of one rank; the program is that of the batch of
all ranks, in which every tensor argument has more rows. What holds no batch as dim 0
(states of ``[layers, batch, ...]``, a histogram that code in no graph made) no longer
fits the others then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import FxparError, PlanError
from fxpar.runtime.caches.program_identity import NamedInput
from fxpar.sharding.program import user_line

# How many arguments a message names.
_NAMED = 4


@contextlib.contextmanager
def refusing_parts(
    gm: fx.GraphModule,
    named_inputs: Sequence[NamedInput],
    examples: Sequence[Any],
    local: Collection[int],
) -> Iterator[None]:
    """Inside, a graph that cannot be run on the batch of all ranks is refused as such,
    with the user's line. ``examples``: of that batch; ``local``: positions of inputs of
    which each rank feeds a part."""
    try:
        yield
    except FxparError:
        raise
    except Exception as error:
        name = _torch.aot.failed_node(error)
        node = next((n for n in gm.graph.nodes if n.name == name), None)
        if not local or node is None:
            raise
        fed = [_shown(named_inputs[i], examples[i]) for i in sorted(local)]
        more = [f"{len(fed) - _NAMED} more"] if len(fed) > _NAMED else []
        raise PlanError(
            "with FXPAR_INPUTS=local every tensor argument is a part of the batch "
            "along dim 0, and the program fails on the parts of all ranks, "
            f"{', '.join([*fed[:_NAMED], *more])}: {str(error).splitlines()[0]}",
            where=user_line(node),
            fix="put the batch first in each of them (transpose before, and inside), "
            "make what holds no batch a buffer, or feed the global batch "
            "(FXPAR_INPUTS=global)",
        ) from error


def _shown(named_input: NamedInput, x: torch.Tensor) -> str:
    return f"{named_input.name} {list(_torch.symbols.hint_shape(x.shape))}"
