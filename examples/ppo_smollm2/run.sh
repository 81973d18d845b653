#!/usr/bin/env bash
# PPO of SmolLM2-135M on this machine; words given here go on to the trainer: ./run.sh actor.optim.lr=1e-5
# Everything it needs is made by `make quickstart` (or: make setup, then this).
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/megarl train --config examples/ppo_smollm2/config.yaml "$@"
