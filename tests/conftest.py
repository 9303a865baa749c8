"""What all tests share: plans are propagated unless a test asks for a search, and run
as they are unless it asks for a schedule.

A search leaves small programs whole, since splitting them does not pay; most tests are
about what happens when they are split. Tests of the search say so themselves, and
tests/e2e/test_search.py runs with the default as a user has it; so do the tests of
schedules, and the code of the docs.
"""

from __future__ import annotations

import os

os.environ.setdefault("FXPAR_PLAN", "propagate")
os.environ.setdefault("FXPAR_SCHEDULE", "none")
