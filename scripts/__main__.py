"""`python -m scripts`: all commands, the question that each answers, and how long that takes."""

import sys

if not __package__:  # python scripts: the others lie one folder up
    sys.path[0] += "/.."

from scripts import LISTING

print(LISTING, end="")
