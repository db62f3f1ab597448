"""The name that people type for studies/memory_timeline.py. (No script imports a study.)"""

import os
import sys

if not __package__:  # python scripts/memory_timeline.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import runpy

if __name__ == "__main__":
    runpy.run_module("studies.memory_timeline", run_name="__main__", alter_sys=True)
