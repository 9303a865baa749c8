"""This module names the ranks that are missing where a collective of a step fails.

Backends report that a connection closed, or that time is over, and not which rank was
missing. In: their error, and the state of each rank as ``presence`` reports it: ended
(with its exception), silent, or at another line of the program. Out: an error with
their numbers and places. A rank that fails because another is lost ends, and is then
lost to others itself; so the first rank that knows which one it was writes that to the
store of the process group, and those that fail later report the same. Never: another
error in place of one that no collective raised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch.distributed as dist

from fxpar.errors import FxparError, LostRankError, RankMismatchError
from fxpar.runtime.ranks import presence, worlds
from fxpar.runtime.ranks.meeting import Channel, all_ranks

# Parts of messages of gloo and NCCL: of ranks that have ended, of any not reached.
_CLOSED = ("closed by peer", "pair closure", "reset")
_SAID = ("gloo", "NCCL", "Timed out waiting", *_CLOSED)
# States of ranks that may have come to the collective.
_IN_STEP = ("waits", "collective", "in a graph", "works")
_SHOWN = 8  # ranks
_FIX = (
    "see what they printed, first of all the first that failed; if they compute "
    "for longer than a collective may take, give init_process_group a longer "
    "timeout"
)


@dataclass(frozen=True)
class LostRankReport:
    """Is the report of the first rank that knows of a lost one."""

    rank: int
    what: str  # which rank is lost, and where it is
    fix: str


def name_lost_ranks(error: RuntimeError) -> None:
    """Raise RankMismatchError that names the missing ranks if ``error`` comes from a
    collective or a message that other ranks did not reach."""
    text = str(error)
    is_of_others = isinstance(error, dist.DistError) or any(x in text for x in _SAID)
    is_foreign = not isinstance(error, FxparError) and is_of_others
    if not (is_foreign or isinstance(error, LostRankError)):
        return
    channel = all_ranks()
    if channel is None:
        return
    what = _what_failed(error)
    try:
        report = _reported(channel) or _learned(channel, error, what)
    except dist.DistError as lost:
        why = channel.presence.lost_store(lost)
        raise RankMismatchError(f"{what}, and {why.what}", fix=why.fix) from error
    if report is None or (report.rank == channel.rank and report.what == what):
        return
    fact = report.what
    if report.rank != channel.rank:
        fact = f"{what}; rank {report.rank} failed before:\n{report.what}"
    raise RankMismatchError(fact, fix=report.fix) from error


def _what_failed(error: RuntimeError) -> str:
    if isinstance(error, FxparError):
        return error.what
    reason = str(error).split(". ")[0].partition("\n")[0]
    return f"a collective of this step did not complete ({reason})"


def _learned(channel: Channel, error: RuntimeError, what: str) -> LostRankReport | None:
    """Find out which ranks are lost, report it to the others and return it; None if
    nobody knows."""
    is_closed = any(x in str(error) for x in _CLOSED)
    if isinstance(error, LostRankError) and error.rank is not None and is_closed:
        return _report(channel, what, error.fix or _FIX)
    with presence.waits("asks where others are"):
        states = channel.presence.answers(unless=lambda: _reported(channel) is not None)
    report = _reported(channel)
    if report is not None:
        return report
    world = worlds.current()
    neighbors = set() if world is None else states.keys() & set(world.ranks)
    absent = {r for r, other in states.items() if other.state not in _IN_STEP}
    late = {r for r, other in states.items() if other.state == "works"}
    named = (ranks & neighbors or ranks for ranks in (absent, late) if ranks)
    lines = [f"\n  rank {r} {states[r].text}" for r in sorted(next(named, ()))]
    if not lines:
        return None
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return _report(channel, f"{what}:{''.join(lines[:_SHOWN])}{more}", _FIX)


def _reported(channel: Channel) -> LostRankReport | None:
    """Return what another rank has reported, None if none has."""
    key = _key(channel)
    store = channel.presence.store
    return LostRankReport(**json.loads(store.get(key))) if store.check([key]) else None


def _report(channel: Channel, what: str, fix: str) -> LostRankReport:
    """Report to all ranks which are lost, and return the first report."""
    own = json.dumps({"rank": channel.rank, "what": what, "fix": fix})
    first = channel.presence.store.compare_set(_key(channel), "", own)
    return LostRankReport(**json.loads(first))


def _key(channel: Channel) -> str:
    return f"{channel.prefix}/lost"
