"""Draw a plan, and the training step predicted for it on H100s, as SVG.

    python examples/draw_plan.py docs

writes docs/plan.svg and docs/timeline.svg, the two pictures of the README.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import fxpar

COLOURS = {"dp": "#9ecae1", "tp": "#fdae6b", "compute": "#c7c7c7", "wait": "#e34a33"}


def block(x, up, down):
    return x + F.linear(torch.relu(F.linear(x, up)), down)


def box(x, y, width=0.0, fill="none", label=""):
    place = f'x="{x:.0f}" y="{y}" width="{width:.1f}" height="18"'
    shape = f'<rect {place} fill="{fill}" stroke="white"/>'
    return shape + f'<text x="{x + 4:.0f}" y="{y + 13}">{label}</text>'


def svg(height, parts):
    head = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"'
    head += f' font-size="12" viewBox="0 0 760 {height}">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def plan_svg(plan):
    parts, shown = [], [n for n in plan.nodes if "alias" not in n.op][:4]
    for y, node in zip(range(8, 999, 24), shown, strict=False):
        parts.append(box(8, y, label=f"{node.name} = {node.op}"))
        for at, size in enumerate(node.shapes[-1]):
            (axis, *_) = (*node.results[0].dims[at], "")
            label = f"{size} over {axis}" if axis else f"{size} whole"
            parts.append(box(260 + at * 130, y, 126, COLOURS.get(axis, "#eee"), label))
        if node.results != node.settled:
            parts.append(box(520, y, label="a summand, all-reduced over tp"))
    return svg(24 * len(shown) + 12, parts)


def timeline_svg(timeline):
    lanes = list(dict.fromkeys(event.stream for event in timeline.events))
    parts = [box(0, 8 + 24 * y, label=lane) for y, lane in enumerate(lanes)]
    for event in timeline.events:
        x, width = (690 / timeline.seconds * s for s in (event.start, event.duration))
        fill = COLOURS[event.kind if event.kind == "wait" else event.stream]
        parts.append(box(66 + x, 8 + 24 * lanes.index(event.stream), width, fill))
    label = f"{timeline.seconds * 1e3:.2f} ms a step; red: waits for communication"
    parts.append(box(66, 24 * len(lanes) + 8, label=label))
    return svg(24 * len(lanes) + 36, parts)


if __name__ == "__main__":
    os.environ["FXPAR_HARDWARE"], shapes = "h100", [(8192, 4096), (16384, 4096)]
    hints = {"up": ("tp", None), "down": (None, "tp"), "x": ("dp", None)}
    args = [torch.empty(s, device="meta") for s in [*shapes, (4096, 16384)]]
    args = [x.bfloat16().requires_grad_() for x in args]
    plan = fxpar.plan(
        block, *args, mesh="dp=2,tp=4", hints=hints, grad=True, mode="propagate"
    )
    Path(sys.argv[1], "plan.svg").write_text(plan_svg(plan))
    Path(sys.argv[1], "timeline.svg").write_text(timeline_svg(plan.timeline))
