"""Fills a micro model from folders of safetensors on virtual meshes, in a process of its own.

    python -m tests.train.init_from_worker FOLDER FOLDER

Fails unless every parameter, of the first on 4 devices and of the second on 2 x 2, has the bits
that the folder's loaded by `load_pretrained` have, and lies as its rule says. Prints the most
numbers that were read of a folder at once, and those of its largest parameter. Leaves a checkpoint
of the devices' parameters in FOLDER-checkpoints.
"""

from __future__ import annotations

import sys


def main(folders: list[str]) -> None:
    from train.config import MeshConfig
    from train.launch import prepare_environment

    prepare_environment(MeshConfig(fsdp=4))
    from dataclasses import replace

    import torch

    from tests.train.checkpoint_run import Data
    from torch_gemma4.config import Gemma4Config
    from torch_gemma4.hf import load_pretrained
    from torch_gemma4.model import Gemma4ForCausalLM
    from torch_gemma4.safetensors_folder import FolderReader
    from train.build import build_model
    from train.checkpoint.checkpointer import Checkpointer
    from train.hosts import Hosts
    from train.init_from import load_weights, refuse_unfit_weights
    from train.mesh import DeviceMesh
    from train.presets import cpu_tiny

    largest = 0
    for name in ("rows", "tensor"):
        original = getattr(FolderReader, name)

        def watched(*arguments, original=original):
            nonlocal largest
            tensor = original(*arguments)
            largest = max(largest, tensor.numel())
            return tensor

        setattr(FolderReader, name, watched)

    shapes = ({"fsdp": 4}, {"data": 2, "fsdp": 2})
    for folder, shape in zip(folders, shapes, strict=True):
        # Experts whole in the first folder's model, in two halves in the other's.
        own = replace(Gemma4Config.from_hf_file(folder), split_expert_weights=folder != folders[0])
        expected = Gemma4ForCausalLM(own)
        load_pretrained(expected, folder)
        largest = 0
        config = replace(
            cpu_tiny(),
            model=expected.config,
            mesh=MeshConfig(**shape),
            init_from=folder,
        )
        refuse_unfit_weights(config)
        mesh = DeviceMesh(config.mesh)
        model = build_model(config, mesh)
        load_weights(config, model, Hosts(), mesh.place_whole)
        assert model.get_parameter("embedding.weight").requires_grad
        for name, parameter in expected.named_parameters():
            found = model.get_parameter(name)
            assert torch.equal(found.detach().cpu(), parameter), (folder, shape, name)
            lies = sharding_of(found)
            wanted = sharding_of(
                mesh.place(parameter.detach(), mesh.parameter_spec(name, parameter))
            )
            assert lies == wanted, (name, lies, wanted)
        weights = {f"model/{name}": p for name, p in model.named_parameters()}
        layout = mesh.place_whole, mesh.annotate_parameter
        address = f"{folder}-checkpoints"
        checkpointer = Checkpointer(
            config, address, Hosts(), weights, Data(), *layout, lambda line: None
        )
        checkpointer.save(1)
        checkpointer.wait()
        print(largest, max(parameter.numel() for parameter in expected.parameters()))


def sharding_of(tensor) -> str:
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


if __name__ == "__main__":
    main(sys.argv[1:])
