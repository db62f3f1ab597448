"""`python forks.py FILE`: runs its lines, each in a process of its own, until one of them fails.

As `python` would run it, but for its first two seconds: torch is there already.
"""

import gc
import os
import runpy
import shlex
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  # the planner would import it, and every optimizer

gc.freeze()  # a fork whose garbage collector looks at all of torch's objects would copy them
for line in Path(sys.argv[1]).read_text().splitlines():
    if os.fork() == 0:
        _, *sys.argv = shlex.split(line)
        if sys.argv[0] == "-m":
            sys.path[0] = ""
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(f"exit code {code}: {line}")
