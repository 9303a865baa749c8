"""Holds the patches of torch and Python that do nothing but save time.

Each is a ``switch.shortcut``: made under one lock, and left out with ``FXPAR_FAST=0``,
on a torch that they were not proved on, and in a process that is the only rank. In:
torch as it is imported. Out: the same results, in less time. Never: a patch outside of
its context.
"""

import fxpar._torch  # noqa: F401  (which imports modules of this package in turn)
