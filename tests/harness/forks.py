"""Python programs that begin with the trainer imported, which takes any other three seconds.

`python forks.py` has it, and forks. Each line of its input is a JSON list: a file for the answer,
and programs to start at the same time, each [what stands behind `python`, folder, environment, file
for stdout, and for stderr]. Their process ids come into ANSWER.pids; when all have ended ANSWER has
the exit code of the one that failed first, or 0. As torchrun does, it then ends the others.
(tests/harness/runs.py asks.) What is imported is no garbage: not to look for any there, neither
meanwhile nor at the end, saves a quarter of the time that a trainer of a few steps takes. (With a
GPU's torch comes Triton, which complains at the end of what nobody has cleared away.)
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path

gc.set_threshold(300_000)
sys.path[1:1] = map(str, Path(__file__).parents[1:3])

import torch._dynamo  # noqa: E402  # the planner would import it, and every optimizer
from harness.runs import plan_nothing  # noqa: E402

GRACE = 5  # seconds that a process has to end by itself when another one has failed


def become(words: list[str], folder: str, environment: dict[str, str], *files: str) -> None:
    """This process goes on as `python` with these words."""
    descriptors = [os.open(os.devnull, os.O_RDONLY)]
    descriptors += [os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for file in files]
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # it was read at the import
    os.chdir(folder)
    sys.argv = words
    atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else gc.freeze())
    if "PLANS_NOTHING" in environment:
        plan_nothing()
    if words[0] == "-m":
        sys.path[0] = ""
        runpy.run_module(words.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def start_and_wait(answer: str, *programs: list) -> None:
    """In a process of its own: others may be asked for meanwhile."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    left = set()
    for program in programs:
        if (child := os.fork()) == 0:
            become(*program)
        left.add(child)
    write(f"{answer}.pids", sorted(left))

    def end(number: int) -> None:
        for child in left:
            os.kill(child, number)

    signal.signal(signal.SIGALRM, lambda *_: end(signal.SIGKILL))
    failed = 0
    while left:
        child, status = os.wait()
        left.remove(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            end(signal.SIGTERM)
            signal.alarm(GRACE)
    write(answer, failed)


def write(path: str, value: object) -> None:
    """All of it, or nothing."""
    with open(f"{path}.part", "w") as file:
        json.dump(value, file)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    gc.freeze()  # a fork whose garbage collector looks at all of torch's objects would copy them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    for line in sys.stdin:
        if os.fork() == 0:
            start_and_wait(*json.loads(line))
            os._exit(0)
