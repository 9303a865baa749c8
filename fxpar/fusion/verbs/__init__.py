"""Verbs of a schedule: one file each, an edit of a local graph each."""
