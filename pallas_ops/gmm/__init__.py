"""Grouped matrix product: every row times the matrix of its group."""
