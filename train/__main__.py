"""`python -m train [run | info | compile | ...]`: the command line."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from textwrap import fill
from traceback import extract_tb
from typing import Annotated, Literal, TypeVar

import tyro

from torch_gemma4.config import Gemma4Config
from train.config import RunConfig
from train.data.config import DataConfig
from train.exit_codes import ExitCode, RunEnded
from train.presets import PRESETS

PresetName = Literal[tuple(PRESETS)]  # type: ignore[valid-type]
Config = Annotated[RunConfig, tyro.conf.arg(name="")]  # options carry no "config." in front


@dataclass(frozen=True, kw_only=True)
class Run:
    """Trains Gemma 4 on text, from scratch or from given weights, on a mesh of devices.

    Commands (--help after one tells its options):
      run        trains; what python -m train does without a command, see below
      info       what a run needs, from its configuration alone
      doctor     whether this machine can train: versions, devices, a kernel
      compile    what a TPU's compiler says of the training step, without a TPU
      report     such a report once more, or two side by side
      tokenize   documents to tokens, once, for a corpus larger than memory
      export     weights of a checkpoint to a folder of Hugging Face's form

      python -m train                                   2 cores, no download
      python -m train --data.path ~/books --steps 1000  your own text
      python -m train --preset gemma4_26b_a4b           on every host of a v6e-128
      python -m train --init_from DIR --model_from DIR  from Hugging Face weights

    Progress is on the terminal, and in runs/NAME: config.json, metrics.jsonl (one object a step)
    and TensorBoard scalars, and checkpoints: the same command goes on from the newest one.
    Training ends with held-out loss and a text sample.

    Exit codes: 0 finished, 2 unusable input, 65 data error, 74 checkpoint could not be written or
    read, 75 preempted (SIGTERM; saved, run it again), 80 diverged, 81 out of memory, 82 hang, 130
    Ctrl-C, 1 a defect.
    """

    preset: PresetName
    """Where every other option has its default from; choose it first."""
    model_from: str | None = None
    """A config.json of Hugging Face, or its folder, to take the model from: --model.* then default
    to it, but for how it is trained (losses' weights and tiles)."""
    config: Config


@dataclass(frozen=True, kw_only=True)
class Info:
    """Tells what a run needs, from its configuration alone: no device, no training.

      python -m train info                              the default preset
      python -m train info --preset gemma4_26b_a4b      parameters, FLOPs, bytes
      python -m train info --mesh.fsdp 8 --json         another mesh, as JSON

    It imports no torch_xla and needs no TPU, whatever the mesh.
    """

    preset: PresetName
    """Where every other option has its default from; choose it first."""
    model_from: str | None = None
    """A config.json of Hugging Face, or its folder, to take the model from: --model.* then default
    to it, but for how it is trained (losses' weights and tiles)."""
    json: bool = False
    """Plain JSON in place of tables."""
    config: Config


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Tells whether this machine can train as the options say, and what to do where it cannot.

      python -m train doctor                            the default preset: the CPU
      python -m train doctor --preset gemma4_26b_a4b    on all hosts at once

    Looked at: versions that have to fit each other, the folders that a run writes to, whether
    libtpu compiles our kernels, the devices, a kernel on them beside its reference, and two steps
    of a tiny model (not of the preset's) on the whole mesh. Nothing stays behind. The status is 0
    if all is well, else 2.
    """

    preset: PresetName
    """Where every other option has its default from; choose it first."""
    minutes: float = 5
    """Time for what could hang: the compiler, and the devices."""
    config: Config


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compiles the real training step for a TPU slice that is not here, and tells what the compiler
    made of it: whether it fits, what it gathers, what it copies. Nothing runs and nothing is
    measured; a TPU is not needed, libtpu is (pip install -e '.[aot]').

      python -m train compile --preset cpu_tiny --topology v6e-8
      python -m train compile --preset gemma4_26b_a4b --topology v6e-128

    The mesh follows the topology: fsdp within a slice, data across slices. report.json, report.md
    with pictures, and the optimised program are written. libtpu's flags are those of training on a
    TPU (train/xla_flags.py); what you set in LIBTPU_INIT_ARGS comes first.
    """

    preset: PresetName
    """Where every other option has its default from; choose it first."""
    model_from: str | None = None
    """A config.json of Hugging Face, or its folder, to take the model from: --model.* then default
    to it, but for how it is trained (losses' weights and tiles)."""
    topology: str = "v6e-128"
    """Chip and number of chips: v6e-1, 4, 8, 16, 32, 64, 128 or 256; v5e the same; v5p-4 to 256.
    Several slices: 2xv6e-128."""
    out: str = "runs/compile"
    """Folder of the report; a subfolder PRESET-TOPOLOGY is made in it."""
    config: Config


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Makes tokens of documents, once: files that training maps into memory. A corpus may then be
    larger than memory, and a run starts at once wherever it goes on.

      python -m train tokenize --out tokens --data.path books
      python -m train --data.source tokens --data.path tokens

    With --data.tokenizer.path tokenizer.json in both for another tokenizer than bytes.

    Documents are those of --data.source files or huggingface. A share of them
    (--data.eval_fraction), chosen by the hash of their content, is held out.
    """

    preset: PresetName
    """Where every other option has its default from."""
    out: str
    """Folder to make."""
    data: DataConfig


@dataclass(frozen=True, kw_only=True)
class Report:
    """Shows what `compile` reported once more, or two reports side by side.

      python -m train report runs/compile/cpu_tiny-v6e-8/report.json
      python -m train report --compare before/report.json after/report.json

    Figures are the compiler's and a model's; nothing in them is measured.
    """

    paths: tyro.conf.Positional[tuple[str, ...]]
    """A report.json; two with --compare."""
    compare: bool = False
    """Side by side, with the differences from the first to the second."""

    def __post_init__(self) -> None:
        wanted = 2 if self.compare else 1
        if len(self.paths) != wanted:
            raise ValueError(
                f"report = {' '.join(self.paths) or 'nothing'}: give "
                + ("two report.json with --compare" if self.compare else "one report.json")
            )


@dataclass(frozen=True, kw_only=True)
class Export:
    """Writes the weights of a checkpoint as a folder that Hugging Face's transformers loads, on any
    host: neither torch_xla nor the memory for the model is needed.

      python -m train export --checkpoint runs/NAME/checkpoints/step-00000100 \\
          --out folder
      python -m train --init_from folder --model_from folder   trains on from it

    config.json, model-00001-of-0000N.safetensors, their index, and the run's tokenizer. The folder
    appears when it is whole.
    """

    checkpoint: str
    """Folder or address (gs://...) of a finished checkpoint."""
    out: str
    """Folder to make."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 keeps every bit; bfloat16 is half as large, and what is usually published."""
    max_shard_size: str = "50GB"
    """Of one file's data."""
    form: Literal["text", "published"] = "text"
    """text is Gemma4ForCausalLM's; published has the longer names of the published files, which are
    of a model with a vision tower."""


COMMANDS = {
    "run": Run,
    "info": Info,
    "doctor": Doctor,
    "compile": Compile,
    "report": Report,
    "tokenize": Tokenize,
    "export": Export,
}
_WIDTH = 79
Command = TypeVar("Command", Run, Info, Doctor, Compile, Report, Tokenize, Export)


def main(arguments: Sequence[str]) -> None:
    """Runs the command in `arguments` (those after the program's name); `run` if they name none.
    Exits with status 2 and one message for input that cannot be used."""
    arguments = list(arguments)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "run"
    with _input_errors():
        if name not in COMMANDS:
            raise ValueError(_unknown_command(name))
        command = parse(COMMANDS[name], arguments)
        # Imported late: a command pays for what it uses, and nothing reads the environment early.
        match command:
            case Run(config=config):
                from train.loop import run

                run(config)
            case Info(config=config, json=as_json):
                from train.info import print_info

                print_info(config, as_json=as_json)
            case Doctor(config=config, minutes=minutes):
                from train.doctor.command import examine

                raise SystemExit(examine(config, minutes))
            case Compile(config=config, topology=topology, out=out):
                from train.compile.command import compile_and_report

                compile_and_report(config, topology, out)
            case Report(paths=paths):
                from train.compile.command import show_report

                show_report(*paths)
            case Tokenize(data=data, out=out):
                from train.data.tokenize import tokenize

                tokenize(data, Path(out))
            case Export(checkpoint=checkpoint, out=out):
                import torch

                from train.export import export

                export(
                    checkpoint,
                    Path(out),
                    dtype=getattr(torch, command.dtype),
                    max_shard_size=command.max_shard_size,
                    form=command.form,
                )


def parse(command: type[Command], arguments: Sequence[str]) -> Command:
    """Options, over their preset where the command has one. A wrong one ends the program with what
    is wrong with it (tyro)."""
    name = next(name for name, known in COMMANDS.items() if known is command)
    if {"-h", "--help"} & set(arguments):
        print(f"{about(command)}\n")
    if command in (Report, Export):
        return tyro.cli(
            command,
            prog=f"python -m train {name}",
            args=arguments,
            description="",
            use_underscores=True,
        )
    chooser = ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--preset", default=next(iter(PRESETS)))
    chooser.add_argument("--model_from", "--model-from")
    chosen = chooser.parse_known_args(arguments)[0]
    preset = chosen.preset
    # A name that is no preset is left for tyro to refuse.
    config = PRESETS.get(preset, next(iter(PRESETS.values())))()
    if chosen.model_from and command is not Tokenize:
        config = _with_model(config, chosen.model_from)
    return tyro.cli(
        command,
        prog=f"python -m train {name}",
        args=arguments,
        description="",
        use_underscores=True,
        default=_defaults(command, preset if preset in PRESETS else config.name, config),
    )


def about(command: type[Command]) -> str:
    """What stands above a command's options, in lines of at most 79 columns: its docstring, whose
    indented lines stay as they are (tyro would join all others), and the presets."""
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*cleandoc(command.__doc__).splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        if paragraph:
            lines.append(fill(" ".join(paragraph), _WIDTH))
            paragraph.clear()
        lines.append(line)
    if command not in (Report, Export):
        lines += ["Presets:", _preset_list()]
    return "\n".join(lines).rstrip()


def _defaults(command: type[Command], preset: str, config: RunConfig) -> Command:
    if command is Tokenize:
        return Tokenize(preset=preset, out=tyro.MISSING, data=config.data)
    return command(preset=preset, config=config)


def _with_model(config: RunConfig, path: str) -> RunConfig:
    """`config` with the model of a config.json. Not by `replace`: it is whole, and checked, only
    with the other options."""
    model = Gemma4Config.from_hf_file(path).trained_as(config.model)
    config = copy(config)
    object.__setattr__(config, "model", model)
    return config


def _preset_list() -> str:
    lines = (f"{name}: {cleandoc(preset.__doc__)}" for name, preset in PRESETS.items())
    return "\n".join(
        fill(line, _WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines
    )


def _unknown_command(name: str) -> str:
    if name in PRESETS:
        return f"{name} is a preset: python -m train --preset {name}"
    close = get_close_matches(name, COMMANDS, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return (
        f"no command {name!r}: {guess}There are {', '.join(COMMANDS)}; see python -m train --help"
    )


@contextmanager
def _input_errors() -> Iterator[None]:
    """A ValueError that our own code raises is for whoever typed the command, and is told without
    a traceback. One that comes out of a library is a defect, and keeps it."""
    try:
        yield
    except KeyboardInterrupt:
        print(
            "interrupted: what was logged and saved so far is kept; the same command goes on from "
            "the last checkpoint",
            file=sys.stderr,
        )
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except RunEnded as ended:
        print(*filter(None, (ended.details, ended)), sep="\n", file=sys.stderr)
        raise SystemExit(ended.exit_code) from None
    except ValueError as error:
        raised_in = Path(extract_tb(error.__traceback__)[-1].filename)
        ours = Path(__file__).parent.parent
        packages = [ours / name for name in ("train", "torch_gemma4", "pallas_ops")]
        if not any(raised_in.is_relative_to(package) for package in packages):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.USER_ERROR) from None


if __name__ == "__main__":
    main(sys.argv[1:])
