"""Cuts a batch in time and a program along a pipeline axis, with the messages
between.
"""
