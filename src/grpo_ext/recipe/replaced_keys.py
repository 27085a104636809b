"""Keys that TRL and transformers have replaced, and common names; `foreign` has those of one project."""

REPLACED: dict[str, str] = {
    # transformers
    "torch_dtype": "transformers calls it dtype now. Write dtype.",
    "warmup_ratio": "transformers 5 takes the ratio in warmup_steps (a value below 1). Write warmup_steps.",
    "evaluation_strategy": "it is eval_strategy now. Write eval_strategy.",
    "no_cuda": "it is use_cpu now. Write use_cpu.",
    "logging_dir": "it is an environment variable now. Write env: {TENSORBOARD_LOGGING_DIR: ...}.",
    "overwrite_output_dir": "transformers 5 dropped it; a run resumes from its last checkpoint. Remove it; "
    "`resume_from_checkpoint: never` starts a new run.",
    "save_safetensors": "transformers 5 always saves safetensors. Remove it.",
    "per_gpu_train_batch_size": "it is per_device_train_batch_size now. Write that.",
    "group_by_length": "the sampler keeps the completions of a prompt together. Remove it.",
    "include_tokens_per_second": "transformers 5 dropped it; num_tokens and step_time are logged. Remove it.",
    "push_to_hub_model_id": "it is hub_model_id now. Write hub_model_id.",
    "push_to_hub_token": "it is hub_token now. Write hub_token.",
    "tokenizer_name_or_path": "the tokenizer is the one in the model's folder. Remove it.",
    # TRL
    "use_liger_loss": "TRL always computes log-probabilities without full logits now. Remove it.",
    "use_liger_kernel_loss": "TRL always computes log-probabilities without full logits now. Remove it.",
    "vllm_max_model_len": "it is vllm_max_model_length now. Write that.",
    "vllm_guided_decoding_regex": "it is vllm_structured_outputs_regex now. Write that.",
    "vllm_device": "vllm_mode: colocate shares the training GPU, vllm_mode: server has its own. Write vllm_mode.",
    "vllm_enable_prefix_caching": "vLLM does it by default. Remove it.",
    "vllm_tp": "it is vllm_tensor_parallel_size. Write that.",
    "epsilon_low": "TRL calls the lower bound epsilon. Write epsilon.",
    "scale_reward": "it is scale_rewards. Write scale_rewards.",
    "num_generation": "it is num_generations. Write num_generations.",
    # other trainers
    "kl_coef": "TRL calls it beta. Write beta.",
    "kl_coeff": "TRL calls it beta. Write beta.",
    "cliprange": "TRL calls it epsilon. Write epsilon.",
    "group_size": "TRL calls it num_generations. Write num_generations.",
    "num_return_sequences": "TRL calls it num_generations. Write num_generations.",
    "advantage_type": "it is advantage_estimator here. Write advantage_estimator.",
    "rewards": "it is reward_funcs. Write reward_funcs.",
    "reward_functions": "it is reward_funcs. Write reward_funcs.",
}
