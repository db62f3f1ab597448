"""What surrounds the loop of train_minimal.py; a reader who came for training can do without.

flags.py      the command line                     metrics.py   what is measured, metrics.jsonl
process.py    what the loop asks of the world      report.py    what is printed
run.py        a run: set up, saved, gone on with   endings.py   signals, errors, exit codes
plan.py       the planner, asked by flags          torchrun.py  what keeps several processes safe
snapshot.py   the file                             claim.py     whose file it is
start.py      what has to come before `import torch`
"""
