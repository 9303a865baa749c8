"""Formats seconds, bytes and source lines as text that a person reads; digests text.

In: numbers, lines, text. Out: text. Never: knows what they measure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def short_seconds(seconds: float) -> str:
    """Format seconds as ``1.23 ms``."""
    scale, unit = _unit(seconds, _SECONDS)
    return f"{round(seconds / scale, 3):.3g} {unit}"


def short_bytes(nbytes: float) -> str:
    """Format bytes as ``116.3 GB``; a GB has 1e9 bytes."""
    scale, unit = _unit(nbytes, _BYTES)
    return f"{nbytes / scale:.4g} {unit}"


def percent_more(seconds: float, than: float) -> str:
    """Format how much longer ``seconds`` are, as ``+3.2%``."""
    return f"{(seconds / than - 1) * 100:+.3g}%"


def difference(after: float, before: float, text_of: Callable[[float], str]) -> str:
    """Format a change as ``1.23 ms less``."""
    return f"{text_of(abs(after - before))} {'less' if after < before else 'more'}"


def sizes_as_text(*sizes: float) -> list[str]:
    """Format sizes in short units, or all as whole bytes if two different sizes would
    have the same text."""
    texts = list(map(short_bytes, sizes))
    is_ambiguous = len(set(texts)) < len(set(sizes))
    return [f"{size:,.0f} bytes" for size in sizes] if is_ambiguous else texts


def short_place(line: str) -> str:
    """Cut the folder of installed packages off a source line."""
    return line.rpartition("site-packages/")[2]


def _unit(number: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit that a number reaches, else the smallest."""
    return next((unit for unit in units if number >= unit[0]), units[-1])


def digest(text: str, digits: int = 16) -> str:
    """Return the first hexadecimal digits of a text's SHA-256, of 64."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
