"""Measure links between CUDA devices at the first start of several ranks, once.

In: nothing but the machine; all ranks call ``measure_first`` together. Out: levels of
the network, equal on all ranks, which ``hardware_table.detect`` gives from then on with
the built-in figures of the device. Rank 0 keeps them on disk by device, driver, ranks
and versions, so that later starts make the same plans. Never: a measurement on CPU, or
where ranks share a device; a program of the user run.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from fxpar import _torch, cache_files
from fxpar.config import Options
from fxpar.errors import DeviceError
from fxpar.runtime.ranks import consensus, groups, meeting, presence, worlds
from fxpar.sharding.cost import hardware_table
from fxpar.sharding.cost.hardware_table import Level, Measured

log = logging.getLogger("fxpar")

FORMAT = "fxpar links 1"

# After how many seconds remaining points are left out, and how long calls are timed
# together.
SECONDS, _LONG = 2.0, 0.004
# Collectives that are measured; the figures of others follow from these.
_KINDS = "all_reduce", "all_gather"

# Default process groups whose ranks have agreed.
_AGREED: WeakSet[Any] = WeakSet()


def measure_first(options: Options) -> None:
    """Let ``hardware_table.detect`` know the links of this machine, unless ``options``
    name hardware. All ranks call this together; after the first time it does nothing.

    Raises RankMismatchError if a rank does not come or cannot measure.
    """
    group = _torch.distributed.default_group()
    if options.hardware or not options.measure or group is None or group in _AGREED:
        return
    with worlds.inside(None):
        if not _has_devices() or meeting.current() is None:
            return
        try:
            with presence.works("measures links between devices"):
                hardware_table.keep_levels(_agreed())
        except Exception as error:
            consensus.abort(error)
            raise
    _AGREED.add(group)


def _has_devices() -> bool:
    """Return whether ranks communicate between CUDA devices."""
    return torch.cuda.is_available() and "cuda:nccl" in dist.get_backend_config()


def _agreed() -> tuple[Level, ...]:
    """Return the levels that rank 0 kept, or that are measured now; none where there
    is nothing to measure."""
    size, places = dist.get_world_size(), consensus.gather("its device", _place())
    if not all(places) or len(set(places)) < size:
        return ()
    key = json.dumps(_facts(size))
    path = cache_files.folder() / f"{consensus.digest_of(key)}.links.json"
    network: tuple[Level, ...] | None = None
    if consensus.is_leader():
        network = cache_files.read_record(path, FORMAT, key, _levels)
    text = consensus.gather("links that were kept", _text(network or ()))[0]
    if not json.loads(text):
        text = consensus.gather("links", _text(_measured(size)))[0]
        if consensus.is_leader() and json.loads(text):
            cache_files.write_record(path, FORMAT, key, {"levels": json.loads(text)})
            log.info("measured links between %d devices, kept in %s", size, path)
    return _parse(json.loads(text))


def _place() -> str:
    """Return this rank's machine and device; "" if its figures are not known."""
    try:
        hardware_table.detect()
    except DeviceError:
        return ""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {device.uuid}"


def _facts(size: int) -> list[Any]:
    """Return what the speed of links depends on."""
    versions = _torch.version.driver_versions(), torch.__version__
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return [torch.cuda.get_device_name(), size, local, *versions]


def _measured(size: int) -> tuple[Level, ...]:
    """Return the levels of the network of all ranks; none if nodes have different
    numbers of ranks, or time was too short."""
    # These import NumPy, which need not be loaded where the figures are kept already.
    from fxpar.runtime.calibrate.measure import default_mesh
    from fxpar.runtime.calibrate.probe_device import Probe
    from fxpar.runtime.calibrate.probe_network import levels, local_ranks

    if size % local_ranks(size):
        return ()
    ranks = groups.Ranks(default_mesh(size), dist.get_rank())
    device = torch.device("cuda", torch.cuda.current_device())
    worlds.barrier()  # NCCL starts up at its first collective
    end, base = time.monotonic() + SECONDS, hardware_table.detect()
    with torch.no_grad():
        probe = Probe(device, ranks, end, quick=True, long=_LONG)
        network = levels(probe, base, _KINDS)
    return () if network == base.levels else network


def _levels(record: dict[str, Any]) -> tuple[Level, ...]:
    """Return the levels of a record."""
    return _parse(record["levels"])


def _text(levels: Sequence[Level]) -> str:
    return json.dumps([asdict(level) for level in levels])


def _parse(entries: Sequence[dict[str, Any]]) -> tuple[Level, ...]:
    """Return levels from the data that ``_text`` wrote as JSON."""
    return tuple(
        Level(**x | {"kinds": tuple((k, Measured(**m)) for k, m in x["kinds"])})
        for x in entries
    )
