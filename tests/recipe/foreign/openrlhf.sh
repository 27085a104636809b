set -x
LEN=${LEN:-4096}
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path org/model \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 \
   --actor.adam.lr 5e-7 --actor.eps_clip_low_high 0.2 0.28 --actor.dual_clip 3.0 \
   --reward.remote_url rewards/math.py \
   --reward.overlong_buffer_len 512 --reward.overlong_penalty_factor 0.5 \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.init_coef 1e-5 \
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis \
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.1 0.9 \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens $((LEN / 2)) \
   --train.batch_size 1024 --train.micro_batch_size 8 --train.colocate_all \
   --data.prompt_dataset org/questions --data.input_key question --data.label_key answer --data.max_len $LEN \
   --data.apply_chat_template --vllm.num_engines 8 --vllm.tensor_parallel_size 1 \
   --ds.zero_stage 3 --ckpt.output_dir runs/three --ckpt.save_steps 20 --logger.wandb.key secret
