# The settings of unslothai/notebooks, Llama3.1_(8B)-GRPO; what the rewards do is left out.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel

longest = 1024
rank = 32
longest_prompt = 256
policy, tokenizer = FastLanguageModel.from_pretrained(
    fast_inference=True,
    gpu_memory_utilization=0.9,
    load_in_4bit=True,
    max_lora_rank=rank,
    max_seq_length=longest,
    model_name="unsloth/meta-Llama-3.1-8B-Instruct",
)
policy = FastLanguageModel.get_peft_model(
    policy,
    lora_alpha=rank,
    r=rank,
    random_state=3407,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    use_gradient_checkpointing="unsloth",
)
rows = load_dataset("openai/gsm8k", "main")["train"]


def correctness_reward_func(completions, answer, **_):
    return [2.0 * (completion[0]["content"] == gold) for completion, gold in zip(completions, answer, strict=True)]


def xmlcount_reward_func(completions, **_):
    return [0.125 * completion[0]["content"].count("<answer>") for completion in completions]


settings = GRPOConfig(
    adam_beta1=0.9,
    adam_beta2=0.99,
    gradient_accumulation_steps=1,
    learning_rate=5e-6,
    logging_steps=1,
    lr_scheduler_type="cosine",
    max_completion_length=longest - longest_prompt,
    max_grad_norm=0.1,
    max_prompt_length=longest_prompt,
    max_steps=250,
    num_generations=6,
    optim="paged_adamw_8bit",
    output_dir="outputs",
    per_device_train_batch_size=1,
    report_to="none",
    save_steps=250,
    warmup_ratio=0.1,
    weight_decay=0.1,
)
trainer = GRPOTrainer(
    args=settings,
    model=policy,
    processing_class=tokenizer,
    reward_funcs=[xmlcount_reward_func, correctness_reward_func],
    train_dataset=rows,
)
trainer.train()
