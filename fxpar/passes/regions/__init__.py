"""Manual regions: checked, their collectives named, one of their bodies kept."""
