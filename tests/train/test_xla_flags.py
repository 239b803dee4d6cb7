"""libtpu's flags: what the installed one takes, and what a user's own do to ours."""

import subprocess

import pytest

from train.launch import libtpu_flags, prepare_compiler
from train.xla_flags import CANDIDATES, FLAGS, XlaFlag, accepted_flags, explained, merged_arguments

UNKNOWN = XlaFlag("xla_tpu_no_such_flag", "true", "a test's")
ILLEGAL = XlaFlag("xla_tpu_scoped_vmem_limit_kib", "plenty", "a test's")


def test_the_pinned_libtpu_takes_every_flag():
    both = (*FLAGS, *CANDIDATES)
    assert accepted_flags(both, {}) == both


def test_unknown_flags_and_illegal_values_are_left_out():
    assert accepted_flags((UNKNOWN, *FLAGS[1:], ILLEGAL), {}) == FLAGS[1:]


@pytest.mark.parametrize(
    ("stderr", "error", "message"),
    [
        (
            "ModuleNotFoundError: No module named 'libtpu'",
            ValueError,
            r"libtpu is not installed: pip install -e '\.\[tpu\]'",
        ),
        ("Segmentation fault", RuntimeError, "libtpu cannot be loaded: Segmentation fault"),
    ],
)
def test_a_libtpu_that_does_not_load(monkeypatch, stderr, error, message):
    done = subprocess.CompletedProcess([], returncode=1, stdout="", stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    with pytest.raises(error, match=message):
        accepted_flags(FLAGS, {})


def test_names_and_reasons():
    both = (*FLAGS, *CANDIDATES)
    assert len({flag.name for flag in both}) == len(both)
    for flag in both:
        assert flag.reason and not flag.name.startswith("-")


def test_a_users_flag_stays_and_ours_follows():
    flags = (XlaFlag("a", "1", "one"), XlaFlag("b", "2", "two"))
    assert merged_arguments("", flags) == "--a=1 --b=2"
    assert merged_arguments("--c --b=7", flags) == "--c --b=7 --a=1"
    assert merged_arguments("--b", flags) == "--b --a=1"
    merged = merged_arguments("--b=7", flags)
    assert merged_arguments(merged, flags) == merged


def test_what_is_in_force_is_explained():
    first = FLAGS[0]
    found = explained(f"--{first.name}=1 {FLAGS[1].argument} --xla_other")
    assert found == [
        (first.name, "1", "set outside this program"),
        (FLAGS[1].name, FLAGS[1].value, FLAGS[1].reason),
        ("xla_other", "true", "set outside this program"),
    ]
    candidate = CANDIDATES[0]
    assert explained(candidate.argument) == [(candidate.name, "true", candidate.reason)]


def test_the_compiler_gets_the_flags_that_change_a_program():
    environment = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=65536"}
    prepare_compiler("v6e", environment)
    found = {name: value for name, value, _ in libtpu_flags(environment)}
    ours = {flag.name: flag.value for flag in FLAGS if flag.changes_program}
    assert found == ours | {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    assert len(ours) < len(FLAGS)
    assert libtpu_flags({}) == []


def test_a_chip_with_less_vmem_is_not_given_v6es_limit():
    environment = {}
    prepare_compiler("v5p", environment)
    names = [name for name, *_ in libtpu_flags(environment)]
    assert names == [f.name for f in FLAGS if f.changes_program and "v5p" in f.chips]
    assert "xla_tpu_scoped_vmem_limit_kib" not in names
