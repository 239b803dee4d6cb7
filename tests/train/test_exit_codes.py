"""Every way a run ends has a status and a last line of its own."""

import subprocess
import sys
from dataclasses import replace

import pytest

from train import exit_codes, loop
from train.__main__ import Run, main
from train.exit_codes import ExitCode, RunEnded
from train.out_of_memory import explain, out_of_memory_explained
from train.presets import cpu_tiny, gemma4_26b_a4b

ENDS = [kind for kind in vars(exit_codes).values() if RunEnded in getattr(kind, "__bases__", ())]


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_is_its_code_and_one_line(kind, capsys, monkeypatch):
    def run(config):
        raise kind("what happened, and what to do")

    monkeypatch.setattr("train.loop.run", run)
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == kind.exit_code
    assert capsys.readouterr().err == "what happened, and what to do\n"


def test_codes_differ_and_are_in_the_help():
    assert len(ENDS) == 5
    assert len({kind.exit_code for kind in ENDS}) == 5
    for code in ExitCode:
        assert f" {code.value} " in " ".join(Run.__doc__.split()), code


def test_details_come_before_the_last_line(capsys, monkeypatch):
    def run(config):
        raise exit_codes.OutOfMemory("out of memory", details="buffers:\n  1 GB")

    monkeypatch.setattr("train.loop.run", run)
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 81
    assert capsys.readouterr().err.splitlines() == ["buffers:", "  1 GB", "out of memory"]


@pytest.mark.parametrize(
    ("error", "message", "place"),
    [
        (OSError(5, "Input/output error"), "(OSError: [Errno 5] Input/output error)", ""),
        (ValueError("no UTF-8"), "(ValueError: no UTF-8)", ""),
        (KeyError("text"), "(KeyError: 'text')", "in __next__\n    raise error\nKeyError: 'text'"),
        (StopIteration(), "(StopIteration: )", "in __next__\n    raise error\nStopIteration"),
    ],
)
def test_a_batch_that_cannot_be_made_is_a_data_error(error, message, place):
    class Batches:
        def __next__(self):
            raise error

    with pytest.raises(exit_codes.DataFailure, match="the batch of step 7 could not") as raised:
        loop._next(Batches(), 7)
    assert message in str(raised.value) and raised.value.__cause__ is error
    assert raised.value.details.endswith(place) and bool(raised.value.details) == bool(place)


# Out of memory

COMPILER = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space hbm. Used 35.70G of 31.25G hbm. Exceeded hbm capacity by 4.45G.

Total hbm usage >= 35.95G:
    reserved        260.06M

  Largest program allocations in hbm:

  1. Size: 1.38G
     Operator: op_name="call.14834/jit(permute)/shard_map/gather" source_file="kernel.py"
     Shape: bf16[262144,2816]{1,0:T(8,128)(2,1)}
     Unpadded size: 1.38G
     XLA label: fusion.1912.remat2 = fusion(bitcast.2092), kind=kCustom
     Allocation type: HLO temp
     ==========================

  2. Size: 1.00G
     Operator: op_name="dot.5725"
     Shape: bf16[2,1024,262144]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 1.00G
     ==========================

  3. Size: 1.00G
     Operator: op_name="dot.4531"
     Shape: bf16[2,1024,262144]{2,1,0:T(8,128)(2,1)}
     ==========================

  4. Size: 968.00M
     Shape: f32[5,5,1,1408,2816]{2,1,0:T(8,128)}
     XLA label: copy.7 = copy(param.3)
     ==========================
"""
"""As libtpu 0.0.21 says it of the 26B step, shortened."""


def test_the_compilers_largest_buffers_are_told_with_parameters_of_their_shape():
    config = gemma4_26b_a4b()
    config = replace(config, model=replace(config.model, num_loss_tiles=16))
    ended = explain(COMPILER, config)
    assert ended.details.splitlines() == [
        "largest buffers of a device:",
        "  1.48 GB bf16[262144,2816] permute: gather, shaped as embedding.weight",
        "  2 x 1.07 GB bf16[2,1024,262144] dot",
        "  1.02 GB f32[5,5,1,1408,2816] copy, shaped as stack.segments.0.experts.gate_up",
    ]
    assert str(ended) == (
        "out of memory: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 35.70G of 31.25G hbm. Exceeded hbm capacity by 4.45G. The largest buffers are listed "
        "above. What saves most: --accumulate 2 (about 15.23 GB), --offload_activations (about "
        "2.21 GB), --precision.reduce bfloat16 (about 1.52 GB); python -m train compile tells "
        "what fits before you run"
    )


def test_without_buffers_the_largest_parameters_are_told():
    with (
        pytest.raises(exit_codes.OutOfMemory) as raised,
        out_of_memory_explained(cpu_tiny()),
    ):
        raise RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory: 3 bytes.\nat f")
    head, first, *_ = raised.value.details.splitlines()
    assert "the runtime names no buffers" in head
    # 4 * 4 bytes of a quarter of [P, C, E, 2F, D].
    assert first.strip() == "2.621 MB stack.segments.0.experts.gate_up"
    assert str(raised.value).startswith("out of memory: Out of memory: 3 bytes. The largest")
    assert "--recompute" in str(raised.value) and "--attention kernel" in str(raised.value)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="another"), out_of_memory_explained(cpu_tiny()):
        raise RuntimeError("another")


# Hang and SIGTERM, in processes of their own


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


# Time is what the test says it is: a busy machine must not look like a hang.
CLOCK = "import time\nnow = [0.0]\ntime.monotonic = lambda: now[0]\n"


def test_a_hang_ends_the_process_and_says_where_it_waits():
    done = run_python(
        f"{CLOCK}"
        "from train.watchdog import Watchdog\n"
        "def waits_for_others():\n"
        "    now[0] = 0.7\n"
        "    time.sleep(50)\n"
        "with Watchdog(0.01) as watchdog:\n"
        "    watchdog.beat('step 7')\n"
        "    waits_for_others()\n"
    )
    assert done.returncode == ExitCode.HANG == 82
    assert "in waits_for_others" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "hang: nothing was done for 0.01 minutes after step 7 (--hang_minutes)"
    )


def test_what_goes_on_is_no_hang():
    done = run_python(
        f"{CLOCK}"
        "from train.watchdog import Watchdog\n"
        "with Watchdog(0.001) as watchdog:\n"
        "    for step in range(10):\n"
        "        now[0] += 0.05\n"
        "        time.sleep(0.05)\n"
        "        watchdog.beat(f'step {step}')\n"
        "with Watchdog(0.0):\n"
        "    now[0] += 100\n"
        "    time.sleep(0.1)\n"
        "now[0] += 100\n"
        "time.sleep(0.1)\n"
        "print('done')\n"
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_the_first_sigterm_is_noted_and_the_second_kills():
    done = run_python(
        "import os, signal\n"
        "from train.preemption import PreemptionNotice\n"
        "with PreemptionNotice() as notice:\n"
        "    assert not notice.is_given\n"
        "with PreemptionNotice() as notice:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert notice.is_given\n"
        "    print('noted', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not reached')\n"
    )
    assert (done.returncode, done.stdout) == (-15, "noted\n"), done.stderr
