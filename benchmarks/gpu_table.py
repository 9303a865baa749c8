"""The table that ``one_gpu.py`` ends with.

In: what parts told, targets. Out: rows, one for each check and each figure over all its
cases, with a verdict; and their text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_parts import Outcome


@dataclass(frozen=True)
class Target:
    """``limit``: at least (``sign`` ">=") or at most ("<="); "" judges nothing.
    ``near``: a target by distance from the prediction, relative."""

    what: str
    sign: str = ""
    limit: float = 0.0
    near: float = 0.0


def rows_of(
    outcomes: Mapping[str, Outcome], targets: Mapping[str, Target], *, judged: bool
) -> list[dict[str, Any]]:
    """Rows of the table: checks, figures by name over all cases, parts that ended
    otherwise than well."""
    out = []
    for name, outcome in outcomes.items():
        for row in outcome.rows:
            if "check" in row:
                out.append(_check_row(name, row))
        values: dict[str, list[dict[str, Any]]] = {}
        for row in outcome.rows:
            if "value" in row:
                values.setdefault(row["value"], []).append(row)
        found = [
            _value_row(name, key, targets[key], cases) for key, cases in values.items()
        ]
        if not judged:  # of a try-out nothing is asked
            found = [row | {"verdict": "tried"} for row in found]
        out += found
        if outcome.status != "done":
            out.append(_lost_row(name, outcome))
    return out


def _row(part: str, id: str, what: str, **more: str) -> dict[str, Any]:
    blank = {"measured": "", "predicted": "", "target": "", "verdict": ""}
    return {"part": part, "id": id, "what": what, **blank, **more}


def _check_row(part: str, row: Mapping[str, Any]) -> dict[str, Any]:
    worst = row["worst"]
    measured = "" if worst is None else f"{worst:.2g}"
    verdict = "ok" if row["ok"] else "FAILED"
    what = f"{row['check']}  {row.get('note', '')}".strip()
    return _row(part, part, what, measured=measured, verdict=verdict)


def _value_row(
    part: str, key: str, target: Target, cases: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    found = sorted(cases, key=lambda row: row["measured"])
    low, high = found[0], found[-1]
    measured = f"{low['measured']:.3g}"
    if len(found) > 1:
        measured = f"{low['measured']:.3g} ({low['case']}) to {high['measured']:.3g}"
        measured += f" ({high['case']})"
    predicted = [row["predicted"] for row in found if row["predicted"] is not None]
    text = ""
    if predicted:
        ends = {f"{x:.3g}": None for x in (min(predicted), max(predicted))}
        text = " to ".join(ends)
    goal = f"{target.sign} {target.limit:g}" if target.sign else ""
    goal = f"within {target.near:.0%}" if target.near else goal
    verdict = verdict_of(target, found)
    given = {"measured": measured, "predicted": text, "target": goal}
    return _row(part, key, target.what, **given, verdict=verdict)


def verdict_of(target: Target, cases: Sequence[Mapping[str, Any]]) -> str:
    """Of all cases: "ok", "miss" if one misses, or "" where nothing is asked."""
    if target.near:
        away = [abs(row["measured"] / row["predicted"] - 1.0) for row in cases]
        return "ok" if max(away) <= target.near else "miss"
    if not target.sign:
        return ""
    least = target.sign == ">="
    fits = [
        row["measured"] >= target.limit if least else row["measured"] <= target.limit
        for row in cases
    ]
    return "ok" if all(fits) else "miss"


def _lost_row(part: str, outcome: Outcome) -> dict[str, Any]:
    why = {
        "skipped": "no time was left",
        "late": f"ended after {outcome.seconds:.0f} s",
        "failed": _last_line(outcome.tail),
        "lacks": _last_line(outcome.tail),
    }[outcome.status]
    failed = outcome.status not in ("skipped", "lacks")
    return _row(part, part, why, verdict="FAILED" if failed else "skipped")


def _last_line(text: str) -> str:
    """Of the first rank's that is shown: what it says of its failure."""
    ours = text.split("--- rank ")[1] if "--- rank " in text else text
    lines = [line.strip() for line in ours.splitlines() if line.strip()]
    return lines[-1][:90] if lines else "ended"


def facts_of(outcomes: Mapping[str, Outcome]) -> str:
    """The machine, in a line."""
    found: dict[str, Any] = {}
    for outcome in outcomes.values():
        for row in outcome.rows:
            found |= row.get("facts", {})
    clocks = found.get("clocks_busy", {})
    words = [
        f"{k} {found[k]}" for k in ("gpu", "torch", "triton", "cuda") if k in found
    ]
    words += [
        f"{k} {clocks[k]}" for k in ("driver_version", "clocks.sm") if k in clocks
    ]
    return ", ".join(words)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table, in some 45 lines if nothing fails."""
    names = ("id", "what", "measured", "predicted", "target", "verdict")
    for row in (dict(zip(names, names, strict=True)), *rows):
        line = f"{row['id']:<12.12} {row['what']:<60.60} {row['measured']:<44.44} "
        line += f"{row['predicted']:<14.14} {row['target']:<10.10} {row['verdict']}"
        print(line.rstrip())
