"""Check a run's data against its settings, rewards, environments and tokenizer, before a model is loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from jinja2 import Environment, TemplateError, meta

from grpo_ext.config.added_losses import added_loss_problems, added_losses, column_problems
from grpo_ext.config.ahead import ahead_problems
from grpo_ext.config.batches import too_few
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import image_problems
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import as_far_as_sound
from grpo_ext.data.chat_template import prompt_ids
from grpo_ext.data.held_out import shared_prompts
from grpo_ext.data.images import image_columns
from grpo_ext.data.prepare import Tokenizer
from grpo_ext.data.prompts import PromptCheck, unseen_layout
from grpo_ext.data.python_data import Data
from grpo_ext.environments import compatibility
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.columns import absences, check_clash, unreadable
from grpo_ext.rewards.composition import RewardSpec

PROMPTS = 256
"""Number of prompts whose length is measured."""


@dataclass(frozen=True)
class Run:
    """The data of a run, and what is made of them.

    Args:
        args: settings; values that are refused already may be replaced (`config.rules`).
        data: with prepared rows.
        rewards: those that are named, as in a recipe.
        functions: those that are given as functions, which TRL calls as they are.
        environments: in which completions are made.
        tokenizer: of the policy, if it is known.
        context: tokens that prompt and completion may have together, if that is known.
        extended: whether TRL's `rollout_func`, `environment_factory` or `tools` make the rollouts, which may render
            prompts in their own way and add columns.
    """

    args: GRPOExtConfig
    data: Data
    rewards: Sequence[RewardSpec] = ()
    functions: Sequence[RewardSpec] = ()
    environments: Sequence[EnvironmentSpec] = ()
    tokenizer: Tokenizer = None
    context: int | None = None
    extended: bool = False

    @property
    def options(self) -> Mapping[str, Any]:
        """`chat_template_kwargs`."""
        return as_mapping(self.args.chat_template_kwargs)

    @property
    def played(self) -> bool:
        """Whether anything but the policy adds to a conversation."""
        return bool(self.environments) or self.extended


def data_problems(run: Run) -> tuple[list[Problem], list[str]]:
    """Return what is wrong with the data for this run, and warnings."""
    args, train, problems, notes = run.args, run.data.train, list[Problem](), list[str]()
    if isinstance(train, Dataset):
        problems += as_far_as_sound(too_few(args, len(train)))
        problems += _template_problems(run)
        problems += compatibility.policy_problems(run.environments, run.tokenizer, run.options)
        if "chat_template_kwargs" in train.column_names:
            cure = "Set chat_template_kwargs in the recipe, for all rows."
            notes.append(str(Problem("column 'chat_template_kwargs'", ABSENT, "GRPO in TRL does not read it", cure)))
    for name, rows in run.data.named.items():
        row_problems, warnings = _prompt_problems(run, rows, name)
        problems, notes = problems + row_problems, notes + warnings
    problems += as_far_as_sound(ahead_problems(args, train))
    every = [as_far_as_sound(image_problems(args, image_columns(rows))) for rows in run.data.named.values()]
    every += [compatibility.dataset_problems(run.environments, rows) for rows in run.data.named.values()]
    problems += dict.fromkeys(problem for row_problems in every for problem in row_problems)
    problems += as_far_as_sound(_added_loss_problems(run))
    if getattr(train, "column_names", None):  # None for some streams
        row_problems, warnings = _reward_problems(run)
        problems, notes = problems + row_problems, notes + warnings
    if not problems and run.context is not None and args.max_completion_length:
        notes += map(str, _too_long(prompt_lengths(run), args.max_completion_length, run.context))
    return problems, notes


def _prompt_problems(run: Run, rows: object, name: str) -> tuple[list[Problem], list[str]]:
    """Return why the policy cannot read the first prompts of some data as they are meant, and warnings.

    A prompt of an evaluation that is trained on is one of them; with environments a prompt is not a task.
    """
    if not (isinstance(rows, list) or (isinstance(rows, Dataset) and "prompt" in rows.column_names)):
        return [], []
    shared = [] if run.played or rows is run.data.train else shared_prompts(run.data.train, rows, name)
    if run.tokenizer is None:
        return [], shared
    problems, notes = PromptCheck(run.tokenizer, run.options, run.played)(rows, name)
    return problems, [*map(str, notes), *shared]


def _added_loss_problems(run: Run) -> Iterator[Problem]:
    """Yield why losses beside the policy's cannot be computed on the data."""
    losses, known = added_losses(run.args), getattr(run.data.train, "column_names", None)
    yield from added_loss_problems(losses, plain=not (image_columns(run.data.named) or run.played))
    yield from column_problems(losses, known) if known else ()


def _reward_problems(run: Run) -> tuple[list[Problem], list[str]]:
    """Return why no row can be scored, and warnings about rewards that cannot score some rows, or any."""
    problems, scoreless, notes = list[Problem](), list[Problem](), list[Problem]()
    train, columns = run.data.train, dict.fromkeys(run.data.train.column_names)
    for spec in run.rewards:
        try:
            if not spec.is_model:
                check_clash(spec, columns)
        except ConfigError as error:
            problems += error.problems
        gaps = [(problem, True) for problem in absences([spec], [*columns, *([TRAJECTORY] if run.played else [])])]
        gaps += unreadable([spec], train)
        gaps += unseen_layout(spec, train, run.tokenizer, run.options)
        notes += [problem for problem, _ in gaps]
        scoreless += [problem for problem, of_all in gaps if of_all and spec.weight][:1]
    for spec in run.functions:
        notes += [problem for problem, _ in unseen_layout(spec, train, run.tokenizer, run.options)]
    weighted = sum(spec.weight != 0 for spec in (*run.rewards, *run.functions))
    if scoreless and len(scoreless) == weighted and not run.extended:
        return problems + scoreless, [str(note) for note in notes if note not in scoreless]
    return problems, [str(note) for note in notes]


_STANDARD_VARIABLES = {"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}


def _template_problems(run: Run) -> Iterator[Problem]:
    """Yield why conversations cannot be rendered with the options of the template."""
    train, tokenizer = run.data.train, run.tokenizer
    if run.extended or tokenizer is None or image_columns(train) or isinstance(train[0]["prompt"], str):
        return
    if tokenizer.chat_template is None:
        cure = "Name an instruction-tuned model, or leave out system_prompt and call the column of texts prompt."
        reason = "its tokenizer has no chat template, and the prompts are conversations"
        yield Problem("model_name_or_path", ABSENT, reason, cure)
    if not isinstance(tokenizer.chat_template, str):  # None, or several by name
        return
    try:
        template = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(tokenizer.chat_template)
        variables = meta.find_undeclared_variables(template)
    except TemplateError:  # tags that only transformers knows
        return
    for key, value in run.options.items():
        if key not in variables and key not in ("continue_final_message", "documents", "tools"):
            others = sorted(variables - _STANDARD_VARIABLES)
            cure = did_you_mean(key, others) if others else "It has none: remove it."
            yield Problem(f"chat_template_kwargs.{key}", value, "the chat template has no such option", cure)


def prompt_lengths(run: Run) -> list[int]:
    """Return the numbers of tokens of the first training prompts, where they can be counted."""
    if run.tokenizer is None or not isinstance(run.data.train, Dataset) or image_columns(run.data.train):
        return []
    prompts = run.data.train.select_columns(["prompt"])[:PROMPTS]["prompt"]
    return [len(prompt_ids(prompt, run.tokenizer, run.options)) for prompt in prompts]


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
