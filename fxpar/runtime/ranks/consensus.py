"""This module gathers short texts of all ranks of a world, and compares digests.

In: a tag that names the place in the program, and a digest or a text. Out: the texts of
all ranks, or the fact that all gave one digest; else one error on all of them, which
shows how the first rank that differs does. Each is a meeting (``meeting``), so that
ranks that compile different programs, or fail (``abort``), get an error. Never: a
collective.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from fxpar.errors import FxparError, RankMismatchError
from fxpar.runtime.ranks import meeting, worlds

E = TypeVar("E", bound=FxparError)

DIFF_LINES = 60

SAME = "run the same code, versions and options on every rank, on the same shapes"

# The digest of a rank that asks all ranks to begin again.
VOID = ""


def agree(
    tag: str,
    digest: str,
    text: str,
    timeout: float | None = None,
    *,
    what: str = "the program",
    fix: str | None = None,
    error: type[FxparError] = RankMismatchError,
) -> bool:
    """Return once all ranks gave the same tag and digest; False on all ranks if one
    gave VOID.

    ``text`` has the ``digest``; where digests differ, the error shows how the text of
    the first rank that differs differs from rank 0's. ``timeout``: seconds to wait for
    a rank that is idle.

    Raises ``error`` on every rank if they differ, RankMismatchError if a rank does not
    come or has failed.
    """
    digests = gather(tag, digest, timeout)
    if VOID in digests:
        return False
    differ = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not differ:
        return True
    channel = meeting.current()
    is_shown = channel is not None and channel.rank in (0, differ[0])
    texts = gather(tag, text if is_shown else "", timeout)
    first, other = worlds.global_rank(0), worlds.global_rank(differ[0])
    diff = _difference(texts[0], texts[differ[0]], f"rank {first}", f"rank {other}")
    fact = f"ranks disagree about {what}: {named(differ)} from rank {first}"
    raise as_reported(error(f"{fact}\n{diff}", fix=fix or SAME))


def gather(tag: str, text: str, timeout: float | None = None) -> list[str]:
    """Return the text of every rank, in order of ranks; they should be short.

    Raises RankMismatchError if a rank does not come, has failed, or gave another tag.
    """
    return meeting.meet(repr(tag), text, seconds=timeout)


def gather_numbers(tag: str, numbers: Sequence[Any]) -> list[list[Any]]:
    """Return the numbers of every rank, in order of ranks."""
    return [json.loads(text) for text in gather(tag, json.dumps(numbers))]


def round_number() -> int:
    """Return how many meetings there were, which is equal on all ranks of a world."""
    return meeting.meetings()


def first_other(values: Iterable[Any]) -> int | None:
    """Return the first rank whose value differs from rank 0's; None if all are
    equal."""
    first, *rest = values
    return next((rank for rank, x in enumerate(rest, 1) if x != first), None)


def is_leader() -> bool:
    """Return whether this is the rank that decides for all."""
    channel = meeting.current()
    return channel is None or channel.rank == 0


def abort(error: BaseException) -> None:
    """Report a failure of this rank, unless every rank knows of it, to ranks that wait
    for it, now or at their next meeting: they raise RankMismatchError with it."""
    if not is_known_to_all(error):
        meeting.fail(f"{type(error).__name__}: {error}")


def as_reported(error: E) -> E:
    """Return the error, marked as one that every rank raises."""
    error.is_reported = True
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Return whether every rank knows of an error, or of its cause."""
    while error is not None:
        if getattr(error, "is_reported", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def digest_of(text: str) -> str:
    """Return a digest for ``agree`` where the text has none of its own."""
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(text: str, other: str, name: str, other_name: str) -> str:
    """Return a unified diff of the texts of two ranks."""
    before, after = text.splitlines(), other.splitlines()
    lines = list(
        difflib.unified_diff(before, after, name, other_name, lineterm="", n=1)
    )
    if len(lines) > DIFF_LINES:
        lines[DIFF_LINES:] = [f"... {len(lines) - DIFF_LINES} more lines"]
    return "\n".join(lines) or "(their texts are equal, only their digests differ)"


def named(ranks: Sequence[int]) -> str:
    """Return ranks of the current world in words, as users number them."""
    return listed([worlds.global_rank(rank) for rank in ranks])


def listed(ranks: Sequence[int]) -> str:
    """Return the given rank numbers in words, at most eight of them."""
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
