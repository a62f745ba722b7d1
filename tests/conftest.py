"""Fixtures that most tests share: the data beside the project, and the default model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import devices
import pytest
from hypothesis import HealthCheck, settings

# One thread a worker, set before anything loads torch: threads that spin against each other on few cores cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a driver kernels for GPUs run by Triton's interpreter, which is asked for before anybody imports Triton.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job is born deaf to Ctrl-C, which some tests send to themselves and to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, and no clock: who wants others says `pytest --hypothesis-profile default`.
settings.register_profile("certain", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("certain")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """Real models and tokenizers kept beside the project (see its README); tests skip where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no test data at {DATA}")
    return DATA


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF, through pronk's own download and cache."""
    from pronk.checkpoint.hub import resolve as hub
    from pronk.errors import DownloadFailed

    try:
        return hub.resolve("smollm2:135m")
    except DownloadFailed as error:
        pytest.skip(f"the default model cannot be had: {error}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed of its own is the same, whichever tests its worker has run before."""
    if item.get_closest_marker("gpu") and not devices.has_gpu():
        pytest.skip(devices.WITHOUT)
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run what is marked `alone` in a process of its own: a worker keeps the memory of the tests before."""
    if "PRONK_TEST_ALONE" in os.environ or not pyfuncitem.get_closest_marker("alone"):
        return None
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-rs", pyfuncitem.nodeid]
    env = {**os.environ, "PRONK_TEST_ALONE": "1"}
    child = subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=env, capture_output=True, text=True)
    if child.returncode:
        pytest.fail(child.stdout + child.stderr, pytrace=False)
    if "1 skipped" in child.stdout:
        pytest.skip(child.stdout)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Whoever reads a green run is told what has not been run."""
    left_out = [
        report for report in terminalreporter.stats.get("skipped", ()) if devices.WITHOUT in str(report.longrepr)
    ]
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} tests of the suite `gpu` were left out: {devices.WITHOUT}")
