"""What surrounds the loop of train_minimal.py; a reader who came for training can do without.

run.py         a run: what it consists of; a step done again when memory runs out
bootstrap.py   what comes before `import torch`
flags.py       the command line
setup.py       how a run is set up, the same in all processes; whether policies and model.py agree
resume.py      how it goes on from a snapshot
snapshot.py    the snapshot: one file, and whose it is
pretrained.py  trained weights to start from, GPT-2's of transformers too
device.py      which device, which precision, what memory it has
optimizer.py   which parameter is updated how
plan.py        the planner, asked by flags; what to change when nothing fits
process.py     what the loop asks of the world
torchrun.py    what keeps several processes safe
shutdown.py    signals, errors, exit codes
clocks.py      time by phase, the memory that a step takes, --profile
metrics.py     what is measured, metrics.jsonl, --log-to
report.py      what is printed
"""
