"""Whether ranks have given up waiting for this one.

A rank of a test that must come too late stays away until these say so, however busy
the machine is; a fixed sleep would make the test depend on its load.
"""

from __future__ import annotations

from fxpar.runtime.ranks.meeting import Channel, current


def _channel() -> Channel:
    channel = current()
    assert channel is not None
    return channel


def given_up_at_call() -> bool:
    """Whether another rank wrote this rank's word of the next call (``meet``)."""
    channel = _channel()
    return channel.has(channel.key(channel.calls + 1, "call", channel.rank))


def given_up_in_round() -> bool:
    """Whether the others wait no longer for this rank in the next round (``agree``)."""
    channel = _channel()
    number = channel.rounds + 1
    if channel.rank:
        return channel.has(channel.key(number, "verdict"))
    keys = [channel.key(number, rank) for rank in range(1, channel.size)]
    return channel.has(*keys) and all('"gone"' in channel.read(key) for key in keys)
