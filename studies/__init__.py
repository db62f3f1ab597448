"""Make the numbers and pictures of our documents: `python -m studies.NAME`.

command            the question that it answers                                    takes
tables             which policy costs what, which card trains what, what is long?  15 minutes
block_picture      what does each policy keep of a block? (a picture)              seconds
gpu                what does this project do on a GPU?                             an hour
calculator_tables  which shapes and cards does docs/calculator.js know?            a second

README.md has the command of each file in results/, also of files that no study here makes.
"""

import scripts  # noqa: F401  (it handles Ctrl-C and `| head`)
