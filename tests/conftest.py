"""Settings and fixtures of all tests. Each process uses one thread, which sleeps while it waits.

With two threads the last bits of a result may be different from those with one thread, and many
tests compare results to the bit. Child processes inherit the environment variables that are set
here.
"""

import gc
import os
import shutil
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# cuBLAS reads this before its first matmul. Without it, its sums have no fixed order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
gc.set_threshold(300_000)  # collect garbage less often: this saves time

# If a shell starts the tests in the background, the tests and their child processes ignore Ctrl-C
# (SIGINT). But some tests end a child process with SIGINT. So handle SIGINT as usual.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402
from harness import planned  # noqa: E402
from harness.runs import plan_nothing  # noqa: E402
from hypothesis import settings  # noqa: E402

import trainer.build  # noqa: E402
import trainer.plan  # noqa: E402
from data import load_dataset  # noqa: E402

trainer.plan.make_planner = planned.make_once  # replaced before another module imports it
settings.register_profile("the same each time", deadline=None, derandomize=True)
settings.load_profile("the same each time")


@pytest.fixture
def thorough(request) -> bool:
    """True if only reliability tests are selected, with -m reliability. Then tests with random
    faults make more attempts."""
    return request.config.getoption("-m") == "reliability"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def everything_travels(monkeypatch) -> None:
    """Make offload move every tensor, however small."""
    monkeypatch.setattr("memory.offload.MIN_OFFLOAD_BYTES", 1)


@pytest.fixture(scope="session", autouse=True)
def plans_nothing():
    """Turn off memory prediction in runs of trainers, in this process and in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANS_NOTHING", "1")
        plan_nothing()
        yield
        trainer.build.plan_run = trainer.plan.plan_run


@pytest.fixture
def plans_memory(monkeypatch) -> None:
    """Let runs of trainers predict their memory, as they do for a user."""
    monkeypatch.delenv("PLANS_NOTHING")
    monkeypatch.setattr("trainer.build.plan_run", trainer.plan.plan_run)


@pytest.fixture
def path(tmp_path) -> Path:
    """Path of a run's snapshot."""
    return tmp_path / "run.pt"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Folder of the token cache. (This fixture replaces pytest's own fixture `cache`, which no test
    needs.)"""
    monkeypatch.setitem(load_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def plt():
    """matplotlib.pyplot with the style of our pictures. Tests are skipped without matplotlib."""
    pytest.importorskip("matplotlib")
    from scripts.style import load_pyplot

    return load_pyplot("a test")


@pytest.fixture(scope="session")
def chromium():
    """Chromium without a window. Tests are skipped where Chromium is not installed."""
    playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("needs Chromium: apt install chromium, or Chrome")
    with playwright() as running:
        # --no-sandbox: Chromium's sandbox does not work for root. Most other flags stop requests
        # that Chromium itself sends to the network.
        flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        flags += "--disable-background-networking --disable-component-update"
        browser = running.chromium.launch(executable_path=program, args=flags.split())
        yield browser
        browser.close()
