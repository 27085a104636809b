"""Check environments against settings, data and the policy's chat template."""

import copy
import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import in_parts
from grpo_ext.config.setting import ENVIRONMENTS
from grpo_ext.config.settings import row_of
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.hosts import most_episodes
from grpo_ext.environments.protocol import ENVIRONMENT_COLUMN, PARTS_CURE, RESET, has_tools, medium
from grpo_ext.environments.rendering import CannotRender, Renderer
from grpo_ext.environments.tools import schemas
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.registry import did_you_mean

_FEWEST = 8
"""Episodes at once, below which a run is refused: each takes descriptors."""


def setting_problems(specs: Sequence[EnvironmentSpec], config: GRPOExtConfig) -> Iterator[Problem]:
    """Yield settings that have no effect with, or without, environments, or that they cannot follow."""
    if specs and (limit := getattr(config, "max_tool_calling_iterations", None)) is not None:
        cure = "Set max_turns in its entry, which counts the model's messages."
        yield Problem("max_tool_calling_iterations", limit, "each environment has its own limit", cure)
    if specs and (room := most_episodes(raised=False)) < _FEWEST:
        cure = "Raise the hard limit of descriptors: `ulimit -Hn 4096`, LimitNOFILE of systemd, --ulimit of docker."
        yield Problem("environments", ABSENT, f"the descriptors (ulimit -n) suffice for {room} episodes at once", cure)
    for f in dataclasses.fields(config) if not specs else ():
        if row_of(f).needs == ENVIRONMENTS and (value := getattr(config, f.name)) != f.default:
            yield Problem(f.name, value, "it concerns environments, and there are none", "Remove it, or list some.")


def beside_problems(specs: Sequence[EnvironmentSpec], arguments: Mapping[str, object]) -> Iterator[Problem]:
    """Yield arguments of TRL's trainer that make rollouts, as environments do."""
    for name in ("rollout_func", "environment_factory", "tools"):
        if specs and arguments.get(name):
            names = [spec.name for spec in specs]
            yield Problem(name, ABSENT, "both would make the rollouts", "Remove one of them.", {"environments": names})


def dataset_problems(specs: Sequence[EnvironmentSpec], dataset: Dataset | IterableDataset | Any) -> Iterator[Problem]:
    """Yield columns that environments need and the data lack, or that they cannot take."""
    columns = getattr(dataset, "column_names", None)
    if not specs or not columns:
        return
    if TRAJECTORY in columns:
        reason = "environments write trajectories under this name"
        yield Problem(f"column {TRAJECTORY!r}", ABSENT, reason, "Rename the column.")
    if len(specs) > 1:
        yield from _mixture_problems(specs, dataset, columns)
    row_columns = [column for column in columns if len(specs) == 1 or column != ENVIRONMENT_COLUMN]
    for spec in specs:
        yield from _reset_problems(spec, row_columns)
    yield from _prompt_problems(dataset)


def _prompt_problems(dataset: object) -> Iterator[Problem]:
    """Yield the problem of a first prompt that is text, or has other parts than text and images."""
    if not (isinstance(dataset, Dataset) and len(dataset) and "prompt" in dataset.column_names):
        return
    prompt = dataset.select_columns(["prompt"])[0]["prompt"]
    if isinstance(prompt, str):
        cure = "Set system_prompt, or write them as [{role: user, content: ...}]."
        yield Problem("prompt", f"{prompt:.60}", "the prompts are text, and an environment reads messages", cure)
        return
    kinds = [medium(message.get("content")) for message in prompt] if isinstance(prompt, list) else []
    if kind := next(filter(None, kinds), None):
        reason = f"the first has content of type {kind!r}, and environments carry text and images"
        yield Problem("prompt", ABSENT, reason, PARTS_CURE)


def _mixture_problems(
    specs: Sequence[EnvironmentSpec], dataset: object, columns: Collection[str]
) -> Iterator[Problem]:  # fmt: skip
    names = [spec.name for spec in specs]
    place = f"column {ENVIRONMENT_COLUMN!r}"
    if ENVIRONMENT_COLUMN not in columns:
        reason = f"missing, so no row has one of the {len(specs)} environments"
        yield Problem(place, ABSENT, reason, f"Add it, with {' or '.join(map(repr, names))}.")
    elif isinstance(dataset, Dataset):
        for value in dict.fromkeys(dataset[ENVIRONMENT_COLUMN]):
            if value not in names:
                yield Problem(place, value, "not an entry of environments", did_you_mean(str(value), names))


def _reset_problems(spec: EnvironmentSpec, columns: Collection[str]) -> Iterator[Problem]:
    """Yield columns that an environment needs, or that its reset does not take."""
    place, target = f"environment {spec.name!r}", spec.target
    if target is None or not has_tools(target):
        needed, taken = getattr(target, "needs", ()), None
    else:  # a class of TRL's protocol gets every column by its name
        parameters = [*inspect.signature(getattr(target, RESET)).parameters.values()][1:]
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        needed = [p.name for p in named if p.default is p.empty]
        taken = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else [p.name for p in parameters]
    for name in needed:
        if name not in columns:
            reason = f"it needs {name!r}, and the data have no such column"
            yield Problem(place, ABSENT, reason, did_you_mean(name, columns))
    if taken is not None and (more := [column for column in columns if column not in taken]):
        reason = f"its reset does not take {', '.join(more)}, but gets every column of the data"
        yield Problem(place, ABSENT, reason, "Add **row to its signature.")


def policy_problems(
    specs: Sequence[EnvironmentSpec], tokenizer: PreTrainedTokenizerBase | None, options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield environments whose messages or tools the policy's chat template cannot render."""
    if tokenizer is None or not specs or tokenizer.chat_template is None:
        return
    from trl.chat_template_utils import supports_tool_calling

    name = tokenizer.name_or_path or "the tokenizer"
    calling = [f"environment {spec.name!r}" for spec in specs if spec.uses_tools]
    if calling and not supports_tool_calling(tokenizer):
        cure = "Name a model whose template does, or derive the environment from Conversation."
        reason = f"it has tools, and the chat template of {name} does not render calls of tools"
        yield Problem(calling[0], ABSENT, reason, cure)
    elif calling:
        try:
            reader_of(tokenizer)
        except ValueError:
            reason = f"it has tools, and TRL does not know how the chat template of {name} writes a call of one"
            cure = "Give the tokenizer a response_template, or name another model."
            yield Problem(calling[0], ABSENT, reason, cure)
    messages = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    for spec in specs:
        if spec.uses_tools:
            continue
        failures = []
        for form in (messages, [*map(in_parts, messages)]):  # which processors get
            try:
                Renderer(tokenizer, options).opening(form, schemas(spec.target, spec.functions))
            except CannotRender as error:
                failures.append(str(error))
        if len(failures) == 2:
            yield Problem(f"environment {spec.name!r}", ABSENT, failures[0], "Name a model whose template does.")


def reader_of(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that reads calls of tools in samples.

    Raises:
        ValueError: TRL does not know how its chat template writes them.
    """
    from trl.chat_template_utils import add_response_schema

    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return tokenizer
    return add_response_schema(copy.deepcopy(tokenizer))


def unpaid_problems(specs: Sequence[EnvironmentSpec], rewards: Collection[object]) -> Iterator[Problem]:
    """Yield the problem of a run without any reward."""
    if specs and not rewards and not any(spec.owns_reward and spec.weight for spec in specs):
        names = [spec.name for spec in specs]
        yield Problem("environments", names, "no reward of their own", "Set reward_funcs, or write get_reward.")
