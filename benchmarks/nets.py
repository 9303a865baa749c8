"""The six networks of FlexFlow's study (Jia, Zaharia and Aiken, SysML 2019, table 1),
in plain PyTorch, and what one GPU feeds them.

Convolutions as in the release of the paper's code (v1.0: alexnet.cc, inception.cc,
resnet.cc), which normalizes nothing; a residual network here does add its residuals.
Recurrent layers are unrolled cells of LSTM, whose product with the inputs of all steps
is one. Where the paper names no size it is ours: the vocabulary of RNNTC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, STEPS = 1024, 40
CLASSES = 1000


@dataclass(frozen=True)
class Net:
    """``make()`` builds it, ``batch`` samples for each GPU; ``inputs(n)`` for n."""

    make: Callable[[], nn.Module]
    batch: int
    inputs: Callable[[int], tuple[torch.Tensor, ...]]


class Conv(nn.Module):
    """A convolution and its activation."""

    def __init__(self, a: int, b: int, kernel: Any, stride: int = 1, pad: Any = 0):
        super().__init__()
        self.conv = nn.Conv2d(a, b, kernel, stride, pad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x))


class Classified(nn.Module):
    """The loss of a network that gives logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


def alexnet() -> nn.Module:
    pool = nn.MaxPool2d(3, 2)
    convolutions = [
        *(Conv(3, 64, 11, 4, 2), pool, Conv(64, 192, 5, 1, 2), pool),
        *(Conv(192, 384, 3, 1, 1), Conv(384, 256, 3, 1, 1), Conv(256, 256, 3, 1, 1)),
    ]
    dense = [nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    net = [*convolutions, pool, nn.Flatten(), *dense, nn.Linear(4096, CLASSES)]
    return Classified(nn.Sequential(*net))


class Branches(nn.Module):
    """Branches side by side, joined along channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def row(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


def average() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1)


def inception_a(a: int, pooled: int) -> nn.Module:
    return Branches(
        Conv(a, 64, 1),
        row(Conv(a, 48, 1), Conv(48, 64, 5, 1, 2)),
        row(Conv(a, 64, 1), Conv(64, 96, 3, 1, 1), Conv(96, 96, 3, 1, 1)),
        row(average(), Conv(a, pooled, 1)),
    )


def inception_b(a: int) -> nn.Module:
    return Branches(
        Conv(a, 384, 3, 2),
        row(Conv(a, 64, 1), Conv(64, 96, 3, 1, 1), Conv(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def wide(a: int, b: int) -> nn.Module:
    return Conv(a, b, (1, 7), 1, (0, 3))


def tall(a: int, b: int) -> nn.Module:
    return Conv(a, b, (7, 1), 1, (3, 0))


def inception_c(a: int, c: int) -> nn.Module:
    return Branches(
        Conv(a, 192, 1),
        row(Conv(a, c, 1), wide(c, c), tall(c, 192)),
        row(Conv(a, c, 1), tall(c, c), wide(c, c), tall(c, c), wide(c, 192)),
        row(average(), Conv(a, 192, 1)),
    )


def inception_d(a: int) -> nn.Module:
    return Branches(
        row(Conv(a, 192, 1), Conv(192, 320, 3, 2)),
        row(Conv(a, 192, 1), wide(192, 192), tall(192, 192), Conv(192, 192, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def inception_e(a: int) -> nn.Module:
    def fork(b: int) -> nn.Module:
        return Branches(
            Conv(b, 384, (1, 3), 1, (0, 1)), Conv(b, 384, (3, 1), 1, (1, 0))
        )

    return Branches(
        Conv(a, 320, 1),
        row(Conv(a, 384, 1), fork(384)),
        row(Conv(a, 448, 1), Conv(448, 384, 3, 1, 1), fork(384)),
        row(average(), Conv(a, 192, 1)),
    )


def inception() -> nn.Module:
    pool = nn.MaxPool2d(3, 2)
    return Classified(
        row(
            *(Conv(3, 32, 3, 2), Conv(32, 32, 3), Conv(32, 64, 3, 1, 1), pool),
            *(Conv(64, 80, 1), Conv(80, 192, 3), pool),
            *(inception_a(192, 32), inception_a(256, 64), inception_a(288, 64)),
            inception_b(288),
            *(inception_c(768, c) for c in (128, 160, 160, 192)),
            *(inception_d(768), inception_e(1280), inception_e(2048)),
            *(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(2048, CLASSES)),
        )
    )


class Bottleneck(nn.Module):
    """``wide``: how much wider its inner convolution is (Zagoruyko, 2016)."""

    def __init__(self, a: int, b: int, stride: int, wide: int = 1) -> None:
        super().__init__()
        inner = b * wide
        last = nn.Conv2d(inner, 4 * b, 1)
        self.body = row(Conv(a, b, 1), Conv(b, inner, 3, stride, 1), last)
        straight = a == 4 * b and stride == 1
        self.side = nn.Identity() if straight else nn.Conv2d(a, 4 * b, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.side(x))


def resnet(
    counts: Sequence[int] = (3, 4, 23, 3), base: int = 64, wide: int = 1
) -> nn.Module:
    """``base``: channels of the first convolution."""
    parts: list[nn.Module] = [Conv(3, base, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    width = base
    for stage, count in enumerate(counts):
        for i in range(count):
            stride = 2 if stage and not i else 1
            parts.append(Bottleneck(width, base << stage, stride, wide))
            width = (4 * base) << stage
    head = [nn.AvgPool2d(7), nn.Flatten(), nn.Linear(width, CLASSES)]
    return Classified(row(*parts, *head))


class Recurrent(nn.Module):
    """A layer of LSTM over (batch, steps, inputs). The four gates of a unit stand side
    by side, so that units may be split."""

    def __init__(self, inputs: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.hidden = hidden
        self.read = nn.Linear(inputs, 4 * hidden)
        self.keep = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        zero = x.new_zeros(x.shape[0], self.hidden)
        h, c = state or (zero, zero)
        out = []
        for given in self.read(x).unbind(1):
            gates = (given + self.keep(h)).view(-1, self.hidden, 4)
            a, forget, new, shown = gates.unbind(-1)
            c = forget.sigmoid() * c + a.sigmoid() * new.tanh()
            h = shown.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out, 1), (h, c)


class Words(nn.Module):
    """Recurrent layers over words; ``classes``: of the last step, or of every one."""

    def __init__(self, words: int, layers: int, classes: int, *, every: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, HIDDEN)
        self.layers = nn.ModuleList(Recurrent(HIDDEN) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, classes)
        self.every = every

    def forward(self, words: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x, _ = layer(x)
        logits = self.head(x if self.every else x[:, -1])
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class Translation(nn.Module):
    """Two recurrent layers that read, two that write, and attention between them."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(words, HIDDEN) for _ in range(2))
        self.encoder = nn.ModuleList(Recurrent(HIDDEN) for _ in range(2))
        self.decoder = nn.ModuleList(Recurrent(HIDDEN) for _ in range(2))
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, words)

    def forward(
        self, given: torch.Tensor, wanted: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        x, states = self.source(given), []
        for layer in self.encoder:
            x, state = layer(x)
            states.append(state)
        z = self.target(wanted)
        for layer, state in zip(self.decoder, states, strict=True):
            z, _ = layer(z, state)
        weights = torch.softmax(z @ x.transpose(1, 2), -1)
        z = torch.tanh(self.mix(torch.cat([weights @ x, z], -1)))
        return F.cross_entropy(self.head(z).flatten(0, 1), y.flatten())


def _images(size: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda n: (torch.zeros(n, 3, size, size), torch.zeros(n, dtype=torch.long))


def _words(*shapes: tuple[int, ...]) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda n: tuple(torch.zeros(n, *s, dtype=torch.long) for s in shapes)


def nets(steps: int = STEPS) -> dict[str, Net]:
    """By name, as FlexFlow's paper has them; recurrent ones of so many steps."""
    text, word = (steps,), ()
    return {
        "AlexNet": Net(alexnet, 256, _images(224)),
        "Inception-v3": Net(inception, 64, _images(299)),
        "ResNet-101": Net(resnet, 64, _images(224)),
        "RNNTC": Net(lambda: Words(20_000, 4, 2, every=False), 64, _words(text, word)),
        "RNNLM": Net(
            lambda: Words(10_000, 2, 10_000, every=True), 64, _words(text, text)
        ),
        "NMT": Net(lambda: Translation(32_000), 64, _words(text, text, text)),
    }
