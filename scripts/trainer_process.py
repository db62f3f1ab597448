"""Processes that gpu_report.py has started: find them, wait for them, end them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{otherwise} within {seconds:.0f} s")
        time.sleep(0.01)


def pids_of(path: Path) -> list[int]:
    """The processes that have `path` (or what lies below it) on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            zombie = ") Z " in (entry / "stat").read_text()
        except OSError:  # gone meanwhile
            continue
        if str(path).encode() in words and not zombie and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def env_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def kill_all(path: Path) -> None:
    """End what was started on `path`, workers first orphaned by their torchrun included.

    Returns when all of it is gone. A process outlives the SIGKILL that ends it, on a busy machine
    for as long as it takes to be scheduled once more and to give back its memory; and torchrun may
    have started another one just now.
    """

    def all_gone() -> bool:
        pids = pids_of(path)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(all_gone, "killed processes did not end")


def last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or [""])[-1]
