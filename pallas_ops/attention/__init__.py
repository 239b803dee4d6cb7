"""Causal attention, whole or in a sliding window, inside documents."""
