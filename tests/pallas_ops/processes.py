"""Code that needs several JAX devices, in a process of its own: this one has one."""

import json
import os
import subprocess
import sys
from pathlib import Path


def on_four_devices(code):
    """What `code` prints last, as JSON, where JAX has four CPU devices."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
