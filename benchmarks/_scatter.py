"""A plot of predicted over measured times, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_COLORS = {
    "mlp": "#4477aa",
    "llama": "#ee6677",
    "gpt2": "#228833",
    "bert": "#ccbb44",
    "vit": "#66ccee",
    "resnet": "#aa3377",
}


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Predicted over measured milliseconds, both logarithmic, as SVG. Filled: cells
    that were looked at; rings: held out. Grey: within 25 %."""
    every = [row[key] for row in rows for key in ("measured", "predicted")]
    low = 10 ** (math.floor(4 * math.log10(min(every))) / 4)
    high = 10 ** (math.ceil(4 * math.log10(max(every))) / 4)
    side, left, top = 420, 70, 20

    def at(seconds: float) -> float:
        return side * math.log(seconds / low) / math.log(high / low)

    def point(x: float, y: float) -> str:
        return f"{left + at(x):.1f},{top + side - at(y):.1f}"

    band = [(low, low * 1.25), (high / 1.25, high), (high, high)]
    band += [(high, high * 0.75), (low / 0.75, low), (low, low)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 500" '
        'font-family="sans-serif" font-size="13" fill="#333">',
        '<rect width="640" height="500" fill="white"/>',
        f'<polygon points="{" ".join(point(x, y) for x, y in band)}" fill="#eee"/>',
        f'<polyline points="{point(low, low)} {point(high, high)}" stroke="#999"/>',
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" '
        'stroke="#333"/>',
        f'<text x="{left + side / 2}" y="490" text-anchor="middle">measured, ms</text>',
        f'<text transform="translate(18 {top + side / 2}) rotate(-90)" '
        'text-anchor="middle">predicted, ms</text>',
    ]
    for tick in (m * 10.0**e for e in range(-3, 1) for m in (1, 2, 5)):
        if low <= tick <= high:
            x, y = left + at(tick), top + side - at(tick)
            parts.append(
                f'<text x="{x:.1f}" y="{top + side + 18}" text-anchor="middle">'
                f'{tick * 1e3:g}</text><text x="{left - 8}" y="{y + 4:.1f}" '
                f'text-anchor="end">{tick * 1e3:g}</text>'
                f'<path d="M{x:.1f} {top + side}v-5M{left} {y:.1f}h5" stroke="#333"/>'
            )
    for row in rows:
        x, y = point(row["measured"], row["predicted"]).split(",")
        color = _COLORS[row["model"]]
        fill = "none" if row["held"] else color
        title = f"{row['model']} {row['mesh']} {row['plan']}"
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{color}" '
            f'stroke-width="2"><title>{title}</title></circle>'
        )
    names = [name for name in _COLORS if any(row["model"] == name for row in rows)]
    for i, name in enumerate(names):
        y = top + 20 + 22 * i
        parts.append(
            f'<circle cx="515" cy="{y}" r="5" fill="{_COLORS[name]}"/>'
            f'<text x="527" y="{y + 4}">{name}</text>'
        )
    y = top + 20 + 22 * len(names)
    parts.append(
        f'<circle cx="515" cy="{y}" r="5" fill="none" stroke="#333" stroke-width="2"/>'
        f'<text x="527" y="{y + 4}">held out</text></svg>'
    )
    return "\n".join(parts) + "\n"
