"""Run the trainers with a fault at a chosen moment.

FAULTS="kill:0:9" python tests/harness/faults.py train_minimal [flags]
FAULTS="nan:1:7" torchrun --nproc-per-node=2 tests/harness/faults.py train_ddp [flags]

A fault is written kind:rank:step. A kind in STEP_FAULTS acts just before the step. A kind in
SAVE_FAULTS acts while the snapshot of the step is saved. Every fault acts only in the first attempt
of a run, so that the run can finish after torchrun has restarted it. (But a fault that is written
kind:rank:step:1 acts only in the second attempt.)

More environment variables:

PAUSE       seconds that are added to each step
FLAGS_r     flags that only the process of rank r gets
ROOM        bytes of memory that the fault `oom` leaves free
COLLECTIVES if set, the bytes of collectives are recorded

After each step each process writes a record to the file RUN.rankR.jsonl, next to the snapshot
RUN.pt. A record contains hashes of the weights and of the moments, the loss scale and the
collectives. `history` reads the file. The trainers themselves have no code for faults or records.
"""

import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Container
from contextlib import nullcontext, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, BinaryIO
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
from harness import shortage  # noqa: E402
from harness.runs import FAULTS, TINY, plan_nothing, torchrun, train_here  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

import train_minimal  # noqa: E402
import trainer.run as run_module  # noqa: E402
from trainer import snapshot  # noqa: E402
from trainer.run import Run  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

RANK = os.environ.get("RANK", "0")
real_train_step, real_save_snapshot = train_minimal.train_step, snapshot.save_snapshot
real_save = torch.save
WHOLE_RUNS = tempfile.TemporaryDirectory()


def faults_at(step: int, kinds: Container[str]) -> list[str]:
    """Return the kinds in `kinds` that FAULTS asks for at this step, in this process and in this
    attempt of the run."""
    now = [RANK, str(step), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
    words = [[*word.split(":"), "0"] for word in os.environ.get("FAULTS", "").split()]
    return [kind for kind, *when in words if kind in kinds and when[:3] == now]


# ---- Faults in a step

Act = Callable[[Run], Any]  # changes a run; may return a function that undoes the change


def bad_gradient(value: float) -> Act:
    """Return a fault that multiplies the gradient of one layer's result by `value`. The
    fault acts only in this process, before gradients are averaged over all processes."""

    def spoil(layer: Any, args: Any, result: torch.Tensor) -> None:
        result.register_hook(lambda gradient: gradient * value)

    return lambda run: run.model.blocks[0].mlp.c_fc.register_forward_hook(spoil).remove


def infinite_loss(run: Run) -> Any:
    """Make the loss infinite, but leave the gradients finite. A trainer that checks only gradients
    would update the weights."""
    wrapped = run.wrapped_model
    run.wrapped_model = lambda *batch: wrapped(*batch) + math.inf  # type: ignore[assignment]
    return lambda: setattr(run, "wrapped_model", wrapped)


class Injected(Exception):
    """Error that a fault raises. It imitates a bug in the code."""


def raising(error: Exception) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> None:
        raise error

    return act


def no_more_memory(run: Run) -> None:
    """Limit the memory of this process to its present size plus ROOM bytes, by default 0. So the
    CPU's allocator really fails."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(os.environ.get("ROOM", "0"))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def send(name: str) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), getattr(signal, name))


die = send("SIGKILL")

STEP_FAULTS: dict[str, Act] = {
    "nan": bad_gradient(math.nan),
    "overflow": bad_gradient(math.inf),
    "huge": bad_gradient(1e30),  # each gradient is finite, the sum of their squares is infinite
    "infinite-loss": infinite_loss,
    "error": raising(Injected()),
    "evaluation": lambda run: setattr(run.model, "eval", raising(Injected())),
    "kill": die,
    **{name: send(f"SIG{name.upper()}") for name in ("term", "int", "hup")},
    "asked-in-evaluation": lambda run: setattr(run.model, "eval", lambda: send("SIGTERM")(run)),
    "hang": lambda run: time.sleep(1000),
    "silence": lambda run: setattr(run, "last_log_time", run.last_log_time - 60),
    "cuda-oom": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")),
    "oom": no_more_memory,
    "shortage": shortage.strike,
    "update": lambda run: setattr(run.optimizer, "step", raising(RuntimeError(shortage.ERROR))),
}


class Collectives(TorchDispatchMode):
    """Dispatch mode that records (name, bytes) of each collective. The bytes are those of the
    collective's largest tensor, which is the gathered tensor, or the tensor that is scattered.

    (A mode sees the operators of its own thread. On a CPU backward runs in the thread that calls
    it, so the mode sees the collectives of DDP, too.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls this operator for its local tensor
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((func._opname, max(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def train_step(run: Run, *others: Act) -> Any:
    time.sleep(float(os.environ.get("PAUSE", "0")))
    acts = [STEP_FAULTS[kind] for kind in faults_at(run.step, STEP_FAULTS)]
    undo = [act(run) for act in (*acts, *others)]
    collectives = Collectives()
    with collectives if "COLLECTIVES" in os.environ else nullcontext():
        result = real_train_step(run)
    for remove in filter(callable, undo):
        remove()
    state = run.model.state_dict(), run.optimizer.state_dict()["state"]
    weights, moments = tree_map_only(DTensor, DTensor.full_tensor, state)
    record = {
        "step": run.step,
        "weights": weights_hash(weights),
        "moments": weights_hash(moments),
        "scale": run.scaler.get_scale() if run.scaler.is_enabled() else None,
        "collectives": sorted(collectives.seen),
    }
    with open(
        snapshot.sibling_path(run.settings.checkpoint_path, f".rank{RANK}.jsonl"), "a"
    ) as file:
        file.write(json.dumps(record) + "\n")
    return result


def weights_hash(tensors: Any) -> str:
    """Return the SHA-256 (hex) of the bytes of all tensors in the nested structure `tensors`."""
    digest = sha256()
    for tensor in tree_leaves(tensors):
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def history(path: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """Return the records of the run with snapshot `path`: step -> record after this step."""
    lines = snapshot.sibling_path(path, f".rank{rank}.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def broken(path: Path, faults: str | dict[int, Act], *flags: str, **options: Any) -> int | None:
    """Run train_minimal.py in this process with `faults`. Return the exit code, or None if an
    Injected error ended the run. `faults`: a string as in the variable FAULTS, or a dict
    step -> function to call just before this step."""
    named, acts = (faults, {}) if isinstance(faults, str) else ("", faults)
    step = lambda run: train_step(run, *filter(None, [acts.get(run.step)]))  # noqa: E731
    with patch.dict(os.environ, FAULTS=named), patch.object(train_minimal, "train_step", step):
        with suppress(Injected):
            return train_here(path, *flags, **options)
    return None


@cache
def undisturbed(*flags: str, base: tuple[str, ...] = tuple(TINY)) -> Path:
    """Run train_minimal.py without faults, and return the path of the snapshot. The other files of
    the run are in the same folder. Calls with the same arguments share one run."""
    path = Path(tempfile.mkdtemp(dir=WHOLE_RUNS.name), "run.pt")
    assert broken(path, "", *flags, base=list(base)) == 0
    return path


def broken_together(
    path: Path, faults: str, *flags: str, script: str = "train_ddp", **options: Any
) -> CompletedProcess:
    """Run a trainer with `faults` in two processes. `options`: arguments of `torchrun` in
    runs.py."""
    return torchrun(path, *flags, script=f"{FAULTS} {script}", FAULTS=faults, **options)


@cache
def undisturbed_together(*flags: str, script: str = "train_ddp") -> Path:
    """Run a trainer in two processes without faults, and return the path of the snapshot. Calls
    with the same arguments share one run."""
    path = Path(tempfile.mkdtemp(dir=WHOLE_RUNS.name), "run.pt")
    broken_together(path, "", *flags, script=script)
    return path


# ---- Faults in a save


def save_half(state: Any, file: BinaryIO) -> None:
    real_save(state, file)
    file.truncate(file.tell() // 2)
    die()


# The last calls of a save, in this order. A fault kills the process just before one of these calls.
CALLS = ("fsync of the file", "rename to .prev.pt", "rename")
SAVE_FAULTS = ("half-written", *(call.replace(" ", "-") for call in CALLS))


def save_snapshot(path: Path, state: snapshot.State, *args: Any, **options: Any) -> None:
    newest = not path.stem.endswith(".best")
    faults = faults_at(state["step"], SAVE_FAULTS) if newest else []
    left = iter(SAVE_FAULTS[1:])

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: die() if next(left) in faults else real(*given)

    save = save_half if "half-written" in faults else real_save
    patched = patch.multiple(os, fsync=dying(os.fsync), replace=dying(os.replace))
    with patch.object(torch, "save", save), patched if faults else nullcontext():
        real_save_snapshot(path, state, *args, **options)


if __name__ == "__main__":
    if "PLANS_NOTHING" in os.environ:
        plan_nothing()
    train_minimal.train_step = train_step
    run_module.save_snapshot = save_snapshot
    _, script, *flags = *sys.argv, *os.environ.get(f"FLAGS_{RANK}", "").split()
    main_and_exit(lambda: importlib.import_module(script).main(flags))
