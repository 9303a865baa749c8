"""Rewrites mixtures of experts: rows are sorted, sent, multiplied and put back."""
