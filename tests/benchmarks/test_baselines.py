"""Slow forms give what ours give."""

import json

import jax.numpy as jnp
import numpy as np

from benchmarks.baselines import gmm_forms
from pallas_ops.gmm.kernel import gmm
from pallas_ops.tgmm.kernel import tgmm

SIZES = jnp.array([10, 0, 25, 3], jnp.int32)


def random(*shapes):
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes]


def test_concatenated_gate_up():
    lhs, gate, up = random((40, 12), (4, 6, 12), (4, 6, 12))
    (out,) = gmm_forms.concatenated_gate_up(lhs, gate, up, SIZES, interpret=True)
    halves = [gmm(lhs, w, SIZES, transpose_rhs=True, interpret=True)[0] for w in (gate, up)]
    np.testing.assert_allclose(out, np.concatenate(halves, axis=1), rtol=0, atol=1e-5)


def test_transposed_dlhs():
    dout, rhs = random((40, 6), (4, 12, 6))
    (out,) = gmm_forms.transposed_dlhs(dout, rhs, SIZES, interpret=True)
    (ours,) = gmm(dout, rhs, SIZES, transpose_rhs=True, interpret=True)
    np.testing.assert_allclose(out, ours, rtol=0, atol=1e-5)


def test_padded_tgmm():
    lhs, rhs = random((40, 12), (40, 6))
    (out,) = gmm_forms.padded_tgmm(lhs, rhs, SIZES, interpret=True)
    (ours,) = tgmm(lhs, rhs, SIZES, out_dtype="float32", interpret=True)
    assert out.shape == (4, 12, 6)
    np.testing.assert_allclose(out, ours, rtol=0, atol=1e-5)


def test_command(capsys):
    gmm_forms.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    gate_up, down = (2 * 2 * 128 * size * 2816 for size in (1408, 704))
    assert [row["bytes"] for row in rows] == [gate_up, gate_up, down, down]
    assert rows[0]["us_at_least"] == 1239.3
