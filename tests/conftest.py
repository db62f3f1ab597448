"""One thread a process, no spinning, no network: the tests are about results, not about speed.

Also: results differ in the last bit between one thread and two, and every child process inherits
what is set here.
"""

import gc
import os
import shutil
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
gc.set_threshold(300_000)  # look for garbage less often

# A shell that starts the tests in the background has them ignore Ctrl-C, and a child process
# inherits that; here some must not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402
from harness import planned  # noqa: E402
from harness.runs import plan_nothing  # noqa: E402
from hypothesis import settings  # noqa: E402

import trainer.plan  # noqa: E402
import trainer.setup  # noqa: E402
from data import find_dataset  # noqa: E402

trainer.plan.make_planner = planned.make_once  # before anybody imports it from there
settings.register_profile("the same each time", deadline=None, derandomize=True)
settings.load_profile("the same each time")


def pytest_collection_modifyitems(items) -> None:
    for item in items:  # (reports have what xdist's processes tell of a test)
        marks = item.iter_markers("reliability")
        item.user_properties += [("row", mark.args) for mark in marks]


def pytest_terminal_summary(terminalreporter, config) -> None:
    from harness.rows import table

    if config.getoption("-m") == "reliability":
        terminalreporter.section("the table of docs/reliability.md")
        reports = [report for some in terminalreporter.stats.values() for report in some]
        terminalreporter.write_line("\n".join(table(reports)))


@pytest.fixture
def thorough(request) -> bool:
    """Is reliability all that is asked for? Then what depends on chance is tried more often."""
    return request.config.getoption("-m") == "reliability"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def everything_travels(monkeypatch) -> None:
    """Offload has no tensor that is too small for it."""
    monkeypatch.setattr("memory.offload.MIN_OFFLOAD_BYTES", 1)


@pytest.fixture(scope="session", autouse=True)
def plans_nothing():
    """Runs of trainers do not predict their memory, here and in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANS_NOTHING", "1")
        plan_nothing()
        yield
        trainer.setup.plan_memory = trainer.plan.plan_memory


@pytest.fixture
def plans_memory(monkeypatch) -> None:
    """Runs of trainers predict their memory, as they do for a user."""
    monkeypatch.delenv("PLANS_NOTHING")
    monkeypatch.setattr("trainer.setup.plan_memory", trainer.plan.plan_memory)


@pytest.fixture
def path(tmp_path) -> Path:
    """Where a run saves."""
    return tmp_path / "run.pt"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where all data sets are kept (and not pytest's own, which no test needs)."""
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def plt():
    """matplotlib.pyplot as the pictures have it; without matplotlib their tests are skipped."""
    pytest.importorskip("matplotlib")
    from scripts.style import load_pyplot

    return load_pyplot("a test")


@pytest.fixture(scope="session")
def chromium():
    """A browser without a window; its tests are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("needs Chromium: apt install chromium, or Chrome")
    with playwright() as running:
        # A root user's Chromium has no sandbox of its own; and none should call home.
        flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        flags += "--disable-background-networking --disable-component-update"
        browser = running.chromium.launch(executable_path=program, args=flags.split())
        yield browser
        browser.close()
