"""Runs or predicts a local graph for every rank, in this process; changes none."""
