"""Where metrics go. A sink is one class of four methods; writer calls all of them."""

from __future__ import annotations

import html
import importlib.util
import json
import math
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from train.config import LogConfig


class Sink(Protocol):
    """A place for a run's numbers, pictures and texts. Steps rise from call to call."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Numbers of one step; some may not be finite."""
        ...

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """uint8 pixels [height, width, 3]."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Words of the model."""
        ...

    def close(self) -> None:
        """The last call."""
        ...


class Files:
    """metrics.jsonl, one object a line, each whole as soon as it is logged, so that a killed run
    leaves a readable file; NAME.png, the last picture of a name; NAME.txt, all texts of one."""

    def __init__(self, directory: Path, done: int = 0) -> None:
        """Goes on after step `done`: rows of later steps, which are trained again, are dropped.
        With 0, a file that is there is kept under another name."""
        self._directory = directory
        path = directory / "metrics.jsonl"
        _drop_rows_after(done, path)
        self._file = open(path, "a", buffering=1)  # 1: by line

    def scalars(self, step: int, values: dict[str, float]) -> None:
        # JSON has no name for what is not finite.
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        from matplotlib.image import imsave

        imsave(self._directory / f"{name}.png", pixels)

    def text(self, step: int, name: str, text: str) -> None:
        with open(self._directory / f"{name}.txt", "a") as file:
            file.write(f"--- step {step}\n{text}\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars under train/ and eval/, pictures and texts, as TensorBoard's event files."""

    def __init__(self, directory: Path, done: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=done + 1)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(_tag(name), value, step)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._writer.add_image(f"train/{name}", pixels, step, dataformats="HWC")

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Who one is and where it goes is wandb's own business (`wandb login`,
    `wandb offline`)."""

    def __init__(self, directory: Path, project: str) -> None:
        import wandb

        self._wandb = wandb
        config = json.loads((directory / "config.json").read_text())
        self._run = wandb.init(
            project=project, name=directory.name, dir=str(directory), config=config
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({_tag(name): value for name, value in values.items()}, step=step)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({f"train/{name}": self._wandb.Image(pixels)}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_sinks(log: LogConfig) -> None:
    """Raises ValueError for a sink whose package is not installed."""
    if log.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"log.wandb = {log.wandb!r} needs a package that is not installed: "
            "pip install -e '.[wandb]'"
        )


def open_sinks(directory: Path, log: LogConfig, done: int = 0) -> list[Sink]:
    """Those that `log` asks for, to go on after step `done`; files are always among them."""
    sinks: list[Sink] = [Files(directory, done)]
    if log.tensorboard:
        sinks.append(TensorBoard(directory, done))
    if log.wandb:
        sinks.append(WandB(directory, log.wandb))
    return sinks


def _drop_rows_after(done: int, path: Path) -> None:
    if not path.exists():
        return
    if done == 0:
        free = (path.with_name(f"metrics-{number}.jsonl") for number in count(1))
        path.rename(next(name for name in free if not name.exists()))
        return
    kept = path.with_suffix(".kept")
    with open(path) as rows, open(kept, "w") as file:
        # A killed process may have left half a row.
        file.writelines(
            row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= done
        )
    kept.replace(path)


def _tag(name: str) -> str:
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
