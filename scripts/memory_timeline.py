"""The name that people type for studies/memory_timeline.py. (No script imports a study.)"""

import sys

if not __package__:  # python scripts/memory_timeline.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import runpy

if __name__ == "__main__":
    runpy.run_module("studies.memory_timeline", run_name="__main__", alter_sys=True)
