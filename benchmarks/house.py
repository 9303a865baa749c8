"""The floors of the package as a picture, docs/architecture.svg, and as a table.

    python benchmarks/house.py [--write]

In: the floors that ``tests/test_imports.py`` holds imports to. Out: files and lines of
each room; with ``--write`` the picture, in which a room imports from its own floor and
from lower ones, and rooms of features are set apart by their colour. A test compares
the picture with the floors.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PICTURE = ROOT / "docs" / "architecture.svg"
# Coloured as rooms of features are, though the core enters them.
OPTIONAL = {"runtime/calibrate", "fusion/kernels"}
WIDTH, ROW, GAP, EDGE = 860, 34, 6, 12
_INK = {False: ("#e8eef7", "#3a5a8c"), True: ("#fdf0dc", "#a06a10")}


def floors() -> list[list[str]]:
    """Rooms of each floor, the entries first; a folder has its own folders as rooms."""
    from tests.test_imports import LEVELS

    placed = {part for parts in LEVELS for part in parts}
    return [sorted(_rooms(parts, placed)) for parts in reversed(LEVELS)]


def _rooms(parts: Iterable[str], placed: Collection[str]) -> Iterator[str]:
    for part in parts:
        yield part
        inner = sorted((ROOT / "fxpar" / part).glob("*/*.py"))
        rooms = dict.fromkeys(f"{part}/{file.parent.name}" for file in inner)
        yield from (room for room in rooms if room not in placed)


def picture() -> str:
    """Draw the floors."""
    from tests.test_imports import ROOMS

    boxes, y = [], EDGE
    for rooms in floors():
        x = EDGE
        for room in rooms:
            width = 16 + 7 * len(room)
            if x + width > WIDTH - EDGE:
                x, y = EDGE, y + ROW
            fill, line = _INK[room in ROOMS | OPTIONAL]
            boxes.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="{ROW - GAP}" rx="4" '
                f'fill="{fill}" stroke="{line}"/><text x="{x + 8}" y="{y + 18}">'
                f"{html.escape(room)}</text>"
            )
            x += width + GAP
        y += ROW + GAP
        boxes.append(
            f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y - GAP}" y2="{y - GAP}" '
            'stroke="#c8ccd2"/>'
        )
        y += GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        'font-family="monospace" font-size="11">'
        f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>'
    )
    return "\n".join([head, *boxes[:-1], "</svg>", ""])


def table() -> str:
    """Files and lines of each room, those of its own folders left out."""
    lines = []
    for room in (room for rooms in floors() for room in rooms):
        path = ROOT / "fxpar" / room
        files = [*path.glob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        count = sum(len(file.read_text().splitlines()) for file in files)
        lines.append(f"{room:32} {len(files):4} {count:6}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the picture")
    if parser.parse_args().write:
        PICTURE.write_text(picture())
    print(table())


if __name__ == "__main__":
    main()
