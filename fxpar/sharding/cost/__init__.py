"""Every second and every byte: hardware, ops, collectives, programs."""
