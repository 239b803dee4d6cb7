"""Gemma 4 mixture-of-experts decoder in plain PyTorch: the model, without trainer or device."""

from torch_gemma4.config import Gemma4Config
from torch_gemma4.execution import Execution, Precision, python_loop
from torch_gemma4.init import init_parameters
from torch_gemma4.model import Gemma4ForCausalLM, LossOutput, segment_ids_from_positions
from torch_gemma4.recompute import recompute_layer

__all__ = [
    "Execution",
    "Gemma4Config",
    "Gemma4ForCausalLM",
    "LossOutput",
    "Precision",
    "init_parameters",
    "python_loop",
    "recompute_layer",
    "segment_ids_from_positions",
]
