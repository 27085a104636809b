"""What a recipe names, loaded: its policy's folder and tokenizer, its data; neither a model nor a trainer."""

from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoProcessor, AutoTokenizer

from grpo_ext.data.chat_template import template_text
from grpo_ext.data.loading import load_datasets
from grpo_ext.data.mixture import load_mixture
from grpo_ext.data.prepare import prepare
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.parts import QUICKSTART_MODEL, Recipe


def model_path(recipe: Recipe) -> str:
    """Hub id or folder of the policy; the quickstart model is built (once) when it is asked for."""
    name = str(recipe.model.model_name_or_path)
    if name != QUICKSTART_MODEL:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    from grpo_ext.quickstart.model import ensure_model

    with PartialState().main_process_first():
        return str(ensure_model())


def datasets_of(recipe: Recipe, tokenizer: Any) -> tuple[Any, Any]:
    """Training and evaluation dataset, prepared."""
    script, evaluates = recipe.script, recipe.training.eval_strategy != "no"
    template: Any = recipe.training.chat_template_kwargs or {}
    if recipe.mixture.datasets:
        mixed = {
            split: prepare(dataset, recipe.data, tokenizer=tokenizer, source=f"datasets ({split})", **template)
            for split, dataset in load_mixture(recipe.mixture, recipe.data).items()
        }
        asked = recipe.training.eval_strategy
        if evaluates and "test" not in mixed:
            raise ConfigError(
                [
                    f"eval_strategy={getattr(asked, 'value', asked)!r}: datasets has no test split. Set "
                    "test_split_size: 0.1, or eval_strategy: 'no'."
                ]
            )
        return mixed["train"], mixed["test"] if evaluates else None
    return load_datasets(
        str(script.dataset_name),
        recipe.data,
        dataset_config=script.dataset_config,
        train_split=script.dataset_train_split,
        test_split=script.dataset_test_split,
        streaming=script.dataset_streaming,
        eval_needed=evaluates,
        tokenizer=tokenizer,
        template_kwargs=template,
    )


def load_tokenizer(recipe: Recipe) -> Any:
    """The policy's tokenizer, with the recipe's chat template."""
    return _with_template(recipe, AutoTokenizer)


def load_processor(recipe: Recipe) -> Any:
    """What TRL would load beside the policy, with the recipe's chat template; None where the recipe has none."""
    if recipe.data.chat_template is None:
        return None
    return _with_template(recipe, AutoProcessor, truncation_side="left", padding_side="left")  # as TRL does


def _with_template(recipe: Recipe, kind: Any, **options: Any) -> Any:
    loaded = kind.from_pretrained(
        model_path(recipe),
        revision=recipe.model.model_revision,
        trust_remote_code=recipe.training.trust_remote_code,
        **options,
    )
    if recipe.data.chat_template is not None:
        loaded.chat_template = template_text(recipe.data.chat_template)
    return loaded
