"""Support the loop of train_minimal.py; to understand training you do not need these files.

run.py         the state of a run; repeating a step when memory runs out
bootstrap.py   preparations before `import torch`
flags.py       the command line
setup.py       set up a run, the same in all processes; check the policies against model.py
resume.py      continue a run from a snapshot
snapshot.py    read and write snapshots; keep the files of different runs apart
pretrained.py  start from trained weights, also from a GPT-2 of transformers
device.py      choose device and precision; the memory of a device
optimizer.py   optimizers, and which parameters each of them updates
plan.py        predict the memory of a run; suggest a change when it does not fit
process.py     everything that depends on the number of processes, for one process
torchrun.py    connect several processes, and end them together
shutdown.py    signals, errors, exit codes
clocks.py      seconds by phase, peak memory of a step, --profile
metrics.py     measurements, metrics.jsonl, --log-to
report.py      printed lines
"""
