"""The floors of the package as a picture, docs/architecture.svg, and as a table.

    python benchmarks/house.py [--write | --entered [--list]]

In: the floors that ``tests/test_imports.py`` holds imports to. Out: files and lines of
each room; with ``--write`` the picture, in which a room imports from its own floor and
from lower ones, and rooms of features are set apart by their colour. A test compares
the picture with the floors. With ``--entered``: how many files ``fxpar.plan`` enters,
which have a function that runs after all are imported; with ``--list`` which, with how
many functions and calls.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

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


def files_entered(call: Callable[[], Any]) -> dict[str, Counter[str]]:
    """{file of the package that a call enters: how often its functions ran}."""
    entered, root = dict[str, Counter[str]](), str(ROOT / "fxpar") + "/"
    imports = 0  # that are under way

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal imports
        code = frame.f_code
        if code.co_name == "<module>":
            imports += (event == "call") - (event == "return")
        elif event == "call" and not imports and code.co_filename.startswith(root):
            file = code.co_filename.removeprefix(root)
            entered.setdefault(file, Counter())[code.co_qualname] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def plans() -> dict[str, Callable[[], Any]]:
    """The two products of docs/explanation/architecture.md, and a dense Llama of two
    layers with its gradients, over two ranks."""
    import torch
    from _common import llama

    import fxpar

    os.environ.pop("FXPAR_SCHEDULE", None)  # as users have it, which _common does not

    def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w1) @ w2

    inputs = torch.randn(8, 64), torch.randn(64, 64), torch.randn(64, 64)
    hints = {"w1": (None, "tp")}
    model, ids = llama(2, scale="tiny"), torch.zeros(2, 16, dtype=torch.long)
    options: dict[str, Any] = {"mesh": "tp=2", "mode": "propagate"}
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    return {
        "mlp": lambda: fxpar.plan(mlp, *inputs, hints=hints, **options),
        "llama": lambda: fxpar.plan(model, **batch, grad=True, **options),
    }


def print_entered(*, listed: bool) -> None:
    """Print how many files each plan enters, and with ``listed`` which."""
    for name, call in plans().items():
        entered = files_entered(call)
        functions = sum(map(len, entered.values()))
        print(f"{name}: {len(entered)} files, {functions} functions")
        for file in sorted(entered) if listed else ():
            ran = entered[file]
            some = ", ".join(name for name, _ in ran.most_common(4))
            print(f"    {file:48} {len(ran):3} {ran.total():6} {some}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the picture")
    parser.add_argument("--entered", action="store_true", help="count files entered")
    parser.add_argument("--list", action="store_true", help="and print which")
    args = parser.parse_args()
    if args.entered:
        print_entered(listed=args.list)
        return
    if args.write:
        PICTURE.write_text(picture())
    print(table())


if __name__ == "__main__":
    main()
