#!/usr/bin/env bash
set -xeuo pipefail
SCRIPT_NAME="$(basename -- "${BASH_SOURCE[0]}" .sh)"
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/one"}
n=${ROLLOUT_N:-16}
loss_mode=sapo
bsz=$((8 * n))
DATA=(
    data.train_files="['$HOME/data/a.parquet', '$HOME/data/b.parquet']"
    data.val_files="['$HOME/data/c.parquet']"  # not evaluated
    data.train_batch_size=${bsz}
)
REWARD=(reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=512
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
    +reward.reward_kwargs.max_resp_len=4096
    reward.custom_reward_function.path=recipe/score.py
    reward.custom_reward_function.name=score
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    LAUNCH=(uv run --frozen --all-packages --extra vllm python3)
    tp=4
fi
tp=${TP:-2}
if [ "${TP4:-0}" = 1 ]; then tp=4; fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${REWARD[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode} \
    +actor_rollout_ref.actor.policy_loss.tau_pos=1.5 \
    actor_rollout_ref.actor.tau_neg=1.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.clip_ratio=0.0003 \
    actor_rollout_ref.rollout.n=${n} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tp} \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.bypass_mode=True \
    data.max_response_length=4096 \
    trainer.logger='["console","file"]' \
    trainer.experiment_name="${SCRIPT_NAME}" \
    trainer.n_gpus_per_node=8 \
    "$@"
