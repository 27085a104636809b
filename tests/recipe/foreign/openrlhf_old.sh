ray job submit --address http://localhost:8265 -- python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain org/model --reward_pretrain org/reward-model --save_path runs/four \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --advantage_estimator group_norm --n_samples_per_prompt 8 \
   --rollout_batch_size 128 --train_batch_size 512 --micro_train_batch_size 8 \
   --prompt_data org/questions --input_key question --apply_chat_template \
   --vllm_num_engines 2 --enable_vllm_is_correction --use_icepop
