"""`python -m scripts`: list each command, the question that it answers, and its duration."""

from scripts import LISTING

print(LISTING, end="")
