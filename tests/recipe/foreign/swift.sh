CUDA_VISIBLE_DEVICES=0 swift rollout --model org/model --port 8000 &
CUDA_VISIBLE_DEVICES=1,2 NPROC_PER_NODE=2 \
swift rlhf \
    --rlhf_type grpo \
    --model org/model \
    --loss_type dapo \
    --reward_funcs accuracy cosine soft_overlong \
    --reward_weights 1 0.5 0.5 \
    --cosine_min_len_value_wrong -0.75 --soft_cache_length 128 \
    --dataset 'org/questions:main#1000' \
    --use_vllm true --vllm_mode colocate --sleep_level 1 \
    --num_generations 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 2\
    --importance_sampling_level sequence_token \
    --tuner_type lora --lora_rank 16 \
    --rollout_importance_sampling_mode token_mask --rollout_importance_sampling_threshold 3 \
    --dynamic_sample true --max_resample_times 2 \
    --system 'Think,
then answer.' --deepspeed zero2 --output_dir runs/five --eval_strategy no
