"""Predict the memory and the time of a training step before it runs. A prediction needs neither a
GPU nor much memory, because the step runs on tensors without data.

step.py         simulate one step of MiniGPT (read this file first)
any_model.py    simulate one step of any other model, with `plan_step`
simulate.py     run forward and backward of any model on fake tensors, for both
layout.py       say which processes of a run share what
op_recorder.py  record the operators and storages of a step; all results come from this record
timeline.py     split the record into segments, such as the forward of one block; for each operator,
                compute its FLOPs, the bytes that it reads and writes, and the bytes that exist
                after it
record.py       describe each storage: its name, the operator that made it, why it exists, when it
                is freed
operators.py    describe an operator: the arguments that it reads and writes, its FLOPs, the
                workspace of its GPU kernel
shards.py       add the memory that train_fsdp.py takes for sharding
roofline.py     estimate the seconds of a step on a card (a GPU or another device)
cards.py        list the cards that --card can name: memory, FLOP/s, bytes/s; find a card by name
batches.py      find the largest batch that fits in memory: extrapolate from planned steps of two
                batch sizes
choose.py       choose the fastest recompute policy that fits in memory
formulas.py     compute memory and FLOPs by formulas that can be checked by hand
units.py        write numbers of bytes as text
"""

from .any_model import plan_step
from .cards import CARDS, card
from .layout import Layout
from .op_recorder import kept_for_backward
from .roofline import Card, measure_this_machine
from .simulate import PlanError
from .step import Planner
from .timeline import KINDS, StepMemory
