"""Finds what an earlier start, or another rank, planned and compiled."""
