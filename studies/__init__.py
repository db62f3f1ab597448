"""Make the numbers and pictures of our documents: `python -m studies.NAME`.

command  the question that it answers                                         takes
tables   what do policies cost, what fits a card, how long may sequences be?  15 minutes

README.md has the command for each file in results/, also for files that other programs make.
"""

import scripts  # noqa: F401  (scripts/__init__.py handles Ctrl-C and `| head`)
