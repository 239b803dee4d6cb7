from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gemma4 import Execution, Gemma4ForCausalLM, LossOutput, Precision, init_parameters
from torch_gemma4.loss import shift_labels, tiled_cross_entropy
from torch_gemma4.presets import micro

B, S, D, V, CAP = 2, 12, 5, 17, 3.0


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    weight = (2 * torch.randn(V, D, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, V, (B, S), dtype=torch.int32)
    labels[torch.rand(B, S) < 0.3] = -100
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None) -> tuple[Tensor, ...]:
    logits = hidden @ weight.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    flat = labels.flatten().long()
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), flat, reduction="sum")
    log_z = logits.logsumexp(-1).flatten()
    return cross_entropy, log_z[flat != -100].square().sum()


@pytest.mark.parametrize("num_tiles", [1, 3, 12])
@pytest.mark.parametrize("cap", [None, CAP])
def test_tiled_equals_untiled_with_gradients(num_tiles: int, cap: float | None) -> None:
    hidden, weight, labels = problem()
    ours = tiled_cross_entropy(
        hidden, weight, weight.detach(), labels, softcap=cap, num_tiles=num_tiles
    )
    expected = plain(hidden, weight, labels, cap)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    for weights in ((1.0, 0.0), (0.3, 0.7)):  # of cross entropy and z-loss
        grads = [
            torch.autograd.grad(
                sum(w * part for w, part in zip(weights, parts, strict=True)),
                (hidden, weight),
                retain_graph=True,
            )
            for parts in (ours, expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, labels = problem()

    def sums(hidden: Tensor, weight: Tensor) -> Tensor:
        table = weight.detach()
        return torch.stack(
            tiled_cross_entropy(hidden, weight, table, labels, softcap=CAP, num_tiles=4)
        )

    torch.autograd.gradcheck(sums, (hidden, weight))


def test_table_gradient_is_summed_over_tiles_in_float32() -> None:
    """Every tile adds one part in 1000 of the first: bfloat16 sums would stand still."""
    length = 65
    hidden = torch.full((1, length, 1), 2.0**-9)
    hidden[0, 0] = 1.0
    weight = torch.zeros(2, 1, requires_grad=True)
    labels = torch.zeros(1, length, dtype=torch.int32)
    sums = tiled_cross_entropy(
        hidden.bfloat16(),
        weight,
        weight.detach().bfloat16(),
        labels,
        softcap=None,
        num_tiles=length,
    )
    sums.cross_entropy.backward()
    assert weight.grad.dtype == torch.float32
    expected = 0.5 * (1 + (length - 1) * 2.0**-9)
    assert weight.grad.flatten().tolist() == [-expected, expected]


def test_no_tensor_holds_the_logits_of_the_whole_sequence() -> None:
    hidden, weight, labels = problem(torch.float32)

    class LargestTensor(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
            return out

    def largest(num_tiles: int) -> int:
        with LargestTensor() as mode:
            table = weight.detach()
            sums = tiled_cross_entropy(
                hidden, weight, table, labels, softcap=CAP, num_tiles=num_tiles
            )
            sum(sums).backward()
        return mode.num_bytes // hidden.element_size()

    assert largest(1) == B * S * V
    assert largest(4) <= max(B * S * V // 4, V * D, B * S * D)


def test_labels_are_shifted_at_full_length() -> None:
    labels = torch.tensor([[5, 6, -100, 8]])
    assert shift_labels(labels).tolist() == [[6, -100, 8, -100]]


def model_of(**fields: object) -> Gemma4ForCausalLM:
    config = replace(micro(), **fields)
    model = Gemma4ForCausalLM(config, Execution(precision=Precision.uniform(torch.float64)))
    init_parameters(model)
    return model


def gradients(model: Gemma4ForCausalLM) -> dict[str, Tensor]:
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    return grads


def test_model_loss_does_not_depend_on_tiles() -> None:
    ids = torch.randint(0, 64, (2, S))
    results = []
    for num_tiles in (1, 6):
        model = model_of(num_loss_tiles=num_tiles, z_loss_weight=1e-2)
        out = model.loss(ids, ids)
        out.loss.backward()
        results.append((out.loss.detach(), gradients(model)))
    assert results[0][0] > 0
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-13)


def test_all_labels_ignored_is_zero_loss_and_zero_gradient() -> None:
    model = model_of(z_loss_weight=1e-2)
    ids = torch.randint(0, 64, (2, S))
    out = model.loss(ids, torch.full_like(ids, -100))
    out.loss.backward()
    assert out.loss == 0 and out.num_valid == 0
    assert all(not grad.any() for grad in gradients(model).values())


@pytest.mark.parametrize("num_items", [0, torch.tensor(0)])
def test_no_items_in_any_micro_batch_is_zero_loss(num_items: Tensor | int) -> None:
    ids = torch.randint(0, 64, (2, S))
    assert model_of().loss(ids, torch.full_like(ids, -100), num_items=num_items).loss == 0


def test_differentiating_twice_is_refused() -> None:
    hidden, weight, labels = problem()
    sums = tiled_cross_entropy(hidden, weight, weight.detach(), labels, softcap=CAP, num_tiles=4)
    (grad,) = torch.autograd.grad(sums.cross_entropy.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_one_label_among_many_ignored_has_a_gradient() -> None:
    model = model_of()
    ids = torch.randint(0, 64, (2, S))
    labels = torch.full_like(ids, -100)
    labels[1, 7] = 3
    out = model.loss(ids, labels)
    out.loss.backward()
    assert out.num_valid == 1
    expected = F.cross_entropy(model.logits(model(ids)[0])[1, 6], torch.tensor(3))
    torch.testing.assert_close(out.loss, expected)
    assert all(grad.norm() > 1e-9 for grad in gradients(model).values())


def test_micro_batches_add_up_to_the_joint_batch() -> None:
    """With unequal numbers of labels, all losses on."""
    model = model_of(
        z_loss_weight=1e-2, load_balance_loss_weight=0.1, router_z_loss_weight=0.1, num_loss_tiles=2
    )
    ids = torch.randint(0, 64, (4, S))
    labels = ids.clone()
    labels[:2, 3:] = -100
    joint = model.loss(ids, labels)
    joint.loss.backward()
    expected = gradients(model)
    parts: list[LossOutput] = []
    for rows in (slice(0, 2), slice(2, 4)):
        out = model.loss(ids[rows], labels[rows], num_items=joint.num_valid, num_micro_batches=2)
        out.loss.backward()
        parts.append(out)
    assert parts[0].num_valid != parts[1].num_valid
    for name in ("loss", "cross_entropy", "z_loss", "load_balance_loss", "router_z_loss"):
        total = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(total, getattr(joint, name), rtol=1e-12, atol=0)
    assert torch.equal(parts[0].expert_load + parts[1].expert_load, joint.expert_load)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-13)


def test_indivisible_sequence_names_the_field_and_what_divides() -> None:
    model = model_of(num_loss_tiles=5)
    ids = torch.zeros(1, S, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"num_loss_tiles = 5.* 12; use one of 1, 2, 3, 4, 6, 12"):
        model.loss(ids, ids)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_of_the_batch_add_up(num_shards):
    torch.manual_seed(0)
    labels = torch.randint(0, 7, (4, 8))
    grads = []
    for shards in (1, num_shards):
        hidden = torch.linspace(-1, 1, 4 * 8 * 5, dtype=torch.float64).view(4, 8, 5)
        hidden.requires_grad_()
        weight = torch.linspace(-2, 1, 7 * 5, dtype=torch.float64).view(7, 5).requires_grad_()
        seen = []

        def note(tensor, role, seen=seen):
            seen.append((tuple(tensor.shape), role))
            return tensor

        sums = tiled_cross_entropy(
            hidden,
            weight,
            weight.detach(),
            labels,
            softcap=3.0,
            num_tiles=2,
            num_shards=shards,
            constrain=note,
        )
        grads.append(torch.autograd.grad(sum(sums), (hidden, weight)))
        assert seen.pop() == ((7, 5), "table_gradient")
        assert {role for _, role in seen} == {"rows"}
        assert [shape for shape, _ in seen].count((shards, 7, 5)) == 3  # at the start, after a tile
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)
