"""Holds the verbs of a schedule, in one file each.

In: an ``Edit`` of a local graph, and the arguments of a line. Out: the graph, edited in
place, and nodes that later lines may name. Never changes a number: a verb that would is
refused.
"""
