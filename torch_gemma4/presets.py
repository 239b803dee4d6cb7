"""Configurations by name, as functions."""

from torch_gemma4.config import Gemma4Config
from torch_gemma4.layer_spec import FULL, SLIDING


def gemma4_26b_a4b() -> Gemma4Config:
    """Gemma 4 26B-A4B: 25.233 B parameters, 3.823 B active a token. Sizes as in the published
    config of google/gemma-4-26B-A4B."""
    return Gemma4Config(
        vocab_size=262_144,
        hidden_size=2816,
        num_hidden_layers=30,
        layer_types=((SLIDING,) * 5 + (FULL,)) * 5,
        intermediate_size=2112,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        num_global_key_value_heads=2,
        global_head_dim=512,
        sliding_window=1024,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        final_logit_softcapping=30.0,
        pad_token_id=0,
    )


def tiny_moe() -> Gemma4Config:
    """The default of a CPU run: bytes as tokens, one period of 5 local + 1 global layers, and 8
    experts, so that meshes of 4 and 8 devices hold whole experts. 1.8 M parameters."""
    return Gemma4Config(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=6,
        layer_types=(SLIDING,) * 5 + (FULL,),
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_global_key_value_heads=1,
        global_head_dim=64,
        sliding_window=64,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=64,
        final_logit_softcapping=30.0,
    )


def tiny_128e() -> Gemma4Config:
    """The routing of the 26B (128 experts, top 8) on tiny dimensions: two periods of 2 local + 1
    global layers over bytes."""
    return Gemma4Config(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=6,
        layer_types=((SLIDING,) * 2 + (FULL,)) * 2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_global_key_value_heads=1,
        global_head_dim=32,
        sliding_window=32,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=32,
        final_logit_softcapping=30.0,
    )


def micro() -> Gemma4Config:
    """The smallest model with everything in it, for tests: two periods of 2 local + 1 global
    layers, 4 experts."""
    return Gemma4Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=6,
        layer_types=((SLIDING,) * 2 + (FULL,)) * 2,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_global_key_value_heads=1,
        global_head_dim=16,
        sliding_window=8,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        final_logit_softcapping=30.0,
    )
