"""Slow forms of products, as reference stacks have them: for comparison, not for use."""
