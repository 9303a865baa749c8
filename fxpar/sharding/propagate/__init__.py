"""Propagation: a spec for every value, from hints and by conventions."""
