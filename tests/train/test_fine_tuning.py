"""Prompts and completions: what the loss of an untouched model is, by Hugging Face's own logits."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.train.test_loop import REPOSITORY, rows_of
from torch_gemma4 import Execution, Gemma4Config, Gemma4ForCausalLM, Precision
from torch_gemma4.hf import load_pretrained
from train.data import IGNORED, TextData
from train.data.config import DataConfig, TokenizerConfig

PROMPT_LENGTHS = (9, 20)


@pytest.fixture
def case(hf_cases, tmp_path):
    """(folder, tokens [2, S], logits [2, S, V], options of the data): two rows of a case as a file
    of prompts and completions, which both end with the same token."""
    folder = hf_cases / "tiny_base"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    ids = load_file(folder / "inputs.safetensors")["input_ids"]
    logits = load_file(folder / "outputs.safetensors")["logits"]
    assert len(set(ids[:, -1].tolist())) == 1
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(logits.shape[-1])}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with open(tmp_path / "rows.jsonl", "w") as file:
        for row, length in zip(ids.tolist(), PROMPT_LENGTHS, strict=True):
            words = [f"t{i}" for i in row[:-1]]  # the end is put there by the data
            row = {"prompt": " ".join(words[:length]), "completion": " ".join(words[length:])}
            file.write(json.dumps(row) + "\n")
    data = DataConfig(
        path=(str(tmp_path / "rows.jsonl"),),
        tokenizer=TokenizerConfig(
            path=str(tmp_path / "tokenizer.json"), begin="", end=f"t{ids[0, -1]}"
        ),
        packing="fit",
        sequence_length=ids.shape[1],
        batch_size=2,
        eval_fraction=0,
    )
    return folder, ids, logits, data


def expected_loss(ids, logits):
    """Mean over the completions, their ends included, of Hugging Face's float32 logits."""
    log_probs = logits[:, :-1].log_softmax(-1)
    losses = -log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    scored = [losses[row, length - 1 :] for row, length in enumerate(PROMPT_LENGTHS)]
    return torch.cat(scored).mean().item()


def test_prompts_carry_no_loss_and_completions_that_of_the_oracle(case):
    folder, ids, logits, data = case
    batches = TextData.load(data, vocab_size=logits.shape[-1]).train_batches()
    batch = {name: torch.from_numpy(array) for name, array in next(batches).items()}
    batches.close()
    order = [1, 0] if batch["input_ids"][0, 0] == ids[1, 0] else [0, 1]
    assert torch.equal(batch["input_ids"][order].long(), ids)
    for row, length in zip(order, PROMPT_LENGTHS, strict=True):
        labels = batch["labels"][row]
        assert (labels[:length] == IGNORED).all()
        assert torch.equal(labels[length:], batch["input_ids"][row, length:])

    execution = Execution(precision=Precision.uniform(torch.float32))
    model = Gemma4ForCausalLM(Gemma4Config.from_hf_file(folder), execution)
    load_pretrained(model, folder)
    output = model.loss(batch["input_ids"], batch["labels"], segment_ids=batch["segment_ids"])
    assert output.num_valid == 2 * ids.shape[1] - sum(PROMPT_LENGTHS)
    assert output.cross_entropy.item() == pytest.approx(expected_loss(ids, logits), abs=1e-5)
    all_of_it = load_file(folder / "outputs.safetensors")["loss"].item()
    assert abs(output.cross_entropy.item() - all_of_it) > 1e-3  # the prompts would show


@pytest.mark.exhaustive
def test_a_run_from_the_folder_starts_with_the_oracles_loss(case, tmp_path):
    folder, ids, logits, data = case
    options = f"--model_from {folder} --init_from {folder} --mesh.fsdp 1 --eval.every 0".split()
    options += "--sample.length 0 --precision.compute float32 --name tuned --steps 2".split()
    options += f"--data.path {data.path[0]} --data.packing fit --data.eval_fraction 0".split()
    options += f"--data.sequence_length {data.sequence_length} --data.batch_size 2".split()
    options += f"--data.tokenizer.path {data.tokenizer.path} --log.dir {tmp_path}".split()
    options += ["--data.tokenizer.begin", "", "--data.tokenizer.end", data.tokenizer.end]
    done = subprocess.run(
        [sys.executable, "-m", "train", *options],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"weights: {folder}\n" in done.stdout
    rows = rows_of(tmp_path / "tuned")
    assert rows[0]["cross_entropy"] == pytest.approx(expected_loss(ids, logits), abs=1e-5)
    assert rows[1]["cross_entropy"] != rows[0]["cross_entropy"]
