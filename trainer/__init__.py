"""What surrounds the loop of train_minimal.py; a reader who came for training can do without.

run.py        what a run consists of               metrics.py   what is measured, metrics.jsonl
setup.py      how it is set up, or gone on with    report.py    what is printed
process.py    what the loop asks of the world      endings.py   signals, errors, exit codes
flags.py      the command line                     torchrun.py  what keeps several processes safe
plan.py       the planner, asked by flags          start.py     what comes before `import torch`
room.py       what memory a device has             knobs.py     what to change when it is little
snapshot.py   the file                             claim.py     whose file it is
optimizer.py  which parameter is updated how
"""
