"""Whether environments fit the settings, the data and the policy's chat template; value, reason, cure."""

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset

from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.content import COLUMNS, CURE, medium
from grpo_ext.environments.protocol import COLUMN, RESET, is_conversation
from grpo_ext.environments.rendering import CannotRender, Renderer
from grpo_ext.environments.tools import schemas
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.registry import did_you_mean


def setting_problems(specs: Sequence[EnvironmentSpec], config: Any) -> Iterator[str]:
    """Settings of a training that environments give no meaning to."""
    if specs and getattr(config, "max_tool_calling_iterations", None) is not None:
        yield (
            f"max_tool_calling_iterations={config.max_tool_calling_iterations!r} with environments: each has its own. "
            "Set max_turns in its entry, which counts the model's messages."
        )

    for name, usual in (("completion_length_counts", "all"), ("environment_waves", "ready")):
        if not specs and (value := getattr(config, name, usual)) != usual:
            yield f"{name}={value!r}: it speaks of environments, and there are none. Remove it, or list some."


def beside_problems(specs: Sequence[EnvironmentSpec], given: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of TRL's trainer that make its rollouts, which environments take the place of."""
    for name in ("rollout_func", "environment_factory", "tools"):
        if specs and given.get(name):
            yield f"{name} beside environments: both would make the rollouts. Leave one of them out."


def data_problems(specs: Sequence[EnvironmentSpec], dataset: Any) -> Iterator[str]:
    """A dataset without what environments are reset with, or that does not say which environment a row is of."""
    columns = getattr(dataset, "column_names", None)
    if not specs or not columns:
        return
    if TRAJECTORY in columns:
        yield f"column {TRAJECTORY!r}: environments leave theirs under this name. Rename the column."
    if len(specs) > 1:
        yield from _mixture_problems(specs, dataset, columns)
    given = [column for column in columns if len(specs) == 1 or column != COLUMN]
    for spec in specs:
        yield from _reset_problems(spec, given)
    yield from _image_problems(dataset, columns)
    if isinstance(dataset, Dataset) and len(dataset) and isinstance(prompt := dataset[0].get("prompt"), str):
        yield (
            f"prompt={prompt!r:.60}: an environment speaks in messages, and the prompts are text. Set system_prompt, "
            "or write them as [{role: user, content: ...}]."
        )


def _image_problems(dataset: Any, columns: Collection[str]) -> Iterator[str]:
    """Images in a column, or in the first row's prompt."""
    for column in COLUMNS:
        if column in columns:
            yield f"column {column!r}: environments carry text only, and the model would not see images. {CURE}"
            return
    if "prompt" in columns and isinstance(dataset, Dataset) and len(dataset):
        prompt = dataset.select_columns(["prompt"])[0]["prompt"]
        kinds = [medium(message.get("content")) for message in prompt] if isinstance(prompt, list) else []
        if kind := next(filter(None, kinds), None):
            yield f"the first row's prompt has content of type {kind!r}, and environments carry text only. {CURE}"


def _mixture_problems(specs: Sequence[EnvironmentSpec], dataset: Any, columns: Collection[str]) -> Iterator[str]:
    names = [spec.name for spec in specs]
    if COLUMN not in columns:
        yield (
            f"environments: there are {len(specs)}, and the data have no column {COLUMN!r} to say which a row is of. "
            f"Add it, with {' or '.join(map(repr, names))}."
        )
    elif isinstance(dataset, Dataset):
        for value in dict.fromkeys(dataset[COLUMN]):
            if value not in names:
                hint = did_you_mean(str(value), names)
                yield f"column {COLUMN!r} has {value!r}, which is no entry of environments. {hint}"


def _reset_problems(spec: EnvironmentSpec, columns: Collection[str]) -> Iterator[str]:
    """Of TRL's classes, which get every column by its name."""
    if is_conversation(spec.target) or spec.target is None:
        for name in getattr(spec.target, "needs", ()):
            if name not in columns:
                yield f"environment {spec.name!r} needs column {name!r}. {did_you_mean(name, columns)}"
        return
    reset: Any = getattr(spec.target, RESET)
    parameters = [*inspect.signature(reset).parameters.values()][1:]
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        if p.default is p.empty and p.name not in columns:
            yield (
                f"environment {spec.name!r}: its reset needs {p.name!r}, which is no column of the data. "
                f"{did_you_mean(p.name, columns)}"
            )
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        if further := [column for column in columns if column not in names]:
            yield (
                f"environment {spec.name!r}: its reset takes no {', '.join(further)}, and is given every column of "
                "the data. Add **row to its signature."
            )


def policy_problems(specs: Sequence[EnvironmentSpec], tokenizer: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """A chat template that does not take what is said, or cannot be told of tools."""
    if tokenizer is None or not specs or tokenizer.chat_template is None:
        return
    from trl.chat_template_utils import supports_tool_calling

    name = tokenizer.name_or_path or "the tokenizer"
    calling = [spec.name for spec in specs if spec.uses_tools]
    if calling and not supports_tool_calling(tokenizer):
        yield (
            f"environment {calling[0]!r} has tools, and the chat template of {name} does not render calls of tools. "
            "Name a model whose template does, or derive the environment from Conversation."
        )
    elif calling:
        try:
            reader_of(tokenizer)
        except ValueError:
            yield (
                f"environment {calling[0]!r} has tools, and nobody knows how {name} writes a call of one: its chat "
                "template is none of those that TRL knows. Give its tokenizer a response_template, or name another."
            )
    for spec in specs:
        if spec.uses_tools:
            continue
        said = [("user", "1"), ("assistant", "2"), ("user", "3")]
        messages = [{"role": role, "content": content} for role, content in said]
        try:
            Renderer(tokenizer, options).opening(messages, schemas(spec.target, spec.functions))
        except CannotRender as error:
            yield f"environment {spec.name!r}: {error}. Name a model whose template does."


def reader_of(tokenizer: Any) -> Any:
    """A copy of a tokenizer that reads calls of tools out of what was sampled.

    Raises:
        ValueError: nobody knows how they are written.
    """
    from trl.chat_template_utils import add_response_schema

    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return tokenizer
    return add_response_schema(copy.deepcopy(tokenizer))


def reward_problems(specs: Sequence[EnvironmentSpec], rewards: Collection[Any]) -> Iterator[str]:
    """Environments that say nothing of rewards, and no rewards."""
    if specs and not rewards and not any(spec.owns_reward and spec.weight for spec in specs):
        names = ", ".join(spec.name for spec in specs)
        yield f"environments: {names} has no reward of its own. Set reward_funcs, or write get_reward."
