"""``python -m fxpar calibrate``: what this machine can do, measured."""
