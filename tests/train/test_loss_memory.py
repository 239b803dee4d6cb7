"""What more tiles of the loss save, by the compiler, beside what the remedies say."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.loss_worker import BATCH, LENGTH, VOCABULARY
from train.compile.remedies import best_remedies
from train.presets import gemma4_26b_a4b


@pytest.mark.exhaustive
@pytest.mark.libtpu
def test_more_loss_tiles_save_what_the_remedy_says():
    environment = dict(os.environ)
    for variable in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.loss_worker", "2", "4"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    temp = json.loads(done.stdout.splitlines()[-1])
    config = gemma4_26b_a4b()
    config = replace(
        config,
        model=replace(config.model, num_loss_tiles=2, vocab_size=VOCABULARY),
        data=replace(config.data, batch_size=BATCH, sequence_length=LENGTH),
        mesh=replace(config.mesh, fsdp=1),
    )
    remedies = best_remedies(config, None, None, used_bytes=10**10, count=9)
    (said,) = (r.saved_bytes for r in remedies if "num_loss_tiles" in r.options)
    assert said == BATCH * LENGTH // 2 * VOCABULARY * 2 // 2
    assert temp["2"] - temp["4"] == pytest.approx(said, rel=0.1)
