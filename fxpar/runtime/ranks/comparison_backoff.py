"""How long ranks wait between two comparisons in full that show no error."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.runtime.ranks.meeting import call_number

# Calls that pass at most between two comparisons.
_LONGEST = 64


@dataclass
class Backoff:
    """Comparisons so far: each is followed by a longer pause, on all ranks."""

    # Since ranks were last known to be alike.
    count: int = 0
    # The number of the call that may compare again.
    ends: int = 0

    def pauses(self) -> bool:
        """Whether to compare nothing for now; if not, this counts as a comparison."""
        if call_number() < self.ends:
            return True
        self.count += 1
        self.ends = call_number() + min(2**self.count, _LONGEST)
        return False
