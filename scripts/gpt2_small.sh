#!/usr/bin/env bash
# GPT-2 small (124M) on your own text, on one GPU.
#
#   scripts/gpt2_small.sh data/train.txt
#   scripts/gpt2_small.sh data/train.txt --batch-size 2 --grad-accum-steps 240    # smaller card
#   scripts/gpt2_small.sh 'data/fineweb/*.bin' --num-tokens 10B
#
# 0.5M tokens a step, as GPT-2 and GPT-3 had: 16 x 30 sequences of 1,024. What is added on the
# command line comes last and wins. auto recomputes no more than the card makes necessary: nothing
# on most with 12 GB or more. If the card is full: halve --batch-size, double --grad-accum-steps:
# the same sequences a step, the same training up to rounding.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: scripts/gpt2_small.sh TEXT_OR_TOKENS [flags of train_minimal.py]" >&2; exit 2; }
text=$1
shift
root=$(dirname "$0")/..
[[ $text == /* || . -ef $root ]] || text=$PWD/$text  # named from where we were started
cd "$root"
[[ " $*" == *" --num-"* ]] || set -- --num-steps 10000 "$@"  # one of three flags says how long
exec ${MINIGPT_TRAINER:-python train_minimal.py} --train-data "$text" --tokenizer-name gpt2 \
    --n-layers 12 --n-heads 12 --d-model 768 --d-ff 3072 --seq-len 1024 \
    --batch-size 16 --grad-accum-steps 30 --use-activation-checkpoint auto --compile \
    --warmup-steps 700 --lr 6e-4 --min-lr 6e-5 --weight-decay 0.1 \
    --log-interval 10 --eval-interval 250 --eval-tokens 328K --save-interval 250 \
    --checkpoint-path checkpoints/gpt2_small.pt "$@"
