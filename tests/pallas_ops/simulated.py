"""The TPU interpreter, which simulates memory and copies: strict, and left clean."""

from contextlib import contextmanager

from jax._src.pallas.mosaic import interpret as interpreter
from jax.experimental.pallas import tpu as pltpu

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
"""Memory begins as NaN, races are noted, and reads past the end are errors."""


@contextmanager
def without_races(params=STRICT):
    """Gives what `interpret` is to be inside, where results must be read too; no copy may race."""
    try:
        yield params
        assert not interpreter.races.races_found
    finally:  # an error inside leaves the simulated memory behind, for the next test to trip on
        interpreter.reset_tpu_interpret_mode_state()
