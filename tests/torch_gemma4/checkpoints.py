"""Models and checkpoint folders, for the tests of both directions."""

import torch
from safetensors.torch import load_file

from torch_gemma4.execution import Execution, Precision
from torch_gemma4.model import Gemma4ForCausalLM


def build(config, *, dtype=torch.float32, seed=None):
    """A model of NaN, or of values that differ everywhere if `seed` is given."""
    model = Gemma4ForCausalLM(config, Execution(precision=Precision(params=dtype)))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def assert_same(found, expected):
    """Equal names, dtypes, shapes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


def load_folder(folder):
    """All tensors of a folder, by the safetensors library."""
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}
