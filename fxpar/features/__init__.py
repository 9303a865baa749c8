"""Lists the features; each is a folder that says what it adds (``feature``)."""

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
