#!/usr/bin/env bash
# GRPO on the scores of the reward model that run.sh has trained. It knows answers that say a number; what it makes of
# others means nothing, so a rule asks for the form. The rule that knows the sum is only measured (weight 0).
# Words given here go on to the trainer: ./grpo.sh actor.optim.lr=1e-5
set -euo pipefail
cd "$(dirname "$0")/../.."
FORM="{function: 'examples/reward_model/form.py:ends_with_number', weight: 4}"
exec .venv/bin/megarl train --config examples/grpo/config.yaml \
    reward.function=null "reward.sources=[{model: reward_model}, $FORM, {function: numeric, weight: 0}]" \
    reward_model.model_path=runs/examples/reward_model/hf/step_120/reward_model \
    trainer.experiment_name=reward_model_grpo trainer.total_training_steps=15 "$@"
