"""The only package whose patches of torch and Python do nothing but save time.

Each is a ``switch.shortcut``: made under one lock, and left out with ``FXPAR_FAST=0``,
on a torch that they were not proved on, and in a process that is the only rank.
"""

import fxpar._torch  # noqa: F401  (which imports modules of this package in turn)
