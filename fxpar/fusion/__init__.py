"""Rewrites compute and collectives of a local graph together, by schedules.

In: a schedule, and a local graph or those of a pipeline's stages. Out: new graphs.
Never changes a number, nor a given graph.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.fusion.apply_schedule import apply, apply_stages
    from fxpar.fusion.schedule import Schedule

__all__ = ["Schedule", "apply", "apply_stages"]

_ENTRIES = {
    "Schedule": "schedule",
    "apply": "apply_schedule",
    "apply_stages": "apply_schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _ENTRIES:
        raise AttributeError(f"module 'fxpar.fusion' has no attribute {name!r}")
    import fxpar.features  # noqa: F401  (their verbs)

    return getattr(import_module(f"{__name__}.{_ENTRIES[name]}"), name)
