"""Runs, or predicts, a local graph for every rank in one process; never changes it."""
