"""Attention: masks read, queries and keys split along the sequence, results merged."""
