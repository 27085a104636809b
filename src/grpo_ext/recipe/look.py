"""A look at what a recipe names, policy and data, before anything is trained: what training would meet is told now."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from jinja2 import Environment, TemplateError, meta

from grpo_ext.config.batches import too_few
from grpo_ext.config.mappings import as_mapping
from grpo_ext.data import chat_template
from grpo_ext.data.config import PROCEDURAL, QUICKSTART
from grpo_ext.data.files import is_path
from grpo_ext.data.held_out import shared_prompts
from grpo_ext.data.mixture import check_mixture, is_local
from grpo_ext.environments import fit
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.recipe.loading import datasets_of, rows_of
from grpo_ext.recipe.policies import Policy, look_at
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.columns import absences, check_clash
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.references import unreadable

PROMPTS = 256
"""Most prompts whose length is looked at."""


@dataclass
class Look:
    """What was seen of a recipe's policy and data; called with its parts and what is wrong with it so far."""

    data: bool = True
    """Whether local data are loaded also where nothing else is wrong; training is about to load them anyway."""
    policy: Policy = field(default_factory=Policy)
    train: Any = None
    """Training data, where nothing had to be downloaded."""
    notes: list[str] = field(default_factory=list)
    """What is no fault, but should be known."""

    def __call__(self, parts: Any, rewards: list[RewardSpec], told: list[str]) -> Iterator[str]:
        """Problems of the policy and of the data; `parts` has script, data, training, model and lists."""
        found: list[str] = []
        if (
            parts.model is not None
            and parts.training is not None
            and not any(problem.startswith("model_name_or_path") for problem in told)
        ):
            self.policy, found = look_at(parts.model, parts.training)
            self._take_template(parts.data)
        yield from found
        if (self.data or told or found) and _loads_here(parts):
            yield from self._data(parts, rewards)

    def _take_template(self, data: Any) -> None:
        """The recipe's chat template, unless it is told already that it does not render."""
        given = None if data is None else data.chat_template
        if self.policy.tokenizer is not None and given and not any(chat_template.problems(given)):
            self.policy.tokenizer.chat_template = chat_template.template_text(given)

    def _data(self, parts: Any, rewards: list[RewardSpec]) -> Iterator[str]:
        try:
            self.train, test = datasets_of(parts, self.policy.tokenizer)
        except (ConfigError, DataError) as error:
            yield from map(str, error.problems)
            return
        problems, self.notes = findings(parts, rewards, self.train, self.policy.tokenizer, self.policy.context, test)
        yield from problems
        for chosen in parts.eval_sets:
            if chosen.dataset_name is None or is_path(chosen.dataset_name):
                try:
                    rows = rows_of(chosen, parts, self.policy.tokenizer)
                    self.notes += trained_on(parts, self.train, rows, f"eval_sets: {chosen.name}")
                except (ConfigError, DataError) as error:
                    yield from (f"eval_sets: {chosen.name}: {problem}" for problem in error.problems)


def _loads_here(parts: Any) -> bool:
    """Whether the data need no download, and their settings are sound enough to be loaded."""
    if None in (parts.script, parts.data, parts.mixture, parts.training):
        return False
    name = parts.script.dataset_name
    if parts.mixture.datasets:
        try:
            check_mixture(parts.mixture)
        except DataError:
            return not name
        return not name and is_local(parts.mixture)
    return isinstance(name, str) and bool(name) and (name.startswith((PROCEDURAL, QUICKSTART)) or is_path(name))


def findings(
    parts: Any, rewards: list[RewardSpec], train: Any, tokenizer: Any, context: int | None, test: Any = None
) -> tuple[list[str], list[str]]:
    """Return what is wrong with loaded data for these rewards and this policy, and what is to be known of them."""
    problems: list[str] = []
    notes: list[str] = []
    if isinstance(train, Dataset):
        problems += map(str, too_few(parts.training, len(train)))
        problems += _template_problems(train[0]["prompt"], tokenizer, parts.training.chat_template_kwargs)
        problems += fit.policy_problems(parts.environments, tokenizer, as_mapping(parts.training.chat_template_kwargs))
        notes += [] if problems else _too_long(train, tokenizer, parts.training, context)
        notes += trained_on(parts, train, test)
    problems += fit.data_problems(parts.environments, train)
    if train.column_names is None:  # a stream may not say
        return problems, notes
    silent = []
    for spec in rewards:
        try:
            if not spec.is_model:
                check_clash(spec, dict.fromkeys(train.column_names))
        except ValueError as error:
            problems.append(str(error))
        sentences = [(str(absence), True) for absence in absences([spec], train.column_names)]
        sentences += [(str(problem), of_all) for problem, of_all in unreadable([spec], train)]
        notes += [sentence for sentence, _ in sentences]
        silent += [sentence for sentence, of_all in sentences if of_all and spec.weight][:1]
    if silent and len(silent) == sum(spec.weight != 0 for spec in rewards):
        problems += silent
        notes = [note for note in notes if note not in silent]
    return problems, notes


def trained_on(parts: Any, train: Any, rows: Any, name: str = "the evaluation data") -> list[str]:
    """Count evaluation rows whose prompt is trained on; with environments a prompt does not say what the task is."""
    return [] if parts.environments else shared_prompts(train, rows, name)


def _template_problems(prompt: Any, tokenizer: Any, options: Any) -> Iterator[str]:
    """Whether the chat template takes conversations, these and with these options."""
    if tokenizer is None or not isinstance(prompt, list):
        return
    template = tokenizer.chat_template
    if template is None:
        yield (
            "model_name_or_path: its tokenizer has no chat template, and the prompts are conversations. Name an "
            "instruction-tuned model, or leave out system_prompt and call the column of texts prompt."
        )
        return
    given = dict(as_mapping(options))
    if isinstance(template, str):
        yield from _template_options(template, given)
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    try:
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **given)
    except Exception as error:  # a template may raise anything of its own, such as that it knows no system message
        yield (
            f"the chat template fails on the first prompt, of {' and '.join(m['role'] for m in messages)} messages "
            f"({error}). Leave out system_prompt, or name a model whose template takes them."
        )


_OF_EVERY_TEMPLATE = {"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}


def _template_options(template: str, given: dict[str, Any]) -> Iterator[str]:
    try:
        known = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:  # tags that only transformers knows
        return
    for key, value in given.items():
        if key not in known and key not in ("continue_final_message", "documents", "tools"):
            options = sorted(known - _OF_EVERY_TEMPLATE)
            cure = did_you_mean(key, options) if options else "It has none: remove it."
            yield f"chat_template_kwargs.{key}={value!r}: the chat template has no such option. {cure}"


def _too_long(train: Dataset, tokenizer: Any, training: Any, context: int | None) -> Iterator[str]:
    """Whether prompt and completion go beyond the model's positions, by the first prompts."""
    if tokenizer is None or context is None or not training.max_completion_length:
        return
    prompts = [
        tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) if isinstance(p, list) else p
        for p in train[:PROMPTS]["prompt"]
    ]
    lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    longest = max(lengths)
    if longest + training.max_completion_length > context:
        yield (
            f"the prompt of row {lengths.index(longest)} (from 0) has {longest} tokens, with max_completion_length="
            f"{training.max_completion_length} more than the model's {context} positions. Set max_prompt_length: "
            f"{max(1, context - training.max_completion_length)}, or a shorter max_completion_length."
        )


def no_look(*_: Any) -> Iterator[str]:
    """What a recipe names is not looked at."""
    yield from ()


def stand_in(given: dict[str, Any]) -> SimpleNamespace | None:
    """The training settings that a look reads, where there is no sound config of them; None where there are none."""
    if not given:
        return None
    longest = given.get("max_completion_length")
    settings = {
        "trust_remote_code": given.get("trust_remote_code") is True,
        "eval_strategy": "no" if given.get("eval_strategy") in (None, False) else given["eval_strategy"],
        "chat_template_kwargs": as_mapping(given.get("chat_template_kwargs")),
        "model_init_kwargs": as_mapping(given.get("model_init_kwargs")),
        "max_completion_length": longest if isinstance(longest, int) else 0,
        "router_aux_loss_coef": None,
        "generation_batch_size": None,
        "use_vllm": False,
        "num_generations": None,
    }
    return SimpleNamespace(**(given | settings))
