"""Measures what this machine can do: ``python -m fxpar calibrate``."""
