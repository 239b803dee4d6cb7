"""The TPU compiler as an instrument: the real training step, compiled for a slice that is not here.

trace.py traces the step on placeholders, compiler.py gives it to libtpu's compile-only client,
hlo.py reads the optimised program, report.py says what it found. Nothing here runs a step, and no
figure is a measurement.
"""
