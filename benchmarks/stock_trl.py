"""Train a recipe by stock TRL's trainer: the same model, rows, rewards, seed and settings, for some seconds.

    python benchmarks/stock_trl.py RECIPE OUTPUT [--seconds N] [--key value ...]

Writes metrics.jsonl (a line for each step, with the seconds of the step) and the trained model to OUTPUT. Only the
recipe, its data and its rewards are read by grpo-ext; nothing of it generates or trains.
"""

import argparse
import json
import time
from pathlib import Path

from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_ext.recipe.loading import datasets_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rewards.runtime import Runtime

STOCK = {"loss_type": "dr_grpo", "scale_rewards": "none", "save_strategy": "no", "eval_strategy": "no"}
"""TRL's names for what a recipe of `loss_type: dr_grpo` means."""
CHOSEN = (
    *("num_generations", "max_completion_length", "temperature", "max_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "gradient_checkpointing"),
    *("use_cpu", "bf16", "seed", "num_iterations", "max_grad_norm"),
)


class Steps(TrainerCallback):
    """Write what a step took and logged; end the run when its time is over."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.left, self.began = file, seconds, 0.0

    def on_step_begin(self, *args, **kwargs) -> None:
        """Start the clock of a step."""
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        """Write a step; nothing else takes its time."""
        if "reward" not in logs:
            return
        taken = time.perf_counter() - self.began
        self.left -= taken
        control.should_training_stop |= self.left <= 0
        with self.file.open("a") as file:
            file.write(json.dumps({"step": state.global_step, "step_time": taken, **logs}) + "\n")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options, further = parser.parse_known_args()
    recipe = load_recipe(["--config", options.recipe, "--output_dir", str(options.output), *further])
    model, settings = str(recipe.model.model_name_or_path), {name: getattr(recipe.training, name) for name in CHOSEN}
    tokenizer = AutoTokenizer.from_pretrained(model)
    data, _ = datasets_of(recipe, tokenizer)
    options.output.mkdir(parents=True, exist_ok=True)
    trainer = GRPOTrainer(
        model,
        Runtime(recipe.rewards, seed=recipe.training.seed).functions,
        GRPOConfig(
            output_dir=str(options.output),
            model_init_kwargs={"dtype": "float32"},
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            **settings,
            **STOCK,
        ),
        data,
        processing_class=tokenizer,
        callbacks=[Steps(options.output / "metrics.jsonl", options.seconds)],
    )
    trainer.train()
    trainer.save_model(str(options.output))


if __name__ == "__main__":
    main()
