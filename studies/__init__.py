"""What makes the numbers and pictures of our documents: `python -m studies.NAME`.

command            the question that it answers                                    takes
make_results       which commands make studies/results/? (it runs them)            3 minutes
ladder             what does each policy save and cost?                            2 minutes
block_picture      what does each policy keep of a block? (a picture)              seconds
memory_timeline    where does a step's memory go? (scripts.memory_timeline)        half a minute
long               how long may a sequence be, knob by knob?                       15 minutes
cards              which card trains what?                                         3 minutes
gpu                what does this project do on a GPU?                             an hour
calculator_tables  which shapes and cards does docs/calculator.js know?            a second

README.md tells how results were made that have no study here.
"""

import scripts  # noqa: F401  (what a user may do to any tool at any time: Ctrl-C, `| head`)
