import pytest
import torch

from torch_gemma4.layer_spec import RopeSpec
from torch_gemma4.rope import apply_rope, inverse_frequencies, rope_tables

LOCAL = RopeSpec(theta=1e4)
GLOBAL = RopeSpec(theta=1e6, rope_type="proportional", partial_rotary_factor=0.25)


def test_frequencies_of_the_26b() -> None:
    """hf-gemma4.md section 2: the values other ports got wrong."""
    local = inverse_frequencies(LOCAL, 256)
    assert len(local) == 128
    assert local[1] == pytest.approx(1e4 ** (-1 / 128))
    full = inverse_frequencies(GLOBAL, 512)
    assert len(full) == 256
    assert full[0] == 1.0
    assert full[1] == pytest.approx(0.94746351, abs=5e-8)
    assert full[63] == pytest.approx(0.03337625, abs=5e-8)
    assert not any(full[64:])


def test_factor_divides_frequencies() -> None:
    scaled = RopeSpec(theta=1e6, rope_type="proportional", partial_rotary_factor=0.25, factor=8.0)
    plain = inverse_frequencies(GLOBAL, 32)
    assert inverse_frequencies(scaled, 32) == pytest.approx([f / 8 for f in plain])


@pytest.mark.parametrize("spec", [LOCAL, GLOBAL])
def test_bit_equal_to_the_rotate_half_form(spec: RopeSpec) -> None:
    x = torch.randn(2, 16, 3, 32)
    cos, sin = rope_tables(spec, 32, torch.arange(16), x.dtype)
    assert cos.shape == sin.shape == (16, 1, 16)
    cos_full, sin_full = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    rotated_half = torch.cat((-x[..., 16:], x[..., :16]), -1)
    assert torch.equal(apply_rope(x, cos, sin), x * cos_full + rotated_half * sin_full)


def test_global_layers_turn_pairs_of_the_whole_head() -> None:
    """With a quarter of 32: pairs (j, j + 16) for j < 4 turn, all else passes through."""
    x = torch.randn(1, 5, 1, 32)
    turned = apply_rope(x, *rope_tables(GLOBAL, 32, torch.arange(5), x.dtype))
    moved = (turned != x)[0, 1:, 0].any(0)
    assert moved.nonzero().flatten().tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


def test_products_depend_on_relative_positions_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        at = [rope_tables(LOCAL, 16, torch.tensor([n]), q.dtype) for n in (i, j)]
        return (apply_rope(q, *at[0]) * apply_rope(k, *at[1])).sum().item()

    assert product(7, 3) == pytest.approx(product(107, 103), rel=1e-12)
    assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


def test_bfloat16_is_rounded_once_and_positions_may_differ_by_row() -> None:
    x = torch.randn(2, 4, 3, 16).bfloat16()
    positions = torch.tensor([[0, 1, 2, 3], [9000, 9001, 0, 1]])
    cos, sin = rope_tables(LOCAL, 16, positions, x.dtype)
    assert cos.dtype == torch.float32 and cos.shape == (2, 4, 1, 8)
    wide = apply_rope(x.float(), cos, sin)
    assert torch.equal(apply_rope(x, cos, sin), wide.bfloat16())
    for row in range(2):
        one = apply_rope(x[row : row + 1], *rope_tables(LOCAL, 16, positions[row], x.dtype))
        assert torch.equal(apply_rope(x, cos, sin)[row], one[0])
