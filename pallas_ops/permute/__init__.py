"""Permute: copy tokens into expert-sorted rows; its transpose sums them back."""
