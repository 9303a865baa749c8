"""Lists the features; each is a folder that says what it adds (``feature``)."""

from importlib import import_module

from fxpar.features import (
    experts,
    regions,
    sequences,
    stages,
    uneven,
    unlike_devices,
)

FEATURES = (
    unlike_devices.FEATURE,
    regions.FEATURE,
    sequences.FEATURE,
    uneven.FEATURE,
    stages.FEATURE,
    experts.FEATURE,
)


def register_ops() -> None:
    """Register the ops of all features, for compiled code from an earlier start."""
    for feature in FEATURES:
        for module in feature.ops:
            import_module(module)
