#!/usr/bin/env bash
# GPT-2 small (124M) on your own text, on all GPUs of this machine (or on GPUS=n of them).
#
#   scripts/gpt2_small_ddp.sh data/train.txt
#   GPUS=2 scripts/gpt2_small_ddp.sh data/train.txt --batch-size 8 --resume
#
# The same 480 sequences a step as gpt2_small.sh, shared out over the GPUs (rounded up where 30
# does not divide by their number). On several machines:
# see the first lines of train_ddp.py for torchrun's own flags.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: scripts/gpt2_small_ddp.sh TEXT_OR_TOKENS [flags of train_ddp.py]" >&2; exit 2; }
gpus=${GPUS:-$(python -c 'import torch; print(max(torch.cuda.device_count(), 1))')}
export MINIGPT_TRAINER="torchrun --nproc-per-node=$gpus train_ddp.py"
exec "$(dirname "$0")/gpt2_small.sh" "$1" --grad-accum-steps $(((30 + gpus - 1) / gpus)) \
    --checkpoint-path checkpoints/gpt2_small_ddp.pt "${@:2}"
