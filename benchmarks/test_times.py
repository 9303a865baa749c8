"""Write the slowest tests of a run to results/test_times.md.

    make test ARGS=--durations=40 | python benchmarks/test_times.py

In: what pytest prints. Out: a table of setups, calls and teardowns, slowest first, and
the total. Raises SystemExit where the log has no durations.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "test_times.md"
LINE = re.compile(r"^([\d.]+)s (setup|call|teardown) +(.+)$", re.M)


def table(log: str) -> str:
    """The durations of a log as Markdown."""
    rows = LINE.findall(log)
    totals = re.findall(r"^=* ?(\d+ passed.* in [\d.]+s.*?) ?=*$", log, re.M)
    if not rows or not totals:
        raise SystemExit("no durations: run pytest with --durations=40")
    head = (
        f"# Times of the tests\n\n{totals[-1]}\n\n| seconds | | test |\n|---|---|---|\n"
    )
    lines = (f"| {seconds} | {when} | `{test}` |\n" for seconds, when, test in rows)
    return head + "".join(lines)


if __name__ == "__main__":
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(table(sys.stdin.read()))
    print(RESULT)
