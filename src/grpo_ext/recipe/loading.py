"""What a recipe names, loaded: its policy's folder and tokenizer, its data; neither a model nor a trainer."""

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from grpo_ext.config.adapters import base_of
from grpo_ext.data.chat_template import template_text
from grpo_ext.data.config import PROCEDURAL, DataConfig
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.data.loading import load_datasets
from grpo_ext.data.mixture import load_mixture
from grpo_ext.data.prepare import prepare
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.quickstart.model import LESSONS, ensure_once
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.policy import load_tokenizer_of


def model_path(recipe: Recipe) -> str:
    """Hub id or folder of the policy; a quickstart model is built (once) when it is asked for."""
    name = str(recipe.model.model_name_or_path)
    if name not in LESSONS:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    return str(ensure_once(name))


def base_path(recipe: Recipe) -> str:
    """Hub id or folder of the policy; of an adapter, of its base."""
    base = base_of(model_path(recipe), recipe.model.model_revision)
    return model_path(recipe) if base is None else base.model


def datasets_of(
    recipe: Recipe, tokenizer: Any, *, evaluates: bool | None = None, data: DataConfig | None = None
) -> tuple[Any, Any]:
    """Training and evaluation dataset, prepared; the second where `evaluates`, by default as `eval_strategy` says.

    `data` takes the place of the recipe's settings.
    """
    script, data = recipe.script, data or recipe.data
    evaluates = recipe.training.eval_strategy != "no" if evaluates is None else evaluates
    template: Any = recipe.training.chat_template_kwargs or {}
    by_prompt = not recipe.environments
    if recipe.mixture.datasets:
        mixed = {
            split: prepare(dataset, data, tokenizer=tokenizer, source=f"datasets ({split})", **template)
            for split, dataset in load_mixture(recipe.mixture, data, by_prompt=by_prompt).items()
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
        data,
        dataset_config=script.dataset_config,
        train_split=script.dataset_train_split,
        test_split=script.dataset_test_split,
        streaming=script.dataset_streaming,
        eval_needed=evaluates,
        tokenizer=tokenizer,
        template_kwargs=template,
        by_prompt=by_prompt,
    )


def rows_of(chosen: EvalSet, recipe: Recipe, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of an evaluation set, prepared as the recipe's with the settings that are the set's own.

    Raises:
        DataError: it cannot be loaded, or has no rows.
    """
    data = dataclasses.replace(recipe.data, **chosen.data)
    template: Any = recipe.training.chat_template_kwargs or {}
    if chosen.dataset_name is None and chosen.split is None:
        dataset = datasets_of(recipe, tokenizer, evaluates=True, data=data)[1]
    else:
        dataset, _ = load_datasets(
            str(chosen.dataset_name or recipe.script.dataset_name),
            dataclasses.replace(data, test_size=None),  # which holds rows out of the training data
            dataset_config=chosen.dataset_config if chosen.dataset_name else recipe.script.dataset_config,
            train_split=chosen.split or _split_of(chosen, recipe),
            test_split="",
            streaming=False,
            eval_needed=False,
            tokenizer=tokenizer,
            template_kwargs=template,
        )
    rows = [dict(row) for row in islice(dataset, chosen.limit)]
    if not rows:
        raise DataError(f"eval_sets: {chosen.name} has no rows. Give data that has some.")
    return rows


def _split_of(chosen: EvalSet, recipe: Recipe) -> str:
    """The split of an evaluation set that names none: the recipe's test split, or all of a file or procedural task."""
    name = chosen.dataset_name or ""
    whole = Path(name).expanduser().is_file() or name.startswith(PROCEDURAL)
    return "train" if whole else recipe.script.dataset_test_split


def load_tokenizer(recipe: Recipe) -> Any:
    """The policy's tokenizer, with the recipe's chat template."""
    loaded = load_tokenizer_of(model_path(recipe), recipe.model.model_revision, recipe.training.trust_remote_code)
    return _templated(loaded, recipe)


def load_processor(recipe: Recipe) -> Any:
    """What TRL would load beside the policy, with the recipe's chat template; None where the recipe has none."""
    if recipe.data.chat_template is None:
        return None
    loaded = AutoProcessor.from_pretrained(
        model_path(recipe),
        revision=recipe.model.model_revision,
        trust_remote_code=recipe.training.trust_remote_code,
        truncation_side="left",  # as TRL does
        padding_side="left",
    )
    return _templated(loaded, recipe)


def _templated(loaded: Any, recipe: Recipe) -> Any:
    if recipe.data.chat_template is not None:
        loaded.chat_template = template_text(recipe.data.chat_template)
    return loaded
