"""What recomputation costs and keeps, against counts of the 26B made by hand."""

import pytest

from torch_gemma4.accounting import training_flops
from torch_gemma4.presets import gemma4_26b_a4b
from torch_gemma4.recompute_cost import recompute_cost

STEP = {"sequence_length": 16_384, "sequences_per_chip": 2}
TOKENS = 2 * 16_384
INPUTS = 30 * TOKENS * 2816 * 2


def cost(policy, **options):
    return recompute_cost(gemma4_26b_a4b(), policy, **STEP, **options)


def test_full_runs_the_whole_forward_pass_again_and_keeps_inputs():
    forward = training_flops(gemma4_26b_a4b(), **STEP).forward
    assert cost("full").total_flops == forward
    assert cost("full").kept_bytes == INPUTS


def test_none_runs_only_the_losss_logits_again():
    head = 2 * TOKENS * 2816 * 262_144
    assert cost("none").flops == {"head": head}
    assert cost("none").kept_bytes > 5 * INPUTS


@pytest.mark.parametrize(
    ("policy", "spared", "added"),
    [
        # 5 global layers of 16 heads of 512, 25 local ones of 16 heads of 256, in bfloat16; a
        # log normaliser a head in float32.
        ("save_global_attention", ["global attention"], 5 * 16 * (512 * 2 + 4)),
        (
            "save_attention",
            ["global attention", "local attention"],
            5 * 16 * (512 * 2 + 4) + 25 * 16 * (256 * 2 + 4),
        ),
    ],
)
def test_kept_attention_is_not_run_again(policy, spared, added):
    found, full = cost(policy), cost("full")
    assert {part: n for part, n in full.flops.items() if part not in spared} == found.flops
    assert found.kept_bytes == INPUTS + TOKENS * added


def test_micro_batches_keep_less_and_run_as_much_again():
    halved, whole = cost("save_attention", micro_batches=2), cost("save_attention")
    assert halved.flops == whole.flops and 2 * halved.kept_bytes == whole.kept_bytes


def test_float32_activations_are_twice_as_large():
    assert cost("full", compute_bytes=4).kept_bytes == 2 * INPUTS
