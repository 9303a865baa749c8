"""Dims over which windows slide, as factors: those of convolutions and pools.

In: sizes of a dim and its windows. Out: words for a rule, and the rows that windows of
a shard reach beyond it (``Halo``). A window starts at each step of ``stride`` rows, so
a dim of ``many`` rows and one of ``few`` windows are split alike where
``many = few * stride``: the first is ``(o s!)``, the second ``o``. Where that does not
hold the dim is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpar.sharding.factors import Halo, Reach, RowWindow, Rule, parse_rule


@dataclass(frozen=True)
class SlidingWindow:
    """How windows slide over one dim, in rows."""

    # How many each window reads.
    kernel: int
    # From one window to the next.
    stride: int = 1
    # At each end of the dim.
    padding: int = 0
    # From one row of a window to the next.
    dilation: int = 1

    @property
    def is_row(self) -> bool:
        """Whether each window is the row at its place."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    @property
    def behind(self) -> int:
        """Rows that the last window of a shard reaches beyond it; of the last windows
        that start within the shard some lie before its end where this is negative."""
        return self.dilation * (self.kernel - 1) - self.padding - (self.stride - 1)

    @property
    def reach(self) -> Reach:
        """The rows that each window reads."""
        span = self.dilation * (self.kernel - 1) + 1
        return Reach(self.stride, first=-self.padding, span=span)

    def count(self, rows: int, ceil: bool = False) -> int:
        """Windows of a dim of so many rows, padded at both ends; with ``ceil`` also one
        that ends behind, if it starts before that."""
        steps = rows + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        if not ceil:
            return steps // self.stride + 1
        more = -(-steps // self.stride)
        return more + (more * self.stride < rows + self.padding)

    def fits(self, many: int, few: int) -> bool:
        """Whether shards of rows and shards of windows are laid out alike."""
        return few * self.stride == many and -self.behind < self.stride

    def counts_all(self, padding: bool) -> bool:
        """Whether every window of a dim that it fits has all its rows counted, those of
        the padding too or not."""
        return self.behind <= self.padding * padding and (padding or not self.padding)


def each(numbers: int | Sequence[int], k: int) -> list[int]:
    """One number per dim, where one may stand for all."""
    values = [numbers] if isinstance(numbers, int) else [*numbers]
    return values * k if len(values) == 1 else values


def windows(
    kernel: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    k: int,
) -> list[SlidingWindow]:
    """The windows of ``k`` dims; an empty stride is the kernel's size."""
    sizes = each(kernel, k)
    steps = each(stride, k) if stride or stride == 0 else sizes
    rest = each(padding, k), each(dilation, k)
    return [
        SlidingWindow(*numbers) for numbers in zip(sizes, steps, *rest, strict=True)
    ]


@dataclass(frozen=True)
class SpatialDims:
    """The words of dims that windows slide over."""

    # One of each dim, of the tensor that has rows.
    many: list[str]
    # One of each dim, of the tensor that has windows.
    few: list[str]
    # Of factors that the words name.
    sizes: tuple[tuple[str, int], ...]
    # (number among these dims, rows before, rows behind)
    reach: tuple[tuple[int, int, int], ...]
    # (number among these dims, rows, windows, what each of these reads, its halo where
    # shards fit)
    read: tuple[tuple[int, int, int, Reach, tuple[int, int] | None], ...] = ()
    # Words of dims each of whose windows is the row at its place.
    plain: frozenset[str] = frozenset()

    @property
    def free(self) -> frozenset[str]:
        """Factors that an axis may split into equal shards."""
        apart = {self.few[d] for d, *_ in self.read}
        free = frozenset(word for word in self.few if not word.endswith("!"))
        return free - apart - self.plain

    def halos(self, position: int, first: int) -> tuple[Halo, ...]:
        """Those of a tensor that has rows, whose dims here start with ``first``."""
        return tuple(Halo(position, first + d, a, b) for d, a, b in self.reach)

    def windows(self, position: int, first: int, other: int) -> tuple[RowWindow, ...]:
        """Those of that tensor, which another one has windows of."""
        return tuple(
            RowWindow(position, first + d, other, rows, count, reach, halo)
            for d, rows, count, reach, halo in self.read
        )


def spatial_dims(
    slid: Sequence[SlidingWindow],
    many: Sequence[int],
    few: Sequence[int],
    may: Callable[[SlidingWindow], bool] = lambda window: True,
    *,
    sliding: bool = True,
) -> SpatialDims:
    """Words of dims of these sizes, windows ``slid`` over them; ``may``: whether such a
    dim may be split as halos are; ``sliding``: whether others may be split at all, and
    those that ranks do not share alike."""
    many_words, few_words, sizes, reach, read = [], [], [], [], []
    for d, (window, n, count) in enumerate(zip(slid, many, few, strict=True)):
        word = f"o{d}"
        fits = window.fits(int(n), int(count)) and may(window)
        ends = window.padding, max(0, window.behind)
        if sliding and _may_slide(window, n, count):
            many_words.append(word)
            few_words.append(word)
            read.append((d, n, count, window.reach, ends if fits else None))
            continue
        many_words.append(word if fits else "_")
        few_words.append(word if fits else f"{word}!")
        if fits and window.stride > 1:
            many_words[-1] = f"({word} s{d}!)"
            sizes.append((f"s{d}", window.stride))
        if fits and any(ends):
            reach.append((d, *ends))
    plain = frozenset(few_words[d] for d, w in enumerate(slid) if w.is_row)
    return SpatialDims(
        many_words, few_words, tuple(sizes), tuple(reach), tuple(read), plain
    )


def _may_slide(window: SlidingWindow, rows: int, count: int) -> bool:
    """Whether ranks may read windows of a dim of so many rows."""
    is_told = isinstance(rows, int) and isinstance(count, int)
    return is_told and count > 1 and not window.is_row


def sliding_rule(
    rule: str,
    spatial: SpatialDims,
    halos: tuple[Halo, ...] = (),
    windows: tuple[RowWindow, ...] = (),
    groups: int = 1,
) -> Rule:
    """The rule with the sizes, halos and windows of its spatial dims."""
    sizes = (("g", groups),) if groups > 1 else ()
    return replace(
        parse_rule(rule),
        sizes=(*sizes, *spatial.sizes),
        evenly=spatial.free,
        halos=halos,
        windows=windows,
    )
