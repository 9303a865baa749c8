"""Prices every second and every byte: of hardware, ops, collectives, programs."""
