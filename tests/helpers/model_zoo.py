"""Models of many kinds, small, with random weights: ``ZOO[name]()`` gives a module
whose call on the given inputs is a scalar loss. All of float64, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import (  # no library may look for a model on the net
    device,
    models,  # noqa: F401
)

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]

BATCH, CLASSES = 4, 4


class Loss(nn.Module):
    """Cross entropy of a classifier's logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        return F.cross_entropy(getattr(out, "logits", out), labels)


def _classified(body: nn.Module, *shape: int, batch: int = BATCH) -> Made:
    x = torch.randn(batch, *shape, dtype=torch.float64)
    return Loss(body).double(), (x, torch.arange(batch) % CLASSES)


def efficientnet() -> Made:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.1,
        hidden_dim=320,
        num_labels=CLASSES,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        initializer_range=0.3,  # with less the logits vanish
    )
    return _classified(EfficientNetForImageClassification(config), 3, 32, 32)


def mobilenet() -> Made:
    """Of 4 samples at stride 32 BatchNorm has 4 values a channel: the input's last bit,
    on one device, is 1e-8 in a gradient two steps later."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        image_size=32,
        depth_multiplier=0.25,
        output_stride=8,
        num_labels=CLASSES,
        classifier_dropout_prob=0.0,
    )
    return _classified(MobileNetV2ForImageClassification(config), 3, 32, 32, batch=8)


def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
        drop_path_rate=0.0,
    )
    return _classified(SwinForImageClassification(config), 3, 32, 32)


class Detector(nn.Module):
    """Scores and boxes at each place, on two levels; places are given their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 3, 2, 1)
        self.lateral = nn.Conv2d(8, 8, 1)
        self.scores, self.boxes = nn.Conv2d(8, CLASSES, 3, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        fine = self.norm(self.stem(x)).relu()
        coarse = self.down(fine).relu()
        up = F.interpolate(coarse, scale_factor=2, mode="nearest")
        levels = [self.lateral(fine) + up, coarse]
        scores = torch.cat([self.scores(f).flatten(2) for f in levels], 2)
        boxes = torch.cat([self.boxes(f).exp().flatten(2) for f in levels], 2)
        found = labels >= 0
        hot = F.one_hot(labels.clamp(min=0), CLASSES).mT.double() * found[:, None]
        p = scores.sigmoid()
        focal = F.binary_cross_entropy_with_logits(scores, hot, reduction="none")
        focal = focal * torch.where(hot > 0, 1 - p, p).square()
        both, either = torch.minimum(boxes, target), torch.maximum(boxes, target)
        apart = torch.where(found, 1 - both.prod(1) / either.prod(1), 0.0).sum()
        return (focal.sum() + apart) / found.sum().clamp(min=1)


def detector() -> Made:
    places = 16 * 16 + 8 * 8
    labels = torch.randint(-3, CLASSES, (BATCH, places))
    boxes = torch.rand(BATCH, 4, places, dtype=torch.float64) + 0.5
    x = torch.randn(BATCH, 3, 32, 32, dtype=torch.float64)
    return Detector().double(), (x, labels, boxes)


class UNet(nn.Module):
    """Noise prediction: down, attention, up with a skip; time is embedded."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(width, width, 4, 2, 1)
        self.last = nn.Conv2d(2 * width, 3, 3, 1, 1)

    def forward(
        self, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        mixed = t[:, None, None, None] * x + (1 - t)[:, None, None, None] * noise
        waves = t[:, None] * torch.arange(self.width // 2, dtype=t.dtype)
        time = self.time(torch.cat([waves.sin(), waves.cos()], -1))[:, :, None, None]
        skip = self.norms[0](self.first(mixed) + time)
        h = self.norms[1](self.down(F.silu(skip)) + time)
        tokens = h.flatten(2).mT
        attended = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        h = h + attended.mT.reshape(h.shape)
        h = self.norms[2](self.up(F.silu(h)))
        return F.mse_loss(self.last(torch.cat([h, skip], 1)), noise)


def unet() -> Made:
    x, noise = torch.randn(2, BATCH, 3, 16, 16, dtype=torch.float64)
    return UNet().double(), (x, noise, torch.rand(BATCH, dtype=torch.float64))


class DiT(nn.Module):
    """One block of a diffusion transformer: scales and shifts from the class."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 16, width) / 10)
        self.label = nn.Embedding(CLASSES, width)
        self.modulate = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last = nn.Linear(width, 48)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).mT + self.place
        parts = self.modulate(F.silu(self.label(labels)))[:, None].chunk(6, -1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        y = self.norm(h) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + gate * self.out(attended)
        h = h + gate2 * self.down(F.gelu(self.up(self.norm(h) * (1 + scale2) + shift2)))
        out = self.last(self.norm(h)).unflatten(1, (4, 4)).unflatten(-1, (3, 4, 4))
        return F.mse_loss(torch.einsum("bhwcpq->bchpwq", out).reshape(x.shape), x)


def dit() -> Made:
    x = torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)
    return DiT().double(), (x, torch.arange(BATCH) % CLASSES)


class Recurrent(nn.Module):
    """The last state of each sentence; ``packed``: sentences of unlike lengths."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.cells = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head, self.packed = nn.Linear(16, CLASSES), packed

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x: Any = self.words(words)
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(
                x, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
        out: Any = self.cells(x)[0]
        if self.packed:
            out = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]
        return F.cross_entropy(self.head(out.sum(1)), words[:, 0] % CLASSES)


def _recurrent(kind: type[nn.RNNBase], packed: bool = False) -> Made:
    words = torch.randint(0, 16, (BATCH, 6))
    return Recurrent(kind, packed).double(), (words, torch.tensor([6, 2, 5, 3]))


def lstm() -> Made:
    return _recurrent(nn.LSTM)


def gru() -> Made:
    return _recurrent(nn.GRU)


def packed() -> Made:
    return _recurrent(nn.LSTM, packed=True)


class GraphNet(nn.Module):
    """Messages along edges, summed and maximized where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 8), nn.Linear(24, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        start, end = edges
        for _ in range(2):
            sent = self.message(torch.cat([x[start], x[end]], -1)).tanh()
            total = torch.zeros_like(x).index_add(0, end, sent)
            place = end[:, None].expand_as(sent)
            largest = torch.zeros_like(x).scatter_reduce(0, place, sent, "amax")
            x = self.update(torch.cat([x, total, largest], -1)).relu()
        return F.cross_entropy(self.head(x), labels)


def graph_net() -> Made:
    x, edges = torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 8, (2, 20))
    return GraphNet().double(), (x, edges, torch.arange(8) % CLASSES)


class Mixture(nn.Module):
    """Two of four experts for each token, found by ``where``: sizes depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            part = expert(x[token]).tanh() * weights[token, slot, None]
            out = out.index_add(0, token, part)
        return F.cross_entropy(self.head(out), labels)


def mixture() -> Made:
    x = torch.randn(16, 8, dtype=torch.float64)
    return Mixture().double(), (x, torch.arange(16) % CLASSES)


class VQVAE(nn.Module):
    """A codebook that follows what is assigned to it, in place, as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        self.register_buffer("codes", torch.randn(16, 8))
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 8)
        chosen = torch.cdist(flat, self.codes).argmin(-1)
        quantized = self.codes[chosen].view_as(z)
        with torch.no_grad():
            hot = F.one_hot(chosen, 16).to(flat.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hot.T @ flat, alpha=0.1)
            self.codes.copy_(self.sums / self.counts[:, None])
        commitment = F.mse_loss(z, quantized.detach())
        through = (z + (quantized - z).detach()).permute(0, 3, 1, 2)
        return F.mse_loss(self.decode(through), x) + 0.25 * commitment


def vqvae() -> Made:
    return VQVAE().double(), (torch.randn(BATCH, 3, 16, 16, dtype=torch.float64),)


class MoCo(nn.Module):
    """A slow copy of the encoder gives keys, and a queue the ones of steps before."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.slow = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.slow.load_state_dict(self.fast.state_dict())
        self.slow.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.fast(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.slow(y), dim=1)
        own = (q * k).sum(1, keepdim=True)
        scores = torch.cat([own, q @ self.queue.clone()], 1) / 0.2
        self.queue.copy_(torch.cat([k.T, self.queue[:, : -len(k)]], 1))
        return F.cross_entropy(scores, torch.zeros_like(q[:, 0], dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        """To be called after each step of the optimizer."""
        for slow, fast in zip(
            self.slow.parameters(), self.fast.parameters(), strict=True
        ):
            slow.lerp_(fast, 0.1)


def moco() -> Made:
    x, y = torch.randn(2, BATCH, 8, dtype=torch.float64)
    return MoCo().double(), (x, y)


class Mixup(nn.Module):
    """Each sample mixed with another, drawn inside the program."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(x))
        scores = self.down(self.up(0.7 * x + 0.3 * x[order]).relu())
        own = F.cross_entropy(scores, labels)
        return 0.7 * own + 0.3 * F.cross_entropy(scores, labels[order])


def mixup() -> Made:
    x = torch.randn(8, 8, dtype=torch.float64)
    return Mixup().double(), (x, torch.arange(8) % CLASSES)


ZOO: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        efficientnet,
        mobilenet,
        swin,
        detector,
        unet,
        dit,
        lstm,
        gru,
        packed,
        graph_net,
        mixture,
        vqvae,
        moco,
        mixup,
    )
}


def make(name: str) -> Made:
    """One of ``ZOO``, from a fixed seed, in training mode."""
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    return device.put(model.train()), device.put(inputs)
