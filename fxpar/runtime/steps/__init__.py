"""Holds the steps of the pipeline and the states that they change."""
