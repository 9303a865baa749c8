"""Checks manual regions, names their collectives, and keeps one of their bodies."""
