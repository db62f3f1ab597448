"""One thread a process, no spinning, no network: the tests are about results, not about speed.

Also: results differ in the last bit between one thread and two, and every child process inherits
what is set here.
"""

import gc
import os
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Look for garbage less often, here and in child processes: see harness/start/sitecustomize.py.
gc.set_threshold(300_000)
START = str(Path(__file__).parent / "harness/start")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [START, os.environ.get("PYTHONPATH")]))

# A shell that starts the tests in the background has them ignore Ctrl-C, and a child process
# inherits that; here some must not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def everything_travels(monkeypatch) -> None:
    """Offload has no tensor that is too small for it."""
    monkeypatch.setattr("memory.offload.SMALL", 1)


@pytest.fixture(scope="module")
def one_planner_each():
    """All who answer questions make their own planners; what those simulate is the same, and is
    simulated once in a file. (Not where a test counts what is simulated.)"""
    from model import MiniGPTConfig
    from trainer import plan

    made, make = {}, plan.make_planner

    def make_once(args, config, device, precision, *way):
        plain = MiniGPTConfig(**vars(config) | plan.NO_RECOMPUTE)
        state = args.optimizer, args.moments_dtype, args.grad_accum_steps > 1
        state = *state, args.compress_gradients
        key = plain, args.seq_len, device.type, precision, state, way
        if key not in made:
            made[key] = make(args, plain, device, precision, *way)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.plan.make_planner", make_once)
        patch.setattr("scripts.memory_page.make_planner", make_once)
        yield


@pytest.fixture
def cache(tmp_path) -> Path:
    """Where a data set may be kept (and not pytest's own, which no test needs)."""
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def plt():
    """matplotlib.pyplot as the pictures have it; without matplotlib their tests are skipped."""
    pytest.importorskip("matplotlib")
    from scripts.memory_timeline_pictures import load_pyplot

    return load_pyplot()


@pytest.fixture(scope="session")
def chromium():
    """A browser without a window; its tests are skipped where there is none."""
    from studies.page_shots import chromium
    from trainer.flags import UsageError

    try:
        browser = chromium()
        entered = browser.__enter__()
    except UsageError as error:
        pytest.skip(str(error))
    yield entered
    browser.__exit__(None, None, None)


@pytest.fixture(scope="session")
def made_page(tmp_path_factory):
    """What scripts.memory_page makes of a small model, and what the planner says about it."""
    from harness.pages import FLAGS, Made

    return Made(FLAGS, tmp_path_factory.mktemp("page"))
