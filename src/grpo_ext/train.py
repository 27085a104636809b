"""`python -m grpo_ext.train --config recipe.yaml [--key value ...]`: what `accelerate launch` runs."""

import gc
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState
from trl import get_peft_config, get_quantization_config

from grpo_ext.config.launch import check_announced
from grpo_ext.errors import ConfigError, DataError, NotSaved, RewardError, RolloutDrift, ServerLost
from grpo_ext.recipe.loading import datasets_of, load_tokenizer, model_path
from grpo_ext.recipe.parsing import load_recipe, print_help
from grpo_ext.recipe.parts import Recipe
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.trainer.checkpoints.choice import check_same_objective, checkpoint_to_resume
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer

logger = logging.getLogger(__name__)


def build_trainer(recipe: Recipe) -> GRPOExtTrainer:
    """The trainer a recipe describes, with model, data and rewards loaded."""
    model, training = recipe.model, recipe.training
    train_dataset, eval_dataset = datasets_of(recipe, load_tokenizer(recipe))
    if train_dataset.column_names is not None:  # a stream may not say
        for sentence in absences(recipe.rewards, train_dataset.column_names):
            logger.warning(sentence)
    loading = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    runtime = Runtime(
        recipe.rewards,
        workers=recipe.script.reward_workers,
        memory_gib=recipe.script.reward_memory_gib,
        failures=Path(training.output_dir or ".") / "reward_failures",
    )
    given = training.model_init_kwargs if isinstance(training.model_init_kwargs, dict) else {}
    training.model_init_kwargs = {**{k: v for k, v in loading.items() if v is not None}, **given}
    return GRPOExtTrainer(
        model=model_path(recipe),
        reward_funcs=runtime.functions,
        args=training,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def train(recipe: Recipe) -> GRPOExtTrainer:
    """Train a recipe to its end, resuming where an earlier run was stopped, and save the model."""
    checkpoint = checkpoint_to_resume(Path(recipe.training.output_dir or "."), recipe.training.resume_from_checkpoint)
    if checkpoint:
        check_same_objective(checkpoint, recipe.training.objective)
    trainer = build_trainer(recipe)
    if checkpoint:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        trainer.close_rewards()
    trainer.save_model(recipe.training.output_dir)
    trainer.save_objective(str(recipe.training.output_dir))
    trainer.accelerator.print(f"Model saved to {recipe.training.output_dir}.")
    if recipe.training.push_to_hub:
        trainer.push_to_hub(dataset_name=recipe.script.dataset_name)
    return trainer


def leave_process_group() -> None:
    """Leave the process group, if there is one, without waiting for ever.

    The last reference to a gloo group may be held by a DDP reducer, which waits for the group's thread with the
    interpreter's lock in its hand, while that thread wants the lock to let go of the last collective's tensors
    (seen with torch 2.13). So what is no longer used goes first, and the thread gets a moment to finish.
    """
    if PartialState._shared_state:
        gc.collect()
        time.sleep(0.1)
        PartialState().destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; a recipe with mistakes ends with exit code 2 and all of them."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help()
        return
    try:
        check_announced()
        train(load_recipe(argv))
    except (ConfigError, DataError, NotSaved, RewardError, RolloutDrift, ServerLost) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    finally:
        leave_process_group()


if __name__ == "__main__":
    main()
