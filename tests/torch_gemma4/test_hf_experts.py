"""Our ops in place of a transformers model's experts, and our folders in its hands. What needs
transformers is skipped without it: pip install 'transformers>=5', in an environment of its own."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torch_gemma4 import Execution, Gemma4Config, Gemma4ForCausalLM, Precision
from torch_gemma4.hf import load_pretrained, save_pretrained
from torch_gemma4.hf_experts import NAME, pallas_experts, use_pallas_experts
from torch_gemma4.hf_names import PUBLISHED_PREFIX, TEXT_ONLY_PREFIX
from torch_gemma4.presets import micro

T, D, F, E, K = 24, 16, 12, 6, 2
SWITCHES = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers is not installed (docs/hugging_face.md tells how to run these)",
)


class StandIn(nn.Module):
    """Named, shaped and called as transformers' experts are."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.config = SimpleNamespace(hidden_activation="gelu_pytorch_tanh")
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * F, D, dtype=dtype))
        self.down_proj = nn.Parameter(torch.randn(E, D, F, dtype=dtype))
        for name, value in SWITCHES.items():
            setattr(self, name, value)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """A token at a time, as the equations read."""
        rows = []
        for x, chosen, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True):
            terms = []
            for expert, weight in zip(chosen.tolist(), weights, strict=True):
                gate, up = (self.gate_up_proj[expert] @ x).chunk(2)
                inner = nn.functional.gelu(gate, approximate="tanh") * up
                terms.append(self.down_proj[expert] @ inner * weight)
            rows.append(torch.stack(terms).sum(0))
        return torch.stack(rows)


def routed(num_experts=E):
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    weights, ids = torch.randn(T, num_experts, dtype=torch.float64).softmax(-1).topk(K)
    return x, ids, weights.detach().requires_grad_()


def test_values_and_gradients_are_those_of_the_equations():
    experts, (x, ids, weights) = StandIn(), routed(E - 1)  # the last expert has no tokens
    inputs = [x, weights, experts.gate_up_proj, experts.down_proj]
    cotangent = torch.randn(T, D, dtype=torch.float64)
    found, expected = (
        [y, *torch.autograd.grad(y, inputs, cotangent)]
        for y in (pallas_experts(experts, x, ids, weights), experts(x, ids, weights))
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not found[3][-1].any()


def test_bfloat16_rows_and_float32_weights():
    experts, (x, ids, weights) = StandIn(), routed()
    exact = experts(x, ids, weights)
    y = pallas_experts(experts.float(), x.bfloat16(), ids, weights.float())
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() <= 0.01 * exact.norm()


# With transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A micro model, as our export writes it, in both forms."""
    folder = tmp_path_factory.mktemp("exported")
    model = ours(micro_with_padding())
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_scale = "norm" in name or "scal" in name
        tensor.copy_(1 + 0.2 * noise if is_scale else 0.2 * noise)
    save_pretrained(model, folder / "text", prefix=TEXT_ONLY_PREFIX, max_shard_bytes=200_000)
    save_pretrained(model, folder / "published", prefix=PUBLISHED_PREFIX)
    return folder


def micro_with_padding():
    return Gemma4Config(**{**vars(micro()), "pad_token_id": 0})


def ours(config):
    return Gemma4ForCausalLM(config, Execution(precision=Precision.uniform(torch.float32)))


def theirs(folder, **options):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model


@needs_transformers
@pytest.mark.parametrize("form", ["text", "published"])
def test_what_we_save_loads_in_transformers(folder, form):
    model = ours(Gemma4Config.from_hf_file(folder / form))
    load_pretrained(model, folder / form)
    ids = torch.randint(1, 64, (2, 20))
    with torch.no_grad():
        expected = model.logits(model(ids)[0])
        found = theirs(folder / form)(ids).logits
    assert (found - expected).abs().max() <= 3e-4


@needs_transformers
def test_experts_exchanged_in_transformers_change_nothing(folder):
    model = theirs(folder / "text", experts_implementation="eager")
    ids = torch.randint(1, 64, (2, 20))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    results = []
    for exchange in (lambda: None, lambda: use_pallas_experts(model)):
        exchange()
        model.zero_grad()
        output = model(ids, labels=labels)
        output.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((output.logits.detach(), grads))
    assert model.config._experts_implementation == NAME
    (expected, grads), (found, new_grads) = results
    assert (found - expected).abs().max() <= 1e-4
    assert not torch.equal(found, expected)  # another implementation did run
    for name, grad in grads.items():
        assert (new_grads[name] - grad).norm() <= 1e-4 * grad.norm(), name


@needs_transformers
def test_as_many_experts_as_layers_are_exchanged(folder):
    assert use_pallas_experts(theirs(folder / "text")) == 6
    model = theirs(folder / "published")
    assert use_pallas_experts(model) == 6
    assert model.config.get_text_config()._experts_implementation == NAME


# Refusals


@pytest.fixture
def interface(monkeypatch):
    """transformers' interface of experts, or a stand-in."""
    if find_spec("transformers") is None:
        registry = SimpleNamespace(register=lambda name, function: None)
        module = SimpleNamespace(ALL_EXPERTS_FUNCTIONS=registry)
        for name in ("transformers", "transformers.integrations"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace())
        monkeypatch.setitem(sys.modules, "transformers.integrations.moe", module)


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.layers = nn.ModuleList(experts)
        self.implementation = None

    def set_experts_implementation(self, name):
        self.implementation = name


def test_a_model_takes_the_implementation(interface):
    model = Model([StandIn(), nn.Linear(2, 2), StandIn()])
    assert use_pallas_experts(model) == 2
    assert model.implementation == NAME


def test_a_model_without_experts_is_refused(interface):
    with pytest.raises(ValueError, match="model: Model has no experts to exchange; give"):
        use_pallas_experts(Model([nn.Linear(2, 2)]))


@pytest.mark.parametrize("activation", ["silu", None])
def test_another_activation_is_refused(activation, interface):
    model = Model([StandIn()])
    model.layers[0].config = SimpleNamespace(
        **{"hidden_activation": activation} if activation else {}
    )
    message = f"hidden_activation = {activation!r}: the experts of StandIn need gelu_pytorch_tanh"
    with pytest.raises(ValueError, match=message):
        use_pallas_experts(model)
    assert model.implementation is None


@pytest.mark.parametrize("switch", SWITCHES)
def test_another_way_to_store_experts_is_refused(switch, interface):
    model = Model([StandIn()])
    setattr(model.layers[0], switch, not SWITCHES[switch])
    with pytest.raises(ValueError, match=f"{switch} = {not SWITCHES[switch]}: the experts of"):
        use_pallas_experts(model)


def test_without_transformers_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5'"):
        use_pallas_experts(Model([StandIn()]))
