#!/usr/bin/env bash
# SmolLM2-135M learns to use a calculator; words given here go on to the trainer: ./run.sh actor.optim.lr=1e-5
# The model is made by `make quickstart` (or: make setup, then the quickstart's model).
set -euo pipefail
cd "$(dirname "$0")/../.."
test -e .cache/calculator/train.jsonl || .venv/bin/python examples/multi_turn/prepare_data.py --out .cache/calculator
exec .venv/bin/megarl train --config examples/multi_turn/config.yaml "$@"
