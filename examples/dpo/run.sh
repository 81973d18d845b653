#!/usr/bin/env bash
# Model and data are made by `make quickstart`, the pairs from that data. Words given here go on to the trainer:
# ./run.sh actor.optim.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python examples/data/pairs_from_answers.py --data .cache/quickstart/data --out .cache/quickstart/pairs
exec .venv/bin/megarl train --config examples/dpo/config.yaml "$@"
