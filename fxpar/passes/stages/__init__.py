"""A batch cut in time and a program along a pipeline axis, with the messages."""
