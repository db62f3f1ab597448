"""`python -m scripts`: list each command, the question that it answers, and its duration."""

import sys

if not __package__:  # python scripts: the packages are one folder up
    sys.path[0] += "/.."

from scripts import LISTING

print(LISTING, end="")
