"""Name, version, pins and extras. Tools' settings are in pyproject.toml."""

from setuptools import find_packages, setup

LIBTPU = "libtpu==0.0.21"

setup(
    name="torch-gemma4",
    version="0.1.0",
    description="Pre-training of Gemma 4 mixture-of-experts models in PyTorch/XLA",
    packages=find_packages(include=["torch_gemma4*", "pallas_ops*", "train*"]),
    python_requires=">=3.11,<3.14",  # torch_xla 2.9 has wheels up to 3.13
    install_requires=[
        # One tested set: Pallas kernels pass from jax through torch_xla to libtpu, and each of
        # the three reads only the formats of its own time.
        "torch==2.9.0",
        "torch_xla==2.9.0",
        "jax==0.7.1",
        "jaxlib==0.7.1",
        "numpy>=2.0",
        "safetensors>=0.6",
        "tyro>=1.0.17,<2",
        "rich>=14.0",
        "grain>=0.2.18,<0.3",
        "tensorboard>=2.20",
        "tokenizers>=0.22",  # reads tokenizer.json
        "matplotlib>=3.9",  # draws the load of the experts, and a compiled step
        "packaging>=24",  # doctor reads the pins above
        "fsspec>=2025.3",  # checkpoints: torch itself requires it
    ],
    extras_require={
        "tpu": [LIBTPU, "tpu-info"],
        "aot": [LIBTPU],
        "datasets": ["datasets>=4,<6"],
        "sentencepiece": ["sentencepiece>=0.2"],
        "wandb": ["wandb>=0.20"],
        "gcs": ["gcsfs>=2025.3"],  # checkpoints in gs://
        "dev": [
            "pytest>=9",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            "jaxtyping",
            "beartype",
            "ruff==0.17.6",
            LIBTPU,
        ],
    },
)
