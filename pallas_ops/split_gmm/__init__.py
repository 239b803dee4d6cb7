"""Grouped product with matrices stored in two halves, each gathered on its own."""
