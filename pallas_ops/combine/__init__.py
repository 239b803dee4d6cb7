"""Combine: the weighted sum of a token's expert rows."""
