"""`python -m train`: commands, presets, overrides, refusals and help."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from train.__main__ import COMMANDS, Info, Report, Run, about, main, parse
from train.presets import PRESETS


def test_default_is_the_first_preset():
    assert parse(Run, []).config == PRESETS["cpu_tiny"]()


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_sets_every_default(preset):
    command = parse(Run, ["--preset", preset])
    assert command.preset == preset
    assert command.config == PRESETS[preset]()


def test_any_field_can_be_overridden():
    config = parse(
        Run,
        [
            *("--optim.learning_rate", "0.5", "--data.path", "a", "b", "--model.num-experts", "16"),
            *("--preset=cpu_tiny", "--model.final_logit_softcapping", "None", "--recompute=full"),
            *(
                "--model.rope_full.theta",
                "5e5",
                "--log.no_tensorboard",
                "--optim.betas",
                "0.8",
                "0.9",
            ),
        ],
    ).config
    assert config.optim.learning_rate == 0.5
    assert config.optim.betas == (0.8, 0.9)
    assert config.data.path == ("a", "b")
    assert config.model.num_experts == 16
    assert config.model.final_logit_softcapping is None
    assert config.model.rope_full.theta == 5e5
    assert config.recompute == "full" and not config.log.tensorboard
    assert config.data.batch_size == PRESETS["cpu_tiny"]().data.batch_size


def test_info_takes_the_same_options():
    command = parse(Info, ["--json", "--mesh.fsdp", "8"])
    assert command.json
    assert command.config.mesh.fsdp == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lerning_rate", "1"], "--optim.learning_rate FLOAT"),  # the suggestion
        (["--preset", "gemma"], "invalid choice 'gemma'"),
        (["--steps", "many"], "--steps"),
        (["--data.batch_size", "3"], "data.batch_size = 3"),
        (["--model.num_experts", "1"], "top_k_experts = 2"),
        (["report"], "report = nothing: give one report.json"),
        (["report", "a.json", "b.json"], "report = a.json b.json: give one report.json"),
        (["report", "--compare", "a.json"], "report = a.json: give two report.json"),
        (["report", "/no/such.json"], "report = '/no/such.json': No such file"),
        (["rnu"], "no command 'rnu': did you mean run? There are run, info, doctor"),
        (["cpu_tiny"], "cpu_tiny is a preset: python -m train --preset cpu_tiny"),
        (["--data.path", "/no/such/text"], "data.path = '/no/such/text': no such file"),
    ],
)
def test_refusals_exit_with_2_and_say_why(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("train.loop.prepare_environment", lambda mesh: None)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_report_takes_one_file_or_two():
    assert parse(Report, ["a.json"]).paths == ("a.json",)
    both = parse(Report, ["--compare", "a.json", "b.json"])
    assert both.compare and both.paths == ("a.json", "b.json")


def test_a_mesh_that_divides_nothing_leaves_no_folder(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 1000)
    arguments = f"--mesh.fsdp 3 --data.batch_size 3 --log.dir {tmp_path}/runs --data.path".split()
    done = subprocess.run(
        [sys.executable, "-m", "train", *arguments, str(tmp_path / "text.txt")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "mesh.fsdp = 3 divides none of the dimensions" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_ends_without_a_traceback(capsys, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("train.loop.run", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 130
    assert capsys.readouterr().err == (
        "interrupted: what was logged and saved so far is kept; the same command goes on from the "
        "last checkpoint\n"
    )


def test_help_shows_how_and_the_presets_values():
    done = subprocess.run(
        [sys.executable, "-m", "train", "--preset", "gemma4_26b_a4b", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    head = done.stdout[: done.stdout.index("usage:")]
    lines = head.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("Commands")) + 1
    assert [line.split()[0] for line in lines[begin : begin + len(COMMANDS)]] == list(COMMANDS)
    for piece in ("python -m train --data.path ~/books --steps 1000", "metrics.jsonl", "cpu_tiny:"):
        assert piece in head
    words = " ".join(done.stdout.split())
    assert "--model.num_experts INT" in words
    assert "E. Read only with enable_moe_block, like the two below. (default: 128)" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_what_help_begins_with_fits_80_columns(name):
    lines = about(COMMANDS[name]).splitlines()
    assert max(map(len, lines)) < 80
    assert any(line.startswith("  python -m train") for line in lines)
    # Paragraphs are filled, blocks stay, and no gap is wider than a line.
    assert "" in lines and not any(a == b == "" for a, b in pairwise(lines))
    assert ("Presets:" in lines) == (name not in ("report", "export"))


def test_value_error_of_a_library_keeps_its_traceback(monkeypatch):
    def defect(config):
        np.zeros((2, 3)).reshape(7)

    monkeypatch.setattr("train.loop.run", defect)
    with pytest.raises(ValueError, match="cannot reshape"):
        main([])
