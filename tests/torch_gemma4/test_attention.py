from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torch_gemma4.attention import Attention, attend, visible
from torch_gemma4.execution import Execution
from torch_gemma4.layer_spec import LayerSpec, RopeSpec
from torch_gemma4.presets import micro
from torch_gemma4.rope import apply_rope, rope_tables

CPU = torch.device("cpu")
S = 11


def spec_of(*, full: bool) -> LayerSpec:
    kind = "full_attention" if full else "sliding_attention"
    return LayerSpec(
        kind=kind, head_dim=8, num_kv_heads=2, k_eq_v=full, window=None if full else 4,
        rope=RopeSpec(theta=1e4),
    )  # fmt: skip


def module_of(spec: LayerSpec, *, bias: bool = False) -> Attention:
    attention = Attention(replace(micro(), attention_bias=bias), spec, Execution()).double()
    with torch.no_grad():
        for param in attention.parameters():
            param.copy_(torch.randn_like(param) * 0.3 + (param.ndim == 1))
    return attention


def by_hand(attention: Attention, x: Tensor, segments: Tensor) -> Tensor:
    """One query of one head at a time, straight from the definition."""
    spec, p = attention.spec, dict(attention.named_parameters())
    size, num_heads = spec.head_dim, micro().num_attention_heads

    def project(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)

    def norm(x: Tensor, weight: Tensor | float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + attention.eps).sqrt() * weight

    tables = rope_tables(spec.rope, size, torch.arange(S), x.dtype)
    q, k = (project(n, x).unflatten(-1, (-1, size)) for n in ("q_proj", "k_proj"))
    v = norm(k if spec.k_eq_v else project("v_proj", x).unflatten(-1, (-1, size)), 1.0)
    q = apply_rope(norm(q, p["q_norm.weight"]), *tables)
    k = apply_rope(norm(k, p["k_norm.weight"]), *tables)
    out = torch.zeros(*x.shape[:2], num_heads, size, dtype=x.dtype)
    for b in range(x.shape[0]):
        for n in range(num_heads):
            g = n // (num_heads // spec.num_kv_heads)
            for i in range(S):
                keys = [
                    j
                    for j in range(i + 1)
                    if segments[b, j] == segments[b, i]
                    and (spec.window is None or i - j < spec.window)
                ]
                scores = torch.stack([q[b, i, n] @ k[b, j, g] for j in keys])
                out[b, i, n] = scores.softmax(0) @ v[b, keys, g]
    return project("o_proj", out.flatten(-2))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_definition(full: bool, bias: bool) -> None:
    attention = module_of(spec_of(full=full), bias=bias)
    x = torch.randn(2, S, micro().hidden_size, dtype=torch.float64)
    segments = torch.tensor([[0] * S, [3] * 4 + [1] * 5 + [3] * 2], dtype=torch.int32)
    tables = rope_tables(attention.spec.rope, 8, torch.arange(S), x.dtype)
    # Segment 3 occurs twice in row 1: only equal ids matter.
    actual = attention(x, *tables, segments)
    torch.testing.assert_close(actual, by_hand(attention, x, segments), rtol=1e-10, atol=1e-12)
    names = {name.split(".")[0] for name, _ in attention.named_parameters()}
    assert ("v_proj" in names) != full


def test_gradients_reach_the_key_projection_by_both_paths() -> None:
    attention = module_of(spec_of(full=True))
    x = torch.randn(1, S, micro().hidden_size, dtype=torch.float64)
    segments = torch.zeros(1, S, dtype=torch.int32)
    tables = rope_tables(attention.spec.rope, 8, torch.arange(S), x.dtype)
    direction = torch.randn(1, S, micro().hidden_size, dtype=torch.float64)
    params = list(attention.parameters())
    ours = torch.autograd.grad(attention(x, *tables, None), params, direction)
    expected = torch.autograd.grad(by_hand(attention, x, segments), params, direction)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_window_counts_the_query_itself() -> None:
    mask = visible(6, 3, None, CPU)
    assert mask.sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert mask[5].tolist() == [False, False, False, True, True, True]
    assert torch.equal(visible(6, None, None, CPU), torch.ones(6, 6).tril().bool())


def test_every_query_sees_itself() -> None:
    segments = torch.randint(0, 3, (4, 9), dtype=torch.int32)
    assert visible(9, 1, segments, CPU).diagonal(dim1=-2, dim2=-1).all()


def test_scores_of_bfloat16_tensors_are_float32() -> None:
    """Scores of 300 and 300.5 would be one number in bfloat16 (spacing 2)."""
    q = torch.tensor([300.0, 1.0]).bfloat16().expand(1, 2, 1, 2)
    k = torch.tensor([[1.0, 0.0], [1.0, 0.5]]).bfloat16()[None, :, None]
    v = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).bfloat16()[None, :, None]
    out = attend(q, k, v, window=None, segment_ids=None)
    assert out.dtype == torch.bfloat16
    assert out[0, 1, 0, 0].item() == pytest.approx(torch.tensor(0.5).sigmoid().item(), abs=2e-3)
