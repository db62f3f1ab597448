"""Where the memory of a training step goes, drawn: three pictures in out/.

python -m scripts.memory_timeline --model gpt2 --batch-size 8 --device cuda       # a minute

Only the name stands here: the study that draws is studies/memory_timeline.py (no script imports a
study, so Python runs it).
"""

import sys

if not __package__:  # python scripts/memory_timeline.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import runpy

if __name__ == "__main__":
    runpy.run_module("studies.memory_timeline", run_name="__main__", alter_sys=True)
