"""Holds the verbs of a schedule: one file each, an edit of a local graph each."""
