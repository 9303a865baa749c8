"""The rule an op might have, read off the shapes of one call, for a message."""

from __future__ import annotations

import string
from collections.abc import Sequence

from fxpar.errors import RuleError
from fxpar.sharding.factors import parse_rule

Shape = Sequence[int]


def example(operands: Sequence[Shape], results: Sequence[Shape]) -> str | None:
    """A rule that fits tensors of these shapes, or None if text has no rule for them,
    or nothing in it could be split. Dims of one size share a factor, those at the same
    place first; what stands on one side of the arrow only stays whole."""
    shapes, sizes = [*operands, *results], dict[str, int]()
    words = [_words(shape, sizes) for shape in shapes]
    read, made = (
        {name for dims in side for name in dims}
        for side in (words[: len(operands)], words[len(operands) :])
    )
    whole = (read ^ made) - {"_"}
    text = [
        " ".join(f"{name}!" if name in whole else name for name in dims)
        for dims in words
    ]
    rule = f"{', '.join(text[: len(operands)])} -> {', '.join(text[len(operands) :])}"
    try:
        return rule if parse_rule(rule).with_sizes(shapes).free else None
    except RuleError:
        return None


def _words(shape: Shape, sizes: dict[str, int]) -> list[str]:
    """A factor for each dim; ``sizes`` has those there are, and gets the new ones."""
    out: list[str] = []
    for i, size in enumerate(shape):
        fits = [name for name, n in sizes.items() if n == size and name not in out]
        letters = iter([*string.ascii_lowercase, *(f"d{k}" for k in range(99))])
        if size == 1:
            name = "_"
        elif fits:
            name = next((f for f in fits if list(sizes).index(f) == i), fits[0])
        else:
            name = next(x for x in letters if x not in sizes)
            sizes[name] = size
        out.append(name)
    return out
