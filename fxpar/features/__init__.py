"""Lists the features that add to the pipeline; each is a folder with a ``FEATURE``
(``feature``). Parameters at rest and the training step are entered by users instead.

In: nothing. Out: ``FEATURES``, from which ``fxpar.pipeline`` makes its list. Never: a
module of a feature imported, but for its ``__init__``, until its ops are registered.
"""

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


def register_lowerings() -> None:
    """Tell Inductor, which must be loaded, of the ops of all features."""
    for feature in FEATURES:
        for module in feature.lowerings:
            import_module(module).register_lowering()
