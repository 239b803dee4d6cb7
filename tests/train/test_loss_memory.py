"""What more tiles of the loss save, by the compiler, beside what the remedies say."""

import json
from dataclasses import replace

import pytest

from tests.train.loss_worker import BATCH, LENGTH, VOCABULARY
from tests.train.processes import run_module
from train.compile.remedies import best_remedies
from train.presets import gemma4_26b_a4b


@pytest.mark.exhaustive
@pytest.mark.libtpu
def test_more_loss_tiles_save_what_the_remedy_says():
    temp = json.loads(run_module("tests.train.loss_worker", 2, 4).splitlines()[-1])
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
