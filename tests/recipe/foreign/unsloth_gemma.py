# The settings of unslothai/notebooks, Gemma3_(1B)-GRPO; what the rewards do is left out.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastModel

longest = 1024
model, tokenizer = FastModel.from_pretrained(
    full_finetuning=False,
    load_in_4bit=False,
    load_in_8bit=False,
    max_seq_length=longest,
    model_name="unsloth/gemma-3-1b-it",
)
model = FastModel.get_peft_model(
    model,
    bias="none",
    finetune_attention_modules=True,
    finetune_language_layers=True,
    finetune_mlp_modules=True,
    finetune_vision_layers=False,
    lora_alpha=8,
    lora_dropout=0,
    r=8,
    random_state=3407,
)


def check_answer(completions, answer, **_):
    return [3.0 * (gold in completion[0]["content"]) for completion, gold in zip(completions, answer, strict=True)]


GRPOTrainer(
    args=GRPOConfig(
        adam_beta1=0.9,
        adam_beta2=0.99,
        gradient_accumulation_steps=1,
        learning_rate=5e-6,
        logging_steps=1,
        lr_scheduler_type="cosine",
        max_completion_length=longest - 256,
        max_grad_norm=0.1,
        max_prompt_length=256,
        max_steps=50,
        num_generations=4,
        optim="adamw_torch_fused",
        output_dir="outputs",
        per_device_train_batch_size=1,
        report_to="none",
        save_steps=50,
        warmup_ratio=0.1,
        weight_decay=0.1,
    ),
    model=model,
    processing_class=tokenizer,
    reward_funcs=[check_answer],
    train_dataset=load_dataset("openai/gsm8k", "main", split="train"),
).train()
