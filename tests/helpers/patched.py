"""A mark for tests of patches that only save time, where this torch is not patched."""

from __future__ import annotations

import pytest

from fxpar._fast import switch

needs_patches = pytest.mark.skipif(
    not switch.is_on(), reason="torch is not patched (fxpar/_fast/switch.py)"
)
