"""Load a policy, a model or an adapter on its base, and the data, tokenizer and processor of a recipe."""

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import cached_file

from grpo_ext.config.adapters import Base, base_of, with_adapter
from grpo_ext.config.mappings import as_mapping
from grpo_ext.data.chat_template import template_text
from grpo_ext.data.config import DataConfig, is_generated
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.data.loading import load_datasets, load_generated
from grpo_ext.data.mixture import load_mixture
from grpo_ext.data.prepare import AnyDataset, Split, Tokenizer, prepare
from grpo_ext.data.rows import Row
from grpo_ext.errors import ABSENT, ConfigError, DataError, Problem, first_line
from grpo_ext.quickstart.model import LESSONS, ensure_once
from grpo_ext.recipe.parts import Recipe
from grpo_ext.registry import did_you_mean
from grpo_ext.waiting import named


def model_path(recipe: Recipe) -> str:
    """Hub id or folder of the policy; a quickstart model is built once, when this is called."""
    name = str(recipe.model.model_name_or_path)
    if name not in LESSONS:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    return str(ensure_once(name))


def base_path(recipe: Recipe) -> str:
    """Hub id or folder of the policy, or of its base if it is an adapter."""
    base = base_of(model_path(recipe), recipe.model.model_revision)
    return model_path(recipe) if base is None else base.model


def datasets_of(
    recipe: Recipe, tokenizer: Tokenizer, *, evaluates: bool | None = None, data: DataConfig | None = None
) -> tuple[AnyDataset, AnyDataset | None]:
    """Load and prepare the training dataset, and the evaluation dataset if `evaluates` (None: by `eval_strategy`).

    `data` replaces the recipe's settings.
    """
    script, data, strategy = recipe.script, data or recipe.data, recipe.training.eval_strategy
    evaluates = strategy != "no" if evaluates is None else evaluates
    template = as_mapping(recipe.training.chat_template_kwargs)
    by_prompt = not recipe.environments
    if recipe.mixture.datasets:
        mixed = {
            split: prepare(Split(dataset, f"datasets ({split})"), data, tokenizer, template)
            for split, dataset in load_mixture(recipe.mixture, data, by_prompt=by_prompt).items()
        }
        if evaluates and "test" not in mixed:
            cure = "Set test_split_size: 0.1, or eval_strategy: 'no'."
            value = getattr(strategy, "value", strategy)
            raise ConfigError([Problem("eval_strategy", value, "datasets has no test split", cure)])
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


def rows_of(chosen: EvalSet, recipe: Recipe, tokenizer: Tokenizer) -> list[Row]:
    """Rows of an evaluation set, prepared by the recipe's settings and those that the set overrides.

    Raises:
        DataError: it cannot be loaded, has no rows, or not the `source_column` that was chosen.
    """
    data = dataclasses.replace(recipe.data, **chosen.data)
    name = chosen.dataset_name or recipe.script.dataset_name
    if name != recipe.script.dataset_name and "dataset_kwargs" not in chosen.data:
        data.dataset_kwargs = None  # which are options of the recipe's task
    template = as_mapping(recipe.training.chat_template_kwargs)
    dataset: AnyDataset | None
    if chosen.dataset_name is None and chosen.split is None:
        _, dataset = datasets_of(recipe, tokenizer, evaluates=True, data=data)
    elif name is None:
        raise DataError([Problem("split", chosen.split, "datasets has no splits by name", "Set dataset_name.")])
    elif is_generated(name):
        dataset = load_generated(name, data, chosen.split or "test", tokenizer, template)
    else:
        whole_file = Path(chosen.dataset_name or "").expanduser().is_file()
        dataset, _ = load_datasets(
            name,
            dataclasses.replace(data, test_size=None),  # which holds rows out of the training data
            dataset_config=chosen.dataset_config if chosen.dataset_name else recipe.script.dataset_config,
            train_split=chosen.split or ("train" if whole_file else recipe.script.dataset_test_split),
            test_split="",
            streaming=False,
            eval_needed=False,
            tokenizer=tokenizer,
            template_kwargs=template,
        )
    rows = [dict(row) for row in islice(dataset or (), chosen.limit)]
    if not rows:
        raise DataError([Problem(f"eval_sets: {chosen.name}", ABSENT, "no rows", "Give data that has some.")])
    source = chosen.source_column
    if source != EvalSet.source_column and not any(source in row for row in rows):
        cure = did_you_mean(source, rows[0])
        raise DataError([Problem(f"eval_sets: {chosen.name}: source_column", source, "no such column", cure)])
    return rows


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer, with the recipe's chat template.

    Raises:
        ConfigError: there is no such model here, and the hub cannot be reached.
    """
    model = model_path(recipe)
    try:
        loaded = load_tokenizer_of(model, recipe.model.model_revision, recipe.training.trust_remote_code)
    except OSError as error:
        cure = "Name a folder, or a model of the hub where that can be reached."
        raise ConfigError([Problem("model_name_or_path", model, first_line(error), cure)]) from error
    if recipe.data.chat_template is not None:
        loaded.chat_template = template_text(recipe.data.chat_template)
    return loaded


def load_processor(recipe: Recipe) -> PreTrainedTokenizerBase | ProcessorMixin | None:
    """Load what TRL would load beside the policy, with the recipe's chat template; None if the recipe has none."""
    if recipe.data.chat_template is None:
        return None
    loaded = AutoProcessor.from_pretrained(
        model_path(recipe),
        revision=recipe.model.model_revision,
        trust_remote_code=recipe.training.trust_remote_code,
        truncation_side="left",  # as TRL does
        padding_side="left",
    )
    loaded.chat_template = template_text(recipe.data.chat_template)
    return loaded


# Models and adapters, by the name of their folder.

_FROM_ELSEWHERE = "Ctrl-C ends it. The hub does not answer, or its own code (trust_remote_code) waits for something."


def load_tokenizer_of(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model's folder; for an adapter without one, that of its base."""
    base = base_of(model, revision)
    if base is not None and not has_file(model, "tokenizer_config.json", revision):
        model, revision = base
    with named(f"Tokenizer of {model}", _FROM_ELSEWHERE):
        return AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)


def has_file(model: str, file: str, revision: str | None = None) -> bool:
    """Return whether a model has a file, in its folder, on the hub or in the hub's cache."""
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    options: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in quiet}
    try:
        return cached_file(model, file, revision=revision, **options) is not None
    except OSError:  # transformers raises it for some names anyway
        return False


def load_policy(
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    revision: str | None = None,
    base: Base | None = None,
    **loading: object,
) -> PreTrainedModel | PeftModel:
    """Load a causal language model for evaluation; an adapter on its base (by default the one that it names)."""
    base = base or base_of(model, revision)
    name, base_revision = base or (model, revision)
    loaded = AutoModelForCausalLM.from_pretrained(name, revision=base_revision, **loading).eval()
    return loaded if base is None else with_adapter(loaded, model, tokenizer, revision=revision).eval()
