"""When ranks compare in full what a cheap sign says may differ."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.runtime.ranks.meeting import call_number

# Calls between two of which elements are summed, which costs some tens of microseconds
# (or several launches): by no whole number, so that of graphs that are called in turn
# each has its part. The first calls all have sums on the CPU.
_APART, _FIRST = (11 + 5**0.5) / 2, 32

# Calls that pass at most between two looks that show no error.
_LONGEST_PAUSE = 64


def turn_at(number: int, *, on_cpu: bool) -> int | None:
    """How many calls before one had sums; None if it has none."""
    if on_cpu and number < _FIRST:
        return number
    turn = int(number / _APART)
    return turn + _FIRST if turn > int((number - 1) / _APART) else None


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
