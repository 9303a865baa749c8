"""Agrees on how many rows ranks have room for in an exchange with experts.

A rank sends rows of its own to ranks along manual axes (``features.experts``), and
knows neither how many rows others feed nor whether they send any. In: the numbers of
rows that a compiled graph would send, at each of its runs. Out: the same room on all
ranks, which the graph to run is compiled for. Never: ranks that run with different
rooms.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors import RankMismatchError
from fxpar.runtime.ranks import consensus, meeting, worlds


def agreed_room(sent: Sequence[int], what: str) -> int | None:
    """Return the room in rows, the same on all ranks; None if all send equally many
    rows, 0 if some rank sends none since it has all experts. ``sent``:
    ``Plan.sent_rows``.

    Raises RankMismatchError, on all ranks, if some do not send rows here."""
    with worlds.inside(None):
        words = meeting.meet("rows to experts", ",".join(map(str, sent)), what)
    if len(set(words)) == 1:
        return None
    rows = [word.split(",") for word in words]
    if len({*map(len, rows)}) > 1:
        error = RankMismatchError(
            f"in {what} ranks send rows to different mixtures of experts",
            fix="use the same experts on every rank, in the same order, or set "
            "expert_exchange (FXPAR_EXPERT_EXCHANGE) to gather",
        )
        raise consensus.as_reported(error)
    counts = [int(n) for each in rows for n in each]
    # Powers of two: few rooms to compile for, whatever the numbers of rows are.
    return 1 << (max(counts) - 1).bit_length() if all(counts) else 0
