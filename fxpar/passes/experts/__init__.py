"""Rows of tokens and their experts: sorted, sent, multiplied, and put back."""
