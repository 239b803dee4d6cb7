"""A run for the tests of checkpoints: CPU tensors whose value tells the step they are of."""

from dataclasses import replace

import fsspec
import torch

from train.checkpoint.checkpointer import Checkpointer
from train.config import CheckpointConfig
from train.hosts import Hosts
from train.presets import cpu_tiny


class Data:
    """An iterator's position."""

    def __init__(self):
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Run:
    """A run whose whole state is known from its step."""

    def __init__(self, address, *, model=None, **changes):
        checkpoint = {"every_steps": 100, "every_minutes": 0} | changes
        resume = checkpoint.pop("resume", "auto")
        config = replace(cpu_tiny(), checkpoint=CheckpointConfig(**checkpoint), resume=resume)
        if model:
            config = replace(config, model=replace(config.model, **model))
        self.data, self.told = Data(), []
        self.tensors = {"w": torch.zeros(300, 50), "count": torch.zeros((), dtype=torch.int32)}
        self.checkpointer = Checkpointer(
            replace(config, steps=1000),
            str(address),
            Hosts(),
            self.tensors,
            self.data,
            lambda tensor: tensor,
            lambda name, tensor: tensor,
            self.told.append,
        )

    def go_to(self, step):
        self.tensors["w"].copy_(torch.arange(15_000.0).view(300, 50) + step)
        self.tensors["count"].fill_(step)
        self.data.next = 16 * step
        return self

    def save(self, *steps):
        for step in steps:
            self.go_to(step).checkpointer.save(step)
        self.checkpointer.wait()
        return self

    def restored(self):
        """The step it goes on from, having checked that all of its state is that step's."""
        step = self.checkpointer.restore()
        expected = torch.arange(15_000.0).view(300, 50) + step if step else torch.zeros(300, 50)
        assert torch.equal(self.tensors["w"], expected)
        assert self.tensors["count"] == step and self.data.next == 16 * step
        return step


def path_of(address, step, name):
    files, root = fsspec.core.url_to_fs(address)
    return files, f"{root}/step-{step:08d}/{name}"


def damage(address, step, name="__0_0.distcp"):
    files, path = path_of(address, step, name)
    content = bytearray(files.cat_file(path))
    content[len(content) // 2] ^= 4
    files.pipe_file(path, bytes(content))
