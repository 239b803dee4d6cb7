from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gemma4 import (
    Execution,
    Gemma4ForCausalLM,
    Precision,
    init_parameters,
    segment_ids_from_positions,
)
from torch_gemma4.embedding import Embedding
from torch_gemma4.presets import gemma4_26b_a4b, micro

FLOAT64 = Execution(precision=Precision.uniform(torch.float64))
NAME = "embedding.weight"


def model_of(execution: Execution = FLOAT64, **fields: object) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM(replace(micro(), **fields), execution)
    init_parameters(model)
    return model


def ids_of(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 64, (batch, length))


def test_embedding_factor_is_exact_and_applied_before_the_last_rounding() -> None:
    """sqrt(2816) is 53.066 in float32 and 53.0 in bfloat16."""
    embedding = Embedding(3, 2816, torch.float32)
    with torch.no_grad():
        embedding.weight.normal_()
    table = embedding.weight.detach().bfloat16()
    out = embedding(torch.tensor([[2, 0]]), table)
    expected = table[[2, 0]].double() * 2816**0.5
    assert torch.equal(out[0], expected.bfloat16())
    assert not torch.equal(out[0], table[[2, 0]] * torch.tensor(2816**0.5).bfloat16())


def test_look_up_gradient_is_summed_in_float32() -> None:
    embedding = Embedding(4, 1, torch.float32)
    with torch.no_grad():
        embedding.weight.zero_()
    grad = torch.full((1, 1025, 1), 2.0**-10).bfloat16()
    grad[0, 0] = 1.0
    ids = torch.full((1, 1025), 3, dtype=torch.int32)
    embedding(ids, embedding.weight.detach().bfloat16()).backward(grad)
    assert embedding.weight.grad.flatten().tolist() == [0, 0, 0, 2.0]


def test_look_up_is_a_look_up() -> None:
    """No product with a one-hot matrix: 2 T V D operations for nothing."""

    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.name().removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    embedding = Embedding(64, 8, torch.float32)
    with Ops() as ops:
        embedding(ids_of(), embedding.weight.detach()).sum().backward()
    assert {"embedding", "embedding_dense_backward"} <= ops.names
    assert not {"mm", "bmm", "addmm", "matmul"} & ops.names


def test_tied_gradient_is_the_sum_of_look_up_and_head() -> None:
    tied, ids = model_of(), ids_of()
    untied = model_of(tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(tied.embedding.weight)
    for model in (tied, untied):
        model.loss(ids, ids).loss.backward()
    head, look_up = untied.lm_head.weight.grad, untied.embedding.weight.grad
    assert head.any() and look_up.any()
    torch.testing.assert_close(tied.embedding.weight.grad, head + look_up)
    torch.testing.assert_close(tied.loss(ids, ids).loss, untied.loss(ids, ids).loss)
    assert "lm_head.weight" not in dict(tied.named_parameters())


def test_every_gradient_agrees_with_finite_differences() -> None:
    """One random direction in all parameters, all losses on; routing does not flip within it."""
    model = model_of(
        z_loss_weight=0.01, load_balance_loss_weight=0.1, router_z_loss_weight=0.1, num_loss_tiles=3
    )
    ids = ids_of()
    model.loss(ids, ids).loss.backward()
    directions = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        step = 1e-6 * directions[name]
        with torch.no_grad():
            values = []
            for sign in (1, -2):
                param.add_(sign * step)
                values.append(model.loss(ids, ids).loss)
            param.add_(step)
        slope = (values[0] - values[1]) / 2e-6
        expected = (param.grad * directions[name]).sum()
        assert slope.item() == pytest.approx(expected.item(), rel=2e-5, abs=1e-8), name


def test_softcap_bounds_logits() -> None:
    hidden = 100 * torch.randn(1, 2, 32, dtype=torch.float64)
    capped, free = model_of().logits(hidden), model_of(final_logit_softcapping=None).logits(hidden)
    assert free.abs().max() > 30 > capped.abs().max()
    torch.testing.assert_close(capped, 30 * torch.tanh(free / 30))
    table = model_of().embedding.weight
    torch.testing.assert_close(free, hidden @ table.T)


def test_documents_and_padding_do_not_see_each_other() -> None:
    model = model_of()
    ids = ids_of(1, 12)
    segments = torch.tensor([[1] * 5 + [2] * 4 + [0] * 3], dtype=torch.int32)
    whole = model(ids, segment_ids=segments)[0][0]
    for part in (slice(0, 5), slice(5, 9)):
        alone = model(ids[:, part])[0][0]
        torch.testing.assert_close(whole[part], alone, rtol=1e-9, atol=1e-11)
    for mask in ([1] * 9 + [0] * 3, [0] * 3 + [1] * 9):
        mask = torch.tensor([mask])
        real = mask[0] != 0
        padded = model(ids, attention_mask=mask)[0][0, real]
        torch.testing.assert_close(padded, model(ids[:, real])[0][0], rtol=1e-9, atol=1e-11)
        both = model(ids, attention_mask=mask, segment_ids=segments)[0]
        assert both.isfinite().all()


def test_positions_matter_only_relatively() -> None:
    model, ids = model_of(), ids_of()
    positions = torch.arange(12)
    moved = model(ids, positions=positions + 1000)[0]
    torch.testing.assert_close(moved, model(ids)[0], rtol=1e-8, atol=1e-9)
    stretched = model(ids, positions=(2 * positions).expand(2, 12))[0]
    assert not torch.allclose(stretched, model(ids)[0], rtol=1e-3)


def test_segment_ids_from_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [5, 6, 7, 8, 10, 11, 3]])
    expected = [[0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 1, 1, 2]]
    assert segment_ids_from_positions(positions).tolist() == expected


def test_a_model_built_on_the_meta_device_is_the_same_model() -> None:
    with torch.device("meta"):
        model = Gemma4ForCausalLM(micro(), FLOAT64)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    init_parameters(model)
    ids = ids_of()
    assert torch.equal(model(ids)[0], model_of()(ids)[0])


def test_the_26b_builds_on_the_meta_device_with_its_published_size() -> None:
    with torch.device("meta"):
        model = Gemma4ForCausalLM(gemma4_26b_a4b())
    assert sum(param.numel() for param in model.parameters()) == 25_233_141_790


def test_per_expert_scale_is_no_constant() -> None:
    model, ids, seen = model_of(), ids_of(), []
    template = model.stack.templates[0]
    template.router.register_forward_hook(lambda module, args, out: seen.append(out.weights))
    model(ids)
    with torch.no_grad():
        model.get_parameter("stack.segments.0.router.per_expert_scale").mul_(2)
    model(ids)
    torch.testing.assert_close(seen[4], 2 * seen[0])


def test_forgotten_initialisation_is_nan() -> None:
    assert Gemma4ForCausalLM(micro()).loss(ids_of(), ids_of()).loss.isnan()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.int32)}, r"input_ids: .*\(4,\); give int32"),
        ({"input_ids": torch.zeros(1, 4)}, r"input_ids: torch.float32 .*; give int32"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.bool)}, "input_ids: torch.bool .*; give"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.int32)}, r"\(0, 4\); .*at least one token"),
        ({"segment_ids": torch.rand(1, 4)}, "segment_ids: torch.float32; give integers"),
        ({"segment_ids": torch.zeros(1, 3)}, r"segment_ids: shape \[1, 3\]; give \[1, 4\]"),
        ({"attention_mask": torch.ones(4)}, r"attention_mask: shape \[4\]; give \[1, 4\]"),
        ({"positions": torch.ones(5)}, r"positions: shape \[5\]; give \[1, 4\] or \[4\]"),
    ],
)
def test_shapes_that_do_not_fit(kwargs: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of()(**{"input_ids": torch.zeros(1, 4, dtype=torch.int32), **kwargs})


def test_labels_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"labels: shape \[2, 11\]; give \[2, 12\]"):
        model_of().loss(ids_of(), ids_of(2, 11))


def test_labels_of_another_dtype() -> None:
    with pytest.raises(ValueError, match=r"labels: torch.float32; give integers"):
        model_of().loss(ids_of(), ids_of().float())


def test_logits_and_loss_agree() -> None:
    model, ids = model_of(num_loss_tiles=4), ids_of()
    logits = model.logits(model(ids)[0])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model.loss(ids, ids).loss, expected)
    assert model.get_parameter(NAME).dtype == torch.float64
