#!/usr/bin/env bash
# Trains on the GPUs (or CPU cores) of one machine with the guard on; after a fault, says how to look at it.
#
# Usage: launch/train.sh [NPROC] [SCRIPT [ARGS...]]        e.g. launch/train.sh 2 examples/digits.py --wrapper fsdp2
#
# Ends with 65 where the guard stopped the job, which torchrun alone would turn into 1, else with the code of torchrun.
# Options are changed without editing the script:
#   NANGUARD_ON_FAULT=skip NANGUARD_DUMP_DIR=/scratch/nan_dumps launch/train.sh ...
set -euo pipefail

nproc=${1:-2}
script=${2:-examples/digits.py}
shift $(($# < 2 ? $# : 2))

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # recorded in the dump: the number of threads decides bits
dump_dir=${NANGUARD_DUMP_DIR:-nan_dumps}

# --max-restarts 0: a restart would run into the same batch again
status=0
ddp-nanguard run -- \
    torchrun --standalone --nproc-per-node "$nproc" --max-restarts 0 "$script" "$@" || status=$?
if [ "$status" -eq 65 ]; then
    ddp-nanguard list "$dump_dir" || true
fi
exit "$status"
