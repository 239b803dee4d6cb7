"""Transposed grouped matrix product: the weight gradient of gmm."""
