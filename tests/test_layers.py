"""Rows of layers in the labels of ops."""

from __future__ import annotations

import numpy as np

from fxpar.layers import RepeatedOps, rows_of_layers, without_overlaps

#                  | a layer      | another      | a third      |
LABELS = np.array([9, 1, 2, 2, 3, 1, 2, 2, 3, 1, 2, 2, 3, 1, 8])
# The first layer reads something else than the others.
FINER = np.array([9, 5, 6, 7, 3, 1, 2, 4, 3, 1, 2, 4, 3, 1, 8])


def test_rows_are_as_long_as_labels_repeat() -> None:
    assert rows_of_layers(LABELS) == [RepeatedOps(1, 14, 4)]
    assert rows_of_layers(FINER) == [RepeatedOps(4, 14, 4)]
    assert rows_of_layers(LABELS, FINER) == [RepeatedOps(1, 14, 4)]


def test_a_row_ends_where_another_begins() -> None:
    twice = np.concatenate([LABELS[1:13], LABELS[1:13] + 10, LABELS[1:13]])
    rows = sorted(rows_of_layers(twice))
    assert rows == [
        RepeatedOps(0, 12, 4),
        RepeatedOps(12, 24, 4),
        RepeatedOps(24, 36, 4),
    ]
    short, long = RepeatedOps(2, 4, 1), RepeatedOps(1, 14, 4)
    assert without_overlaps([short, long], LABELS) == [short]
    assert without_overlaps([long, short], LABELS) == [long]


def test_rows_may_be_long_enough_to_overlap() -> None:
    finer = FINER.copy()
    finer[[2, 3]] = 2  # a row of its own, in the first layer
    assert rows_of_layers(LABELS, finer) == [RepeatedOps(1, 14, 4)]
    long, _ = rows_of_layers(LABELS, finer, overlap=True)
    assert long == RepeatedOps(1, 14, 4)


def test_a_part_that_repeats_within_a_layer_hides_no_layers() -> None:
    """As the projections of an attention: the distance between them is found more often
    than that of layers."""
    layer = [1, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9]
    assert rows_of_layers(np.array(layer * 4)) == [RepeatedOps(0, 60, 15)]
