# The settings of huggingface/trl, docs/source/lora_without_regret.md, as a script.
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import reasoning_accuracy_reward

rows = load_dataset("HuggingFaceH4/OpenR1-Math-220k-default-verified", split="train")
settings = GRPOConfig(
    generation_batch_size=8,
    gradient_accumulation_steps=4,
    learning_rate=5e-5,
    num_generations=8,
    num_train_epochs=1,
    per_device_train_batch_size=1,
    report_to=["trackio"],
)
GRPOTrainer(
    args=settings,
    model="Qwen/Qwen3-0.6B",
    peft_config=LoraConfig(lora_alpha=32, r=1, target_modules="all-linear"),
    reward_funcs=reasoning_accuracy_reward,
    train_dataset=rows,
).train()
