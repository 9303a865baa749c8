"""Figures of machines on which small programs are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import Hardware, Level, Peak, lookup
from fxpar.sharding.mesh import Link, Mesh


def machine() -> Hardware:
    """Slow at computing, with fast links in pairs: so that small programs are split."""
    levels = (Level(2, 1e10, 1e-8, 1e-7), Level(0, 1e9, 1e-8, 1e-7))
    peaks = tuple((name, Peak(1e8)) for name, _ in lookup("cpu").peaks)
    return replace(
        lookup("cpu"),
        name="slow",
        launch=0.0,
        bandwidth=1e8,
        peaks=peaks,
        levels=levels,
        near=(),
        light=(),
        beside=0.85,
    )


def collective_seconds(
    kind: str, sizes: Sequence[int], links: Sequence[Link], nbytes: float
) -> float:
    """Of one collective over axes of these sizes and links."""
    axes = tuple((f"x{i}", n) for i, n in enumerate(sizes))
    mesh = Mesh(axes, tuple(links))
    seconds: float = along(kind, mesh, mesh.names).seconds(nbytes)
    return seconds


def products_alone(hardware: Hardware) -> Hardware:
    """The same with attention and convolutions as fast as products are."""
    peaks = tuple((name, peak) for name, peak in hardware.peaks if " " not in name)
    return replace(hardware, peaks=peaks)


def ideal_gpu(link: float, peak: float, memory: float) -> Hardware:
    """A GPU with no latencies: bytes/s of its link, flops/s in bfloat16, bytes/s of its
    memory."""
    peaks, levels = (("bfloat16", Peak(peak)),), (Level(0, link, 0.0),)
    return replace(lookup("h100"), peaks=peaks, levels=levels, bandwidth=memory)
