"""Started by torchrun in test_torchrun.py: where do gradients live, after each micro-batch?

train_ddp.py as it is, watched. After the micro-batch that averages, gradients are views of DDP's
buckets; so those of the one before, which does not, must lie in the same storages.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import train_ddp  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

parameters = 0  # how many
seen: list[tuple[str, dict[int, int]]] = []  # (when, address -> bytes) of the gradients' storages
sync_gradients = train_ddp.DDPProcess.sync_gradients


def note(when: str, process: train_ddp.DDPProcess) -> None:
    global parameters
    parameters = sum(p.numel() for p in process.wrapper.parameters())
    gradients = [p.grad for p in process.wrapper.parameters() if p.grad is not None]
    storages = [gradient.untyped_storage() for gradient in gradients]
    seen.append((when, {s.data_ptr(): s.nbytes() for s in storages}))


@contextmanager
def watched(process, now):
    with sync_gradients(process, now):
        note("before", process)
        yield
        note("averaged" if now else "alone", process)


def main() -> int:
    train_ddp.DDPProcess.sync_gradients = watched
    code = train_ddp.main()
    alone, averaged = ([s for when, s in seen if when == word] for word in ("alone", "averaged"))
    assert alone == averaged and len(alone) == 3, "gradients beside DDP's buckets"
    whole = sum(averaged[0].values())
    assert whole == 4 * parameters  # as the planner counts them
    assert [sum(s.values()) for s in averaged] == [whole] * 3
    # DDP makes new buckets before the first micro-batch of the second step.
    old = sum(seen[4][1].values())
    assert old < whole / 10, "the old buckets are there beside the new ones"
    assert averaged[1] == averaged[2]  # and those stay
    print(f"{whole} bytes, from the first on")
    return code


if __name__ == "__main__":
    main_and_exit(main)
