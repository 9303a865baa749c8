"""Where a collective of a step fails: an error that names the ranks that are not in it.

Backends say that a connection closed, or that time is over, and not whose fault it is.
Ranks do (``presence``): one that has ended said so, one that died does not answer, one
that went another way says which line it is at.
"""

from __future__ import annotations

import torch.distributed as dist

from fxpar.errors import FxparError, RankMismatchError
from fxpar.runtime.ranks import presence
from fxpar.runtime.ranks.meeting import current

# In what gloo and NCCL say of ranks that they do not reach.
_SAID = ("gloo", "NCCL", "closed by peer", "pair closure", "Timed out waiting", "reset")
# Of ranks that may have come to the collective.
_IN_STEP = ("waits", "in a graph", "works")
_SHOWN = 8  # ranks
_FIX = (
    "look at what they printed, the first that failed above all; if they compute for "
    "longer than a collective may take, give init_process_group a longer timeout"
)


def name_lost_ranks(error: RuntimeError) -> None:
    """Raise RankMismatchError, which names them, if ``error`` is of a collective that
    other ranks did not come to."""
    text = str(error)
    is_of_others = isinstance(error, dist.DistError) or any(x in text for x in _SAID)
    if isinstance(error, FxparError) or not is_of_others:
        return
    channel = current()
    if channel is None:
        return
    reason = text.split(". ")[0].partition("\n")[0]
    what = f"a collective of this step did not come to its end ({reason})"
    try:
        with presence.waits("asks where others are"):
            states = channel.presence.answers()
    except dist.DistError:
        raise RankMismatchError(
            f"{what}, and the store of the process group does not answer",
            fix="the process that holds it, mostly rank 0, has ended: see its output",
        ) from error
    absent = {r for r, (state, _) in states.items() if state not in _IN_STEP}
    late = {r for r, (state, _) in states.items() if state == "works"}
    lines = [f"\n  rank {r} {states[r][1]}" for r in sorted(absent or late)]
    if lines:
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        facts = "".join(lines[:_SHOWN])
        raise RankMismatchError(f"{what}:{facts}{more}", fix=_FIX) from error
