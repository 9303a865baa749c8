"""Whether ranks have given up waiting for this one.

A rank of a test that must come too late stays away until these say so, however busy
the machine is; a fixed sleep would make the test depend on its load.
"""

from __future__ import annotations

from fxpar.runtime.ranks.meeting import current


def given_up() -> bool:
    """Whether another rank wrote this rank's word of the next meeting."""
    channel = current()
    assert channel is not None
    return channel.store.check([channel.key(channel.meetings + 1, channel.rank)])
