"""Check the policy and the data of a recipe before training, to report now what training would meet."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import as_far_as_sound, is_broken
from grpo_ext.data import chat_template
from grpo_ext.data.config import is_generated
from grpo_ext.data.files import is_path
from grpo_ext.data.mixture import check_mixture, is_local
from grpo_ext.data.prepare import AnyDataset
from grpo_ext.data.prompts import PromptCheck
from grpo_ext.data.python_data import Data
from grpo_ext.data.rows import with_system_prompt
from grpo_ext.errors import ConfigError, DataError, Problem
from grpo_ext.preflight import Run, data_problems, prompt_lengths
from grpo_ext.recipe.loading import datasets_of, rows_of
from grpo_ext.recipe.model_checks import InspectedPolicy, inspect_policy
from grpo_ext.recipe.parts import Recipe


@dataclass
class Preflight:
    """The checks of a recipe's policy and data; call it with the recipe and its problems so far.

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
        policy_problems: list[Problem] = []
        if all(problem.field != "model_name_or_path" for problem in problems):
            self.policy, policy_problems = inspect_policy(recipe.model, recipe.training)
            template = recipe.data.chat_template
            if self.policy.tokenizer is not None and template and not any(chat_template.template_problems(template)):
                self.policy.tokenizer.chat_template = chat_template.template_text(template)
        yield from policy_problems
        if (self.data or problems or policy_problems) and _is_local(recipe):
            yield from as_far_as_sound(self._data(recipe))
        elif recipe.data.chat_template and self.policy.tokenizer is not None:
            question = [{"prompt": with_system_prompt("What is 2 + 3?", recipe.data.system_prompt)}]
            options = as_mapping(recipe.training.chat_template_kwargs)
            check = PromptCheck(self.policy.tokenizer, options, bool(recipe.environments))
            yield from (replace(problem, field="chat_template") for problem in check(question, "a question")[0])

    def _data(self, recipe: Recipe) -> Iterator[Problem]:
        tokenizer, evaluates, sets = self.policy.tokenizer, recipe.training.eval_strategy, dict[str, Any]()
        try:
            self.train, test = datasets_of(recipe, tokenizer, evaluates=False if is_broken(evaluates) else None)
        except (ConfigError, DataError) as error:
            yield from error.problems
            return
        for chosen in recipe.eval_sets:
            name = f"eval_sets: {chosen.name}"
            if chosen.dataset_name is None or is_generated(chosen.dataset_name) or is_path(chosen.dataset_name):
                try:
                    sets[name] = rows_of(chosen, recipe, tokenizer)
                except (ConfigError, DataError) as error:
                    yield from (replace(p, field=f"{name}: {p.field}") for p in error.problems)
        data, context = data_of(self.train, test, sets), self.policy.context
        run = Run(recipe.training, data, recipe.rewards, (), recipe.environments, tokenizer, context)
        problems, self.notes = data_problems(run)
        yield from problems
        self.longest_prompt = max([] if problems else prompt_lengths(run), default=None)


def data_of(train: AnyDataset, test: AnyDataset | None, sets: Mapping[str, Any] = {}) -> Data:
    """Return the data of a recipe; `sets` are the rows of its evaluation sets."""
    tests = {} if test is None else {"the evaluation data": test}
    return Data(train, test, {"the training data": train, **tests, **sets})


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
