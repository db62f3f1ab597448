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
text=$1
shift
root=$(dirname "$0")/..
[[ $text == /* || . -ef $root ]] || text=$PWD/$text  # named from where we were started
cd "$root"
[[ " $*" == *" --num-"* ]] || set -- --num-steps 10000 "$@"  # one of three flags says how long
gpus=${GPUS:-$(python -c 'import torch; print(max(torch.cuda.device_count(), 1))')}
exec torchrun --nproc-per-node="$gpus" train_ddp.py --train-data "$text" --tokenizer-name gpt2 \
    --n-layers 12 --n-heads 12 --d-model 768 --d-ff 3072 --seq-len 1024 \
    --batch-size 16 --grad-accum-steps $(((30 + gpus - 1) / gpus)) --use-activation-checkpoint auto --compile \
    --warmup-steps 700 --lr 6e-4 --min-lr 6e-5 --weight-decay 0.1 \
    --log-interval 10 --eval-interval 250 --save-interval 250 \
    --checkpoint-path checkpoints/gpt2_small_ddp.pt "$@"
