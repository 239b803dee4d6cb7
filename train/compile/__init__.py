"""The TPU compiler as an instrument: the real training step, compiled for a slice that is not here.

trace.py traces the step on placeholders and scopes.py names its work, compiler.py gives it to
libtpu's compile-only client, hlo.py reads the optimised program. kinds.py, traffic.py and
collectives.py say what each instruction is, moves and sends, kernels.py and static/ model its
Pallas calls, model_time.py all of it, and report.py says what was found. Nothing here runs a step,
and no figure is a measurement.
"""
