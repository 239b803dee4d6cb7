"""The static profile of one kernel: its final schedule, its grid steps, and a modelled time.

dump.py compiles a module alone with libtpu's low-level dump, schedule.py reads the dump,
grid_steps.py evaluates the kernel's grid, step_time.py makes a time of both. No TPU, nothing
measured.
"""
