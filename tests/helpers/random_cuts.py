"""Random programs of what reads rows of a dim by their places: stencils, rows one by
one or in turn, repeats, lookups in each row, bags, images that are resampled or sampled
by a grid. ``CutsCase(seed)`` grows them among the statements of ``random_programs``."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.helpers.random_programs import ELEMENTS, OPS, Case


def stencil(c: Case) -> str | None:
    x = c.pick(1, 4, lambda x: max(x.shape) > 3)
    if x is None:
        return None
    d, reach = c.dim(x, 4), c.rng.choice((1, 2, 2))
    rows = c.shape(x)[d] - reach
    parts = [f"{x}.narrow({d}, {i}, {rows})" for i in range(reach + 1)]
    return f"{' - '.join(parts)} * 2"


def rows_one_by_one(c: Case) -> str | None:
    x = c.pick(1, 4, lambda x: max(x.shape) > 1)
    if x is None:
        return None
    d = c.dim(x, 2)
    n = c.shape(x)[d]
    i, j = c.rng.randrange(n), c.rng.randrange(n)
    return c.rng.choice(
        (
            f"torch.stack([t.sin() for t in {x}.unbind({d})], {d})",
            f"sum({x}.unbind({d})[1:], {x}.unbind({d})[0])",
            f"{x}.unbind({d})[{i}] + {x}.unbind({d})[{j}] * 2",
            f"{x}.select({d}, {i}) * {x}.select({d}, {j})",
            f"sum({x}.select({d}, k).tanh() for k in range({n}))",
        )
    )


def repeat(c: Case) -> str | None:
    x = c.pick(1, 3)
    if x is None:
        return None
    shape = c.shape(x)
    room = max(1, ELEMENTS // max(1, math.prod(shape)))
    times = [1] * len(shape)
    times[c.dim(x)] = min(room, c.rng.choice((2, 3, 7, 20, 33)))
    if c.chance(0.3):
        times = [c.rng.choice((2, 5)), *times]
    return f"{x}.repeat({times})"


def in_turn(c: Case) -> str | None:
    x = c.pick(1, 3, lambda x: max(x.shape) > 0)
    if x is None:
        return None
    shape, d = c.shape(x), c.dim(x, 2) % len(c.shape(x))
    parts = [x, *(c.float(*shape) for _ in range(c.rng.choice((1, 1, 2, 3))))]
    c.rng.shuffle(parts)
    one_less, end = "", ""
    if c.chance(0.4) and shape[d] > 1:
        pad = [0, 0] * (len(shape) - 1 - d) + [0, 1]
        one_less = f"F.pad({parts.pop()}.narrow({d}, 0, {shape[d] - 1}), {pad})"
        end = f".narrow({d}, 0, {(len(parts) + 1) * shape[d] - 1})"
    stacked = ", ".join([*parts, *[one_less] * bool(one_less)])
    return f"torch.stack([{stacked}], {d + 1}).flatten({d}, {d + 1}){end}"


def of_each_row(c: Case) -> str | None:
    x = c.pick(2, 4)
    if x is None:
        return None
    n, m, *more = c.shape(x)
    forms = [f"{x}[torch.arange({n}), {c.ints(m, n)}]"]
    if more:
        forms.append(f"{x}[torch.arange({n}), :, {c.ints(more[0], n)}]")
        forms.append(f"{x}[:, torch.arange({m}), {c.ints(more[0], m)}]")
    if n == m:
        forms.append(f"{x}[torch.arange({n}), torch.arange({n})]")
    return c.rng.choice(forms)


def bags(c: Case) -> str | None:
    x = c.pick(2, 2)
    if x is None:
        return None
    rows, count, length = c.shape(x)[0], c.size(), c.rng.choice((1, 2, 3, 5))
    mode = c.rng.choice(("sum", "mean", "max"))
    padding = c.rng.choice(("None", 0, rows - 1))
    how = f"mode={mode!r}, padding_idx={padding}"
    if c.chance(0.3):
        index = c.ints(rows, count * length)
        begins = f"torch.arange({count}) * {c.rng.randint(1, length)}"
        return f"F.embedding_bag({index}, {x}, {begins}, {how})"
    if mode == "sum" and c.chance(0.4):
        how += f", per_sample_weights={c.float(count, length)}"
    return f"F.embedding_bag({c.ints(rows, count, length)}, {x}, {how})"


def resampled(c: Case) -> str | None:
    x = c.pick(4, 4, lambda x: min(x.shape) > 0)
    if x is None:
        return None
    # torch is wrong about results of one column.
    size = [c.rng.choice((2, 3, 4, 5, 8)) for _ in range(2)]
    mode = c.rng.choice(("bilinear", "bicubic"))
    aligned = c.chance(0.3)
    how = f"mode={mode!r}, antialias=True, align_corners={aligned}"
    return f"F.interpolate({x}, {size}, {how})"


def sampled(c: Case) -> str | None:
    x = c.pick(4, 4, lambda x: min(x.shape) > 0)
    if x is None:
        return None
    grid = c.float(c.shape(x)[0], c.rng.choice((1, 2, 4)), c.rng.choice((1, 3, 4)), 2)
    mode = c.rng.choice(("bilinear", "bicubic"))
    padding = c.rng.choice(("zeros", "border", "reflection"))
    how = f"mode={mode!r}, padding_mode={padding!r}, align_corners={c.chance(0.5)}"
    return f"F.grid_sample({x}, {grid}.tanh(), {how})"


CUTS: list[Callable[[Case], str | None]] = [
    *(stencil, rows_one_by_one, repeat, in_turn, of_each_row, bags),
    *(resampled, resampled, sampled, sampled),
]


class CutsCase(Case):
    """A case half of whose statements are these."""

    statements = OPS + CUTS * (len(OPS) // len(CUTS))

    def _float(self, shape: list[int], owned: float = 0.5) -> str:
        """The first one is an image as often as not."""
        if not self.values and self.chance(0.5):
            shape = [self.size() for _ in range(4)]
        return super()._float(shape, owned)
