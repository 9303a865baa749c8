"""fxpar: torch.compile for N devices.

The public names; everything else is imported when one of them is first used, so that
``import fxpar`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxpar import print_errors
from fxpar.errors import FxparError, FxparWarning
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec

if TYPE_CHECKING:
    from fxpar.backend import train_step
    from fxpar.features.at_rest.crossings import constrain, global_value
    from fxpar.features.at_rest.shard import no_sync, shard
    from fxpar.features.regions.shard_map import (
        axis_index,
        axis_size,
        permute,
        shard_map,
    )
    from fxpar.planning import plan
    from fxpar.runtime.calls.compiled_graph import plans
    from fxpar.runtime.ranks.presence import alone
    from fxpar.sharding.ops import rule

__version__ = "0.1.0"

__all__ = [
    "FxparError",
    "FxparWarning",
    "Mesh",
    "Spec",
    "alone",
    "axis_index",
    "axis_size",
    "constrain",
    "global_value",
    "no_sync",
    "permute",
    "plan",
    "plans",
    "rule",
    "shard",
    "shard_map",
    "train_step",
]

_LAZY = {
    "alone": "fxpar.runtime.ranks.presence",
    "axis_index": "fxpar.features.regions.shard_map",
    "axis_size": "fxpar.features.regions.shard_map",
    "constrain": "fxpar.features.at_rest.crossings",
    "global_value": "fxpar.features.at_rest.crossings",
    "no_sync": "fxpar.features.at_rest.shard",
    "permute": "fxpar.features.regions.shard_map",
    "plan": "fxpar.planning",
    "plans": "fxpar.runtime.calls.compiled_graph",
    "rule": "fxpar.sharding.ops",
    "shard": "fxpar.features.at_rest.shard",
    "shard_map": "fxpar.features.regions.shard_map",
    "train_step": "fxpar.backend",
}


print_errors.install()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fxpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
