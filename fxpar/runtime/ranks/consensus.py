"""The ranks of a world agree through the store, without collectives.

Every call of ``agree`` or ``gather`` is a round, numbered per rank. Each rank writes
its part; rank 0 reads all of them and writes one verdict, which every rank raises or
returns. So a round costs each rank two small messages, and ranks that compile different
programs, or fail, are told so instead of waiting in a collective. A rank that fails
writes the verdict of the round it will never reach: ``abort``. A rank that works is
waited for, one that does not for a time (``patience``).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from fxpar.errors import FxparError, RankMismatchError
from fxpar.runtime.ranks import presence, worlds
from fxpar.runtime.ranks.meeting import Channel, answering, current
from fxpar.runtime.ranks.patience import Patience, patience_limit

# Who waits asks at least so often, in seconds; who waits long, after every so much of
# its wait: asking costs 0.2 ms, and the rank that answers as much.
SLOWEST_POLL, OF_WAIT, LONGEST_PAUSE = 0.05, 0.01, 0.2
# Others wait longer for the verdict than rank 0 does for them, so that it arrives.
GRACE = 5.0
DIFF_LINES = 60

SAME = "run the same code, versions and options on every rank, on the same shapes"

# The digest of a rank that asks all ranks to begin again.
VOID = ""

Verdict = dict[str, Any]


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

    ``text`` is what the digest stands for; where digests differ, the first rank that
    differs shows its difference from rank 0's. ``timeout``: seconds to wait for a rank
    that does not work.

    Raises ``error`` on every rank if they differ, RankMismatchError if a rank does not
    come or has failed.
    """
    channel = current()
    if channel is None:
        return digest != VOID

    def judge(digests: Sequence[str]) -> Verdict:
        if VOID in digests:
            return {"void": True}
        differ = [rank for rank, other in enumerate(digests) if other != digest]
        return {"differ": differ, "text": text} if differ else {}

    with answering(channel):
        verdict = _round(channel, tag, digest, judge, timeout)
        if "differ" not in verdict:
            return "void" not in verdict
        diff = _difference(channel, verdict, text, timeout)
    differ = named(verdict["differ"])
    fact = f"ranks disagree about {what}: {differ} from rank {channel.ranks[0]}"
    raise as_told(error(f"{fact}\n{diff}", fix=fix or SAME))


def gather(tag: str, text: str, timeout: float | None = None) -> list[str]:
    """What every rank gave, in order of ranks. Meant for short texts.

    Raises RankMismatchError if a rank does not come, has failed, or gave another tag.
    """
    channel = current()
    if channel is None:
        return [text]

    def judge(texts: Sequence[str]) -> Verdict:
        return {"texts": list(texts)}

    with answering(channel):
        return _round(channel, tag, text, judge, timeout)["texts"]


def leads() -> bool:
    """Whether this is the rank that decides for all."""
    channel = current()
    return channel is None or channel.rank == 0


def round_number() -> int:
    """How many rounds there were, the same on every rank that takes part."""
    channel = current()
    return 0 if channel is None else channel.rounds


def abort(error: BaseException) -> None:
    """Tell ranks that wait for this one, now or at their next round, that it failed.

    They raise RankMismatchError with the message. Does nothing if the failure is one
    that every rank was told.
    """
    channel = current()
    if channel is None or was_told(error):
        return
    channel.rounds += 1
    message = f"{type(error).__name__}: {error}"
    verdict = json.dumps({"failed": channel.presence.rank, "message": message})
    with contextlib.suppress(dist.DistError):  # this rank has an error to raise already
        channel.store.set(channel.key(channel.rounds, "verdict"), verdict)


def as_told(error: FxparError) -> FxparError:
    """The error, marked as one that every rank raises."""
    error.told = True
    return error


def was_told(error: BaseException | None) -> bool:
    """Whether every rank knows of an error, or of what it came from."""
    while error is not None:
        if getattr(error, "told", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def digest_of(text: str) -> str:
    """A digest for ``agree`` where the text has none of its own."""
    return hashlib.sha256(text.encode()).hexdigest()


def _round(
    channel: Channel,
    tag: str,
    value: str,
    judge: Callable[[Sequence[str]], Verdict],
    timeout: float | None,
) -> Verdict:
    """Exchange values; the verdict that rank 0 judged. Raises RankMismatchError."""
    wait = patience_limit() if timeout is None else timeout
    channel.rounds += 1
    number = channel.rounds
    channel.store.set(f"{channel.prefix}/at/{channel.rank}", str(number))
    part = json.dumps({"tag": tag, "value": value})
    channel.store.set(channel.key(number, channel.rank), part)
    text = f"waits for others at {tag!r}"
    with presence.waits(text, channel.counter("rounds"), number):
        if channel.rank == 0:
            _judge_round(channel, tag, judge, wait)
        else:
            _await_verdict(channel, tag, wait)
    verdict = json.loads(channel.read(channel.key(number, "verdict")))
    _raise_if_failed(channel, verdict)
    _forget(channel, number - 1)
    return verdict


def _raise_if_failed(channel: Channel, verdict: Verdict) -> None:
    if "failed" in verdict:
        what = f"rank {verdict['failed']} failed:\n{verdict['message']}"
        fix = "this rank only stopped with it: look at that rank's error"
    elif "late" in verdict:
        what = verdict["late"]
        fix = (
            "a rank ended, hangs, or does not compile what others do: see its output, "
            "and TORCH_LOGS=recompiles for graphs that only some ranks compile"
        )
    elif "tags" in verdict:
        tags = verdict["tags"]
        first = next(r for r, tag in enumerate(tags) if tag != tags[0])
        what = f"rank {channel.ranks[first]} is at {tags[first]!r}, "
        what += f"rank {channel.ranks[0]} at {tags[0]!r}"
        fix = (
            "a graph was compiled on some ranks only: see TORCH_LOGS=recompiles; feed "
            "every rank the same shapes and take the same branches"
        )
    else:
        return
    raise as_told(RankMismatchError(what, fix=fix))


def _await_verdict(channel: Channel, tag: str, wait: float) -> None:
    """Wait for rank 0, and then as long as it waits for the others.

    Raises RankMismatchError if it does not come, and leaves word for when it does.
    """
    number, leader = channel.rounds, channel.ranks[0]
    verdict, first = channel.key(number, "verdict"), channel.key(number, 0)

    def missing() -> list[int]:
        return [] if channel.has(first) else [leader]

    come = channel.patience(wait)
    if poll(lambda: channel.has(verdict) or channel.has(first), come, missing):
        patience = channel.patience(wait + GRACE)
        if poll(lambda: channel.has(verdict), patience, missing):
            return
    what = (
        f"rank {leader} did not come to {tag!r} (round {number}) in {come.waited()}"
        f"{come.tell([leader])}"
    )
    message = json.dumps(
        {"tag": tag, "gone": f"rank {channel.presence.rank} waits no more: {what}"}
    )
    channel.store.set(channel.key(number, channel.rank), message)
    raise as_told(
        RankMismatchError(
            what,
            fix=f"see what rank {leader} printed; it may wait in a collective or have "
            "ended",
        )
    )


def _judge_round(
    channel: Channel, tag: str, judge: Callable[[Sequence[str]], Verdict], wait: float
) -> None:
    """Rank 0: wait for all parts, write the verdict, unless a failed rank did."""
    number = channel.rounds
    verdict_key = channel.key(number, "verdict")
    keys = [channel.key(number, rank) for rank in range(channel.size)]
    key_of = dict(zip(channel.ranks, keys, strict=True))

    def done() -> bool:
        return channel.has(*keys) or channel.has(verdict_key)

    def missing() -> list[int]:
        return [rank for rank, key in key_of.items() if not channel.has(key)]

    patience = channel.patience(wait)
    if not poll(done, patience, missing):
        reason = _lateness(channel, tag, missing(), patience.waited())
        verdict: Verdict = {"late": reason + patience.tell(missing())}
    elif channel.has(verdict_key):
        return
    else:
        parts = [json.loads(channel.read(key)) for key in keys]
        tags = [part["tag"] for part in parts]
        reasons = [part["gone"] for part in parts if "gone" in part]
        if reasons:
            verdict = {"late": reasons[0]}
        elif len(set(tags)) > 1:
            verdict = {"tags": tags}
        else:
            verdict = judge([part["value"] for part in parts])
    channel.store.set(verdict_key, json.dumps(verdict))


def _lateness(channel: Channel, tag: str, missing: Sequence[int], wait: str) -> str:
    counts = []
    for rank in missing:
        at = f"{channel.prefix}/at/{channel.ranks.index(rank)}"
        last = int(channel.read(at)) if channel.has(at) else 0
        counts.append(f"rank {rank} came to round {last}")
    return (
        f"{listed(missing)} did not come to {tag!r} in {wait}: rank "
        f"{channel.ranks[0]} is at round {channel.rounds}, {', '.join(counts)}"
    )


def _difference(
    channel: Channel, verdict: Verdict, text: str, timeout: float | None
) -> str:
    """Unified diff of the first rank that differs against rank 0."""
    rank, key = verdict["differ"][0], channel.key(channel.rounds, "text")
    wait = patience_limit() if timeout is None else timeout
    patience, first = channel.patience(wait), channel.ranks[rank]
    if channel.rank == rank:
        channel.store.set(key, text)
    elif poll(lambda: channel.has(key), patience, lambda: [first]):
        text = channel.read(key)
    else:
        return f"(rank {first} did not send its text)"
    before, after = verdict["text"].splitlines(), text.splitlines()
    names = f"rank {channel.ranks[0]}", f"rank {first}"
    lines = list(difflib.unified_diff(before, after, *names, lineterm="", n=1))
    if len(lines) > DIFF_LINES:
        lines[DIFF_LINES:] = [f"... {len(lines) - DIFF_LINES} more lines"]
    return "\n".join(lines) or "(their texts are equal, their digests are not)"


def named(ranks: Sequence[int]) -> str:
    """Ranks of the current world, in words, as users number them."""
    return listed([worlds.global_rank(rank) for rank in ranks])


def listed(ranks: Sequence[int]) -> str:
    """Numbers of ranks, in words."""
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def poll(
    done: Callable[[], bool], patience: Patience, missing: Callable[[], Sequence[int]]
) -> bool:
    """Whether ``done`` holds before patience is over; asks ever more seldom."""
    pause, begin = 0.0005, time.monotonic()
    while not done():
        if patience.is_over(missing):
            return done()
        time.sleep(pause)
        slowest = max(SLOWEST_POLL, OF_WAIT * (time.monotonic() - begin))
        pause = min(pause * 1.5, slowest, LONGEST_PAUSE)
    return True


def _forget(channel: Channel, number: int) -> None:
    """Delete a round that every rank has read, since all came to the one after it."""
    channel.store.delete_key(channel.key(number, channel.rank))
    if channel.rank == 0:
        for name in ("verdict", "text"):
            channel.store.delete_key(channel.key(number, name))
