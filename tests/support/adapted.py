"""An adapter that TRL's SFTTrainer has made of a tiny model, and recipes that train it further."""

from pathlib import Path

import yaml
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from support import tiny

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.1}


def sft(base: str, folder: str) -> None:
    """Five supervised steps on the model at `base`, a path as its user writes it."""
    args = SFTConfig(
        folder,
        max_steps=5,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": f"{c}{i}:", "completion": f"a{i}"} for i, c in enumerate("abcdefgh")])
    trainer = SFTTrainer(
        base, args, train_dataset=rows, processing_class=tiny.tokenizer(), peft_config=LoraConfig(**LORA)
    )
    trainer.train()
    trainer.save_model(folder)


def write_recipe(folder: Path, model: str, output: Path, **settings) -> list[str]:
    """Arguments that name a recipe of eight prompts."""
    data = folder / "train.jsonl"
    data.write_text("".join(f'{{"prompt": "{"abcdefgh"[i]}{i}:", "solution": "{i}"}}\n' for i in range(8)))
    values = tiny.TRAINING | {
        "model_name_or_path": model,
        "dataset_name": str(data),
        "reward_funcs": [{"name": "a", "func": "support.tiny:count_a"}],
        "reward_workers": 0,
        "output_dir": str(output),
    }
    path = folder / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(values | settings))
    return ["--config", str(path)]
