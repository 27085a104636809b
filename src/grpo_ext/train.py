"""Train a recipe: `python -m grpo_ext.train --config recipe.yaml [--key value ...]`, run by `accelerate launch`."""

from grpo_ext.trainer.signals import signals, watch_parent

if __name__ == "__main__":
    signals.watch()  # before imports that take seconds

import gc
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl import get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from grpo_ext.child_processes import kill_children
from grpo_ext.config.adapters import Base, base_of, with_adapter
from grpo_ext.config.launch import check_announced, write_exit_code
from grpo_ext.config.mappings import as_mapping
from grpo_ext.data.config import is_generated
from grpo_ext.data.files import is_path
from grpo_ext.errors import FAILURES, LOST, NOT_FINISHED, ConfigError, DataError, OutOfMemory, Problem, RunInterrupted
from grpo_ext.evaluation.during import DuringTraining
from grpo_ext.packing.collective import is_out_of_memory
from grpo_ext.recipe.launching import check_launched, launch_of
from grpo_ext.recipe.loading import datasets_of, load_processor, load_tokenizer, model_path, rows_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe, print_help
from grpo_ext.recipe.preflight import Preflight, data_of
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.terminal import safe_output
from grpo_ext.trainer.checkpoints.identity import record_of
from grpo_ext.trainer.checkpoints.starting import beginning, make_room
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
from grpo_ext.trainer.output_lock import output_lock
from grpo_ext.trainer.setup import check
from grpo_ext.versions import naming_untested

logger = logging.getLogger(__name__)


def build_trainer(
    recipe: Recipe, record: dict[str, Any] | None = None, sets: Mapping[str, Any] = {}
) -> GRPOExtTrainer:
    """Return the trainer that a recipe describes, with model, data and rewards loaded.

    `record` identifies the run; `sets` are the rows of its evaluation sets by the names that messages use.
    """
    model, training = recipe.model, recipe.training
    tokenizer = load_tokenizer(recipe)
    runtime = Runtime(
        recipe.rewards,
        workers=recipe.script.reward_workers,
        memory_gib=recipe.script.reward_memory_gib,
        failures=Path(training.output_dir or ".") / "reward_failures",
        seed=training.seed,
    )
    base = base_of(model_path(recipe), model.model_revision)
    ready = check(
        model_path(recipe),
        runtime.functions,
        training.changed(model_init_kwargs=None if base else init_kwargs(recipe)),
        data_of(*datasets_of(recipe, tokenizer), sets),
        recipe.environments,
        processing_class=load_processor(recipe) if base is None else tokenizer,
        quantization_config=None if base else get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    if base is not None:
        ready = replace(ready, model=adapted_policy(recipe, base, tokenizer))
    trainer = GRPOExtTrainer.of(ready, recipe.script.reward_memory_gib)
    trainer.recipe_record = _record(recipe) if record is None else record
    return trainer


def init_kwargs(recipe: Recipe) -> dict[str, Any]:
    """Return the options with which the policy is loaded; `model_init_kwargs` override the settings of the model."""
    model = recipe.model
    options = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    set_options = {name: value for name, value in options.items() if value is not None}
    return {**set_options, **as_mapping(recipe.training.model_init_kwargs)}


def _record(recipe: Recipe) -> dict[str, Any]:
    parts = (recipe.script, recipe.data, recipe.model, recipe.mixture)
    return record_of(recipe.training, *parts, rewards=recipe.rewards, model=model_path(recipe))


def adapted_policy(recipe: Recipe, base: Base, tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    """Load the adapter that a recipe names as its model, to train it further; its base is loaded as TRL loads a model.

    The adapter at the start of training is the reference, not the bare base.

    Raises:
        ConfigError: PEFT cannot load it.
    """
    training, quantization = recipe.training, get_quantization_config(recipe.model)
    loading: dict[str, Any] = {"trust_remote_code": training.trust_remote_code, **init_kwargs(recipe)}
    if quantization is not None:
        loading["quantization_config"] = quantization
    if training.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        loading["device_map"] = None
    set_seed(training.seed)
    model = create_model_from_path(base.model, **(loading | {"revision": base.revision}))
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    zero3 = training.deepspeed_plugin is not None and training.deepspeed_plugin.zero_stage == 3
    options = {
        "revision": recipe.model.model_revision,
        "autocast_adapter_dtype": quantization is not None or not zero3,
    }
    try:
        return with_adapter(model, model_path(recipe), tokenizer, trained=True, **options)
    except ValueError as error:
        reason = f"PEFT cannot load this adapter to train it ({error})"
        raise ConfigError([Problem("model_name_or_path", model_path(recipe), reason, "Name another.")]) from error


def train(recipe: Recipe) -> GRPOExtTrainer | None:
    """Train a recipe to its end, resuming an earlier run that was stopped, and save the model.

    Returns None if an earlier run has finished.

    Raises:
        ConfigError: the checkpoint to resume from is damaged, or of another run.
        SaveError: a checkpoint or the model could not be written.
    """
    with output_lock(Path(recipe.training.output_dir or ".")):
        return _train(recipe)


def _train(recipe: Recipe) -> GRPOExtTrainer | None:
    training, show = recipe.training, PartialState().print
    record = _record(recipe)
    begin = beginning(training, record)
    if begin.over:
        show("\n".join(filter(None, [begin.over, begin.repeated])))
        return None
    tokenizer = load_tokenizer(recipe) if recipe.eval_sets else None
    sets = [(chosen, rows_of(chosen, recipe, tokenizer)) for chosen in recipe.eval_sets]
    show(f"Loading {model_path(recipe)}.")
    trainer = build_trainer(recipe, record, {f"eval_sets: {chosen.name}": rows for chosen, rows in sets})
    if begin.checkpoint:
        show(f"Resuming from {begin.checkpoint}.")
    for message in filter(None, [begin.repeated, make_room(training, begin)]):
        show(message)
    if sets:
        trainer.add_callback(DuringTraining(trainer, sets, recipe.script.reward_workers))
    trainer.train(resume_from_checkpoint=begin.checkpoint)
    trainer.save_final(str(training.output_dir))
    show(f"Model saved to {training.output_dir}.")
    if training.push_to_hub:
        data = recipe.script.dataset_name
        trainer.push_to_hub(dataset_name=data if data and not (is_path(data) or is_generated(data)) else None)
    trainer.finish(str(training.output_dir))
    return trainer


def leave_process_group() -> None:
    """Leave the process group, if there is one, without a deadlock.

    The last reference to a gloo group may be held by a DDP reducer, which holds the interpreter's lock while it waits
    for the group's thread, and that thread needs the lock to free the last collective's tensors (torch 2.13). So
    unused objects are freed first, and the thread gets a moment to finish. They include a colocated vLLM, which hides
    what it makes from the collector, and whose end needs the group.
    """
    if PartialState._shared_state:
        if "vllm" in sys.modules:
            gc.unfreeze()
        gc.collect()
        time.sleep(0.1)
        if groups := sys.modules.get("vllm.distributed.parallel_state"):  # it may keep frames, and so the trainer
            groups.destroy_model_parallel()
            groups.destroy_distributed_environment()
        PartialState().destroy_process_group()


@safe_output()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a recipe with mistakes prints all of them and exits with code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h", "--help-all"} & set(argv):
        print_help()
        return
    watching, signals.phase = signals.watch(), "loading"
    signals.cleanups[:] = [kill_children]
    watch_parent()
    try:
        check_announced()
        check_launched(launch_of(argv))
        with naming_untested():
            train(load_recipe(argv, Preflight(data=False)))
    except DataError as error:
        print(ConfigError(error.problems), file=sys.stderr)
        leave(2)
    except FAILURES as error:
        print(error, file=sys.stderr)
        leave(2)
    except LOST as error:
        print(error, file=sys.stderr)
        leave(NOT_FINISHED)
    except RunInterrupted:
        leave(NOT_FINISHED)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(OutOfMemory("Before the first step or after the last", error), file=sys.stderr)
        leave(2)
    finally:
        signals.phase = "ending"
        leave_process_group()
        if watching:
            signals.stop_watching()


def leave(code: int) -> None:
    """Exit with a code that reaches `grpo-ext train` even through a launcher, whose own is always 1."""
    write_exit_code(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
