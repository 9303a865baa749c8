"""Gives words to dims over which windows slide, in convolutions and pools.

A window starts at each step of ``stride`` rows, so a dim of ``many`` rows and one of
``few`` windows have matching shards where ``many = few * stride``: the first is ``(o
s!)``, the second ``o``. Where that does not hold ranks read windows of rows, or the dim
is whole.
In: sizes of a dim and its windows. Out: words for a rule, and the rows that windows of
a shard reach beyond it (``RowWindow``).
Never: knows a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpar.sharding.factors import Reach, RowWindow, Rule, parse_rule


@dataclass(frozen=True)
class SlidingWindow:
    """Describes how windows slide over one dim, in rows."""

    # Rows that each window reads.
    kernel: int
    # From one window to the next.
    stride: int = 1
    # At each end of the dim.
    padding: int = 0
    # From one row of a window to the next.
    dilation: int = 1

    @property
    def is_row(self) -> bool:
        """Return whether each window is the row at its place."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    @property
    def overhang(self) -> int:
        """Return the rows that the last window of a shard reaches beyond the shard;
        negative where the last windows that start within the shard end before it
        does."""
        return self.dilation * (self.kernel - 1) - self.padding - (self.stride - 1)

    @property
    def reach(self) -> Reach:
        """Return the rows that each window reads."""
        span = self.dilation * (self.kernel - 1) + 1
        return Reach(self.stride, first=-self.padding, span=span)

    def count(self, rows: int, ceil: bool = False) -> int:
        """Return the number of windows of a dim of ``rows`` rows, padded at both ends;
        with ``ceil`` including one that ends after the padding, if it starts before
        that."""
        steps = rows + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        if not ceil:
            return steps // self.stride + 1
        more = -(-steps // self.stride)
        return more + (more * self.stride < rows + self.padding)

    def fits(self, many: int, few: int) -> bool:
        """Return whether shards of rows and shards of windows match."""
        return few * self.stride == many and -self.overhang < self.stride

    def is_counting_all(self, padding: bool) -> bool:
        """Return whether every window of a dim that it fits counts all its rows.
        ``padding``: whether rows of the padding are counted."""
        return self.overhang <= self.padding * padding and (padding or not self.padding)


def each(numbers: int | Sequence[int], k: int) -> list[int]:
    """Return one number per dim, where one number may be given for all."""
    values = [numbers] if isinstance(numbers, int) else [*numbers]
    return values * k if len(values) == 1 else values


def windows(
    kernel: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    k: int,
) -> list[SlidingWindow]:
    """Return the windows of ``k`` dims; an empty stride is the kernel's size."""
    sizes = each(kernel, k)
    steps = each(stride, k) if stride or stride == 0 else sizes
    rest = each(padding, k), each(dilation, k)
    return [
        SlidingWindow(*numbers) for numbers in zip(sizes, steps, *rest, strict=True)
    ]


@dataclass(frozen=True)
class SpatialDims:
    """Holds the words of dims that windows slide over."""

    # One for each dim, of the tensor that has rows.
    many: list[str]
    # One for each dim, of the tensor that has windows.
    few: list[str]
    # (factor, size) of factors in compound words.
    sizes: tuple[tuple[str, int], ...]
    # The windows of each dim in which a shard needs more rows; the dims' numbers among
    # these dims.
    read: tuple[RowWindow, ...] = ()
    # Words of dims where each window is the row at its place.
    plain: frozenset[str] = frozenset()

    @property
    def free(self) -> frozenset[str]:
        """Return the factors that an axis may split, but only into equal shards."""
        read_words = {self.few[w.dim] for w in self.read if w.reach is not None}
        free = frozenset(word for word in self.few if not word.endswith("!"))
        return free - read_words - self.plain

    def windows(self, position: int, first: int) -> tuple[RowWindow, ...]:
        """Return the windows of a tensor that has rows, whose spatial dims start at
        ``first``."""
        return tuple(
            replace(window, position=position, dim=first + window.dim)
            for window in self.read
        )


def spatial_dims(
    slid: Sequence[SlidingWindow],
    many: Sequence[int],
    few: Sequence[int],
    may: Callable[[SlidingWindow], bool] = lambda window: True,
    *,
    sliding: bool = True,
) -> SpatialDims:
    """Return the words of dims of these sizes with windows ``slid`` over them. ``may``:
    whether a dim may be split as halos are; ``sliding``: whether dims whose shards do
    not match, or are unequal, may be split at all."""
    many_words, few_words, sizes, read = [], [], [], []
    for d, (window, n, count) in enumerate(zip(slid, many, few, strict=True)):
        word = f"o{d}"
        fits = window.fits(int(n), int(count)) and may(window)
        ends = window.padding, max(0, window.overhang)
        if sliding and _can_slide(window, n, count):
            many_words.append(word)
            few_words.append(word)
            halo = ends if fits else None
            read.append(RowWindow(0, d, n, count, window.reach, halo))
            continue
        many_words.append(word if fits else "_")
        few_words.append(word if fits else f"{word}!")
        if fits and window.stride > 1:
            many_words[-1] = f"({word} s{d}!)"
            sizes.append((f"s{d}", window.stride))
        if fits and any(ends):
            read.append(RowWindow(0, d, halo=ends))
    plain = frozenset(few_words[d] for d, w in enumerate(slid) if w.is_row)
    return SpatialDims(many_words, few_words, tuple(sizes), tuple(read), plain)


def _can_slide(window: SlidingWindow, rows: int, count: int) -> bool:
    """Return whether ranks may read windows of a dim of ``rows`` rows."""
    is_known = isinstance(rows, int) and isinstance(count, int)
    return is_known and count > 1 and not window.is_row


def sliding_rule(
    rule: str,
    spatial: SpatialDims,
    windows: tuple[RowWindow, ...],
    groups: int = 1,
) -> Rule:
    """Return the rule with the sizes and windows of its spatial dims."""
    sizes = (("g", groups),) if groups > 1 else ()
    return replace(
        parse_rule(rule),
        sizes=(*sizes, *spatial.sizes),
        evenly=spatial.free,
        windows=windows,
    )
