#!/bin/bash
size=${SIZE:-7}
uv pip install trl --upgrade
accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml train_grpo.py \
    --model_name_or_path org/model-${size}b \
    --dataset_name org/questions \
    --reward_funcs accuracy_reward \
    --per_device_train_batch_size 8 --num_generations 8 --report_to none \
    --learning_rate 2e-6 --eval_strategy no "$@" 2>&1 | tee train.log
