"""When ranks compare in full what a cheap sign says may differ."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.runtime.ranks.meeting import call_number

# On a device, whose signs take several launches, one is made at every so manieth call.
EVERY = 8

# Calls that pass at most between two looks that show no error.
_LONGEST_PAUSE = 64


@dataclass
class Looks:
    """Looks so far; each one is followed by a longer pause, alike on all ranks."""

    # Since ranks were last known to be alike.
    count: int = 0
    # The number of the call that may look again.
    ends: int = 0

    def pause(self) -> bool:
        """Whether to look no more for now; if not, this is a look."""
        if call_number() < self.ends:
            return True
        self.count += 1
        self.ends = call_number() + min(2**self.count, _LONGEST_PAUSE)
        return False
