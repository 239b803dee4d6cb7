"""Measurements; each module is a command, and writes its numbers to benchmarks/results."""
