"""Propagation gives every value a spec, from hints and by conventions."""
