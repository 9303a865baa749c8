"""Ranks agree on what they launch, once each has compiled it.

In: the collectives of one rank, a line for each, in order. Out: nothing, on all ranks,
or an error on all.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors import FxparError, InputMismatchError, RankMismatchError
from fxpar.runtime.calls.call_sizes import UNLIKE, SizeAgreement
from fxpar.runtime.ranks import consensus


def agree_on_launches(
    tag: str, launches: Sequence[str], size_match: SizeAgreement
) -> None:
    """Return once all ranks came to ``tag`` with the same launches.

    Raises RankMismatchError if theirs differ, or if one fails or does not come;
    InputMismatchError where they differ because sizes do.
    """
    text, mismatch = "\n".join(launches), size_match.mismatch
    subject, fix = "the collectives they launch", None
    error: type[FxparError] = RankMismatchError
    if size_match.kind == UNLIKE and mismatch is not None:
        subject = f"what crosses between them: {mismatch.what}; more than sums do"
        error, fix = InputMismatchError, mismatch.fix
    digest = consensus.digest_of(text)
    consensus.agree(tag, digest, text, what=subject, fix=fix, error=error)
