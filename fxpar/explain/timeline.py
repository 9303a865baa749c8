"""Write a predicted timeline in Chrome's trace event format, for ui.perfetto.dev.

In: a Timeline. Out: a dict to be written as JSON: one process, the rank; a thread for
each stream; arrows from collectives to their waits; a counter of memory. Never: a
simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fxpar.passes.simulate.simulate_step import COMPUTE, PLACE_STREAM, Event, Timeline

_PROCESS = 0


def chrome_trace(
    timeline: Timeline, specs: Mapping[str, Any] | None = None, name: str = "rank"
) -> dict[str, Any]:
    """Return the trace. ``specs``: of values of the one-device graph, by name, for the
    arguments of events. ``name``: of the process."""
    threads = {COMPUTE: 0}
    for event in timeline.events:
        threads.setdefault(event.stream, len(threads))
    events = [*_names(threads, name)]
    timed = [*_slices(timeline, threads, specs or {})]
    for time, nbytes in timeline.memory:
        memory = {"ph": "C", "tid": 0, "name": "memory", "args": {"bytes": nbytes}}
        timed.append({**memory, "ts": _micro(time)})
    if timeline.backward is not None:
        mark = {"ph": "i", "name": "backward", "s": "p", "tid": threads[COMPUTE]}
        timed.append({**mark, "ts": _micro(timeline.backward)})
    timed.sort(key=lambda event: event["ts"])  # stable: an arrow stays before its wait
    events += [{"pid": _PROCESS, **event} for event in timed]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _micro(seconds: float) -> float:
    """Return microseconds, the format's unit, to the nanosecond, its resolution."""
    return round(seconds * 1e6, 3)


def _names(threads: Mapping[str, int], name: str) -> Iterator[dict[str, Any]]:
    """Yield names of the process and its threads, and the order to show them in."""
    about = {"ph": "M", "pid": _PROCESS}
    yield {**about, "tid": 0, "name": "process_name", "args": {"name": name}}
    for stream, tid in threads.items():
        computes = stream == COMPUTE or stream.startswith(PLACE_STREAM)
        row_name = stream if computes else f"communication {stream}"
        yield {**about, "tid": tid, "name": "thread_name", "args": {"name": row_name}}
        order = {"sort_index": tid}
        yield {**about, "tid": tid, "name": "thread_sort_index", "args": order}


def _slices(
    timeline: Timeline, threads: Mapping[str, int], specs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield events that run, and arrows: that of a wait begins in its collective and
    ends in the wait or, where nothing was left to wait for, at the next event on its
    thread."""
    running: dict[str, Event] = {}
    for i, event in enumerate(timeline.events):
        start = _micro(event.start)
        place = {"tid": threads[event.stream]}
        sliced = {
            "ph": "X",
            **place,
            "name": event.name if event.stream == COMPUTE else event.kind,
            "cat": event.kind,
            "ts": start,
            "dur": round(_micro(event.end) - start, 3),
            "args": _arguments(event, specs),
        }
        if event.axes:
            running[event.name] = event
        if event.of is None:
            yield sliced
            continue
        collective = running[event.of]
        arrow = {"cat": "wait", "name": collective.kind, "id": i}
        began = _micro(collective.start)
        yield {"ph": "s", "tid": threads[collective.stream], "ts": began, **arrow}
        if sliced["dur"]:
            yield sliced
            yield {"ph": "f", "bp": "e", **place, "ts": max(start, began), **arrow}
        else:
            yield {"ph": "f", **place, "ts": start, **arrow}
            yield sliced


def _arguments(event: Event, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the viewer shows of an event; what does not apply is left out."""
    arguments = {
        "node": event.name,
        "bytes": event.bytes,
        "flops": event.flops,
        "axes": "+".join(event.axes),
        "ops": event.nodes if event.nodes > 1 else 0,
        "waits for": event.of,
        "spec": str(specs.get(event.origin or "", "")),
        "source": event.line,
    }
    return {key: value for key, value in arguments.items() if value}
