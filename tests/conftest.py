"""One thread a process, no spinning, no network: the tests are about results, not about speed.

Also: results differ in the last bit between one thread and two, and every child process inherits
what is set here.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)
