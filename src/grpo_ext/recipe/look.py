"""Inspect the policy and the data of a recipe before training, to report now what training would meet."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset
from jinja2 import Environment, TemplateError, meta

from grpo_ext.config.ahead import ahead_problems
from grpo_ext.config.batches import too_few
from grpo_ext.config.images import image_problems
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import as_far_as_sound, is_broken
from grpo_ext.data import chat_template
from grpo_ext.data.chat_template import prompt_ids
from grpo_ext.data.config import is_generated
from grpo_ext.data.files import is_path
from grpo_ext.data.held_out import shared_prompts
from grpo_ext.data.images import image_columns
from grpo_ext.data.mixture import check_mixture, is_local
from grpo_ext.data.prepare import AnyDataset, Tokenizer
from grpo_ext.data.prompts import PromptLook, unseen_layout
from grpo_ext.data.rows import with_system_prompt
from grpo_ext.environments import compatibility
from grpo_ext.errors import ABSENT, ConfigError, DataError, Problem
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.recipe.loading import datasets_of, rows_of
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.policies import InspectedPolicy, inspect_policy
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.columns import absences, check_clash, unreadable

PROMPTS = 256
"""Number of prompts whose length is measured."""


@dataclass
class Look:
    """An inspection of a recipe's policy and data; call it with the recipe and its problems so far.

    Args:
        data: whether local data are loaded even if there is no other problem; a training run loads them anyway.
        policy: the policy that was found.
        train: the training data, unless they would have to be downloaded.
        notes: warnings.
        longest_prompt: tokens of the longest of the first prompts, where they can be counted.
    """

    data: bool = True
    policy: InspectedPolicy = field(default_factory=InspectedPolicy)
    train: AnyDataset | None = None
    notes: list[str] = field(default_factory=list)
    longest_prompt: int | None = None

    def __call__(self, recipe: Recipe, problems: Sequence[Problem]) -> Iterator[Problem]:
        """Yield problems of the policy and of the data; `recipe.training` may hold values that are refused already."""
        found: list[Problem] = []
        if all(problem.field != "model_name_or_path" for problem in problems):
            self.policy, found = inspect_policy(recipe.model, recipe.training)
            template = recipe.data.chat_template
            if self.policy.tokenizer is not None and template and not any(chat_template.template_problems(template)):
                self.policy.tokenizer.chat_template = chat_template.template_text(template)
        yield from found
        if (self.data or problems or found) and _is_local(recipe):
            yield from as_far_as_sound(self._data(recipe))
        elif recipe.data.chat_template:
            asked = [{"prompt": with_system_prompt("What is 2 + 3?", recipe.data.system_prompt)}]
            for problem in prompt_findings(recipe, self.policy.tokenizer, asked, "a question")[0]:
                yield replace(problem, field="chat_template")

    def _data(self, recipe: Recipe) -> Iterator[Problem]:
        tokenizer, evaluates = self.policy.tokenizer, recipe.training.eval_strategy
        try:
            self.train, test = datasets_of(recipe, tokenizer, evaluates=False if is_broken(evaluates) else None)
        except (ConfigError, DataError) as error:
            yield from error.problems
            return
        problems, self.notes = findings(recipe, self.train, tokenizer, self.policy.context, test)
        yield from problems
        lengths = [] if problems else _lengths(self.train, tokenizer, as_mapping(recipe.training.chat_template_kwargs))
        self.longest_prompt = max(lengths, default=None)
        for chosen in recipe.eval_sets:
            if chosen.dataset_name is None or is_generated(chosen.dataset_name) or is_path(chosen.dataset_name):
                try:
                    rows = rows_of(chosen, recipe, tokenizer)
                    found, notes = prompt_findings(recipe, tokenizer, rows, f"eval_sets: {chosen.name}", self.train)
                    self.notes += notes
                    yield from found
                except (ConfigError, DataError) as error:
                    yield from (replace(p, field=f"eval_sets: {chosen.name}: {p.field}") for p in error.problems)


def _is_local(recipe: Recipe) -> bool:
    """Return whether the data need no download, and their settings are sound enough to be loaded."""
    name = recipe.script.dataset_name
    if recipe.mixture.datasets:
        try:
            check_mixture(recipe.mixture)
        except DataError:
            return not name
        return not name and is_local(recipe.mixture)
    return isinstance(name, str) and bool(name) and (is_generated(name) or is_path(name))


def findings(
    recipe: Recipe, train: AnyDataset, tokenizer: Tokenizer, context: int | None = None, test: AnyDataset | None = None
) -> tuple[list[Problem], list[str]]:
    """Return what is wrong with loaded data for a recipe and its policy, and warnings."""
    problems: list[Problem] = []
    notes: list[str] = []
    training, environments = recipe.training, recipe.environments
    if isinstance(train, Dataset):
        options = as_mapping(training.chat_template_kwargs)
        problems += as_far_as_sound(too_few(training, len(train)))
        problems += _template_problems(train, tokenizer, options)
        problems += compatibility.policy_problems(environments, tokenizer, options)
        for rows, name, trained in ((train, "the training data", None), (test, "the evaluation data", train)):
            found, warnings = prompt_findings(recipe, tokenizer, rows, name, trained)
            problems, notes = problems + found, notes + warnings
        if "chat_template_kwargs" in train.column_names:
            cure = "Set chat_template_kwargs in the recipe, for all rows."
            notes.append(str(Problem("column 'chat_template_kwargs'", ABSENT, "GRPO in TRL does not read it", cure)))
        if not problems and context is not None and training.max_completion_length:
            lengths = _lengths(train, tokenizer, options)
            notes += map(str, _too_long(lengths, training.max_completion_length, context))
    problems += as_far_as_sound(ahead_problems(training, train))
    problems += as_far_as_sound(image_problems(training, train.column_names))
    problems += compatibility.dataset_problems(environments, train)
    if train.column_names is not None:  # None for some streams
        found, warnings = _reward_findings(recipe, train, tokenizer)
        return problems + found, notes + warnings
    return problems, notes


def _reward_findings(recipe: Recipe, train: AnyDataset, tokenizer: Tokenizer) -> tuple[list[Problem], list[str]]:
    """Return why no row can be scored, and warnings about rewards that cannot score some rows, or any."""
    problems, silent, notes = list[Problem](), list[Problem](), list[Problem]()
    columns = [*train.column_names, *([TRAJECTORY] if recipe.environments else [])]
    for spec in recipe.rewards:
        try:
            if not spec.is_model:
                check_clash(spec, dict.fromkeys(train.column_names))
        except ConfigError as error:
            problems += error.problems
        found = [(problem, True) for problem in absences([spec], columns)]
        found += unreadable([spec], train)
        found += unseen_layout(spec, train, tokenizer, as_mapping(recipe.training.chat_template_kwargs))
        notes += [problem for problem, _ in found]
        silent += [problem for problem, of_all in found if of_all and spec.weight][:1]
    if silent and len(silent) == sum(spec.weight != 0 for spec in recipe.rewards):
        return problems + silent, [str(note) for note in notes if note not in silent]
    return problems, [str(note) for note in notes]


def prompt_findings(
    recipe: Recipe, tokenizer: Tokenizer, rows: object, name: str, train: AnyDataset | None = None
) -> tuple[list[Problem], list[str]]:
    """Return why the policy cannot read the first prompts of some data as they are meant, and warnings.

    A prompt that is in `train` too is one of them; with environments a prompt is not a task.
    """
    played = bool(recipe.environments)
    shared = [] if played else shared_prompts(train, rows, name)
    if tokenizer is None or not isinstance(rows, Dataset | list):
        return [], shared
    look = PromptLook(tokenizer, as_mapping(recipe.training.chat_template_kwargs), played)
    problems, notes = look(rows, name)
    return problems, [*map(str, notes), *shared]


def _template_problems(train: Dataset, tokenizer: Tokenizer, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield why conversations cannot be rendered with these options."""
    if tokenizer is None or image_columns(train) or isinstance(train[0]["prompt"], str):
        return
    if tokenizer.chat_template is None:
        cure = "Name an instruction-tuned model, or leave out system_prompt and call the column of texts prompt."
        reason = "its tokenizer has no chat template, and the prompts are conversations"
        yield Problem("model_name_or_path", ABSENT, reason, cure)
    elif isinstance(tokenizer.chat_template, str):
        yield from _unknown_options(tokenizer.chat_template, options)


_STANDARD_VARIABLES = {"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}


def _unknown_options(template: str, options: Mapping[str, object]) -> Iterator[Problem]:
    try:
        known = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:  # tags that only transformers knows
        return
    for key, value in options.items():
        if key not in known and key not in ("continue_final_message", "documents", "tools"):
            others = sorted(known - _STANDARD_VARIABLES)
            cure = did_you_mean(key, others) if others else "It has none: remove it."
            yield Problem(f"chat_template_kwargs.{key}", value, "the chat template has no such option", cure)


def _lengths(train: AnyDataset, tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    """Return the numbers of tokens of the first prompts, where they can be counted."""
    if tokenizer is None or not isinstance(train, Dataset) or image_columns(train):
        return []
    prompts = train.select_columns(["prompt"])[:PROMPTS]["prompt"]
    return [len(prompt_ids(prompt, tokenizer, options)) for prompt in prompts]


def _too_long(lengths: Sequence[int], max_completion_length: int, context: int) -> Iterator[Problem]:
    """Yield the longest of the first prompts if it and a completion exceed the model's positions."""
    longest = max(lengths, default=0)
    if longest + max_completion_length > context:
        reason = (
            f"the prompt of row {lengths.index(longest)} (from 0) has {longest} tokens, and the model {context} "
            "positions for prompt and completion"
        )
        cure = f"Set max_prompt_length: {max(1, context - max_completion_length)}, or a shorter max_completion_length."
        yield Problem("max_completion_length", max_completion_length, reason, cure)
