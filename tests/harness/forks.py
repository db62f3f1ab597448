"""Python programs that begin with torch imported, which takes any other three seconds.

`python forks.py` has it, and forks. Each line of its input is a JSON list of programs to start at
the same time: [what stands behind `python`, folder, environment, file for stdout, and for stderr].
When they have all ended it answers with their exit codes. (tests/harness/runs.py asks.)
"""

import gc
import json
import os
import runpy
import sys

import torch._dynamo  # the planner would import it, and every optimizer


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
    if words[0] == "-m":
        sys.path[0] = ""
        runpy.run_module(words.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    gc.freeze()  # a fork whose garbage collector looks at all of torch's objects would copy them
    for line in sys.stdin:
        children = []
        for program in json.loads(line):
            if (child := os.fork()) == 0:
                become(*program)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
