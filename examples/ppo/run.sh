#!/usr/bin/env bash
# Model and data are made by `make quickstart`. Words given here go on to the program: ./run.sh actor.optim.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/torchrun --standalone --nproc_per_node "${RANKS:-2}" examples/ppo/main.py "$@"
