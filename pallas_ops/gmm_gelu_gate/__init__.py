"""The experts' first product and its gate in one pass."""
