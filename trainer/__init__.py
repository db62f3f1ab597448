"""Support the training loop of train_minimal.py, which can be understood without these files.

settings.py    define the flags in one table; hold the values of a command line
plan.py        predict the memory and the time of a step; choose the policy of auto
build.py       run a trainer from its settings to its exit code; make the run of them
run.py         hold the state of a run; repeat a step when memory runs out
flags.py       read the values of flags
bootstrap.py   prepare a process before `import torch`
check_model.py compare a changed model.py with and without the techniques of a run
resume.py      continue a run from a snapshot
snapshot.py    read and write snapshots; keep the files of different runs apart
pretrained.py  load trained weights, from a snapshot or from a GPT-2 of transformers
device.py      choose device and precision; find out how much memory a process may use
optimizer.py   make the optimizers; decide which parameters each optimizer updates
process.py     hold the functions that differ with the number of processes; here for one process
reproducible_sums.py sum gradients in an order that does not depend on the number of processes
torchrun.py    connect the processes that torchrun started, and end them together
shutdown.py    stop a run: signals, updates that are not finite, errors and their exit codes
clocks.py      measure the seconds of phases and the peak memory of a step; profile steps
metrics.py     compute perplexity and peak memory; write metrics.jsonl and the log of --log-to
report.py      write the lines that a run prints
"""
