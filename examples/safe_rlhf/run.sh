#!/usr/bin/env bash
# Model and data are made by `make quickstart`. Words given here go on to the trainer: ./run.sh actor.optim.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/megarl train --config examples/safe_rlhf/config.yaml "$@"
