#!/usr/bin/env bash
# Starts this machine's part of a run. On each of the machines, in any order, within ten minutes:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 examples/torchrun/node.sh run.yaml [KEY=VALUE ...]
#   NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 examples/torchrun/node.sh run.yaml [KEY=VALUE ...]
#
# MASTER_ADDR is an address of the machine with NODE_RANK 0, by which the others reach it; all see one output_dir.
set -euo pipefail

run=${1:?usage: NODES=N NODE_RANK=K MASTER_ADDR=HOST examples/torchrun/node.sh RUN.yaml [KEY=VALUE ...]}
shift

exec torchrun --nnodes="${NODES:?how many machines}" --node-rank="${NODE_RANK:?this one, from 0}" \
    --nproc-per-node="${GPUS:-8}" \
    --master-addr="${MASTER_ADDR:?an address of machine 0}" --master-port="${MASTER_PORT:-29500}" \
    -m grpox train "$run" --resume auto "$@"
