"""`grpo-ext replay`: compute a recorded step again, with its own loss or another, token by token."""

import argparse
import dataclasses
import io
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_type_hints

from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl import DatasetMixtureConfig, ModelConfig

from grpo_ext.commands.runs import find_trained, loading
from grpo_ext.config.adapters import base_of
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.spec import holds
from grpo_ext.data.config import DataConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.files import parse_value
from grpo_ext.recipe.loading import load_tokenizer_of
from grpo_ext.recipe.parts import Recipe, RecipeArguments
from grpo_ext.registry import did_you_mean
from grpo_ext.tables import Table, show
from grpo_ext.train import adapted_policy
from grpo_ext.trainer.checkpoints.finish import holds_weights
from grpo_ext.trainer.one_step import Computed, OneStep, Token, config_of
from grpo_ext.trainer.recording import FOLDER, Content, ranks_in, read, steps_in, texts, whole

_SHOWN = 10
"""Number of tokens that the terminal shows."""
SAME = 1e-4
"""Relative difference between losses that another machine may cause."""


def run(options: argparse.Namespace) -> int:
    """Compute the step, and show and write the results."""
    output, folder = options.output, _step_folder(options.dump)
    if output is not None and output.suffix != ".json":
        raise ConfigError([Problem("--output", str(output), "unknown format", "Let it end in .json.")])
    contents = [read(folder)] if folder.is_file() else whole(folder)
    changes = changes_in(options.keys)
    model = options.model or recorded_weights(folder, contents[0])
    consent = {"trust_remote_code": True} if changes.pop("trust_remote_code", False) else {}
    settings: dict[str, Mapping[str, Any]] = {"recorded loss": consent}
    settings |= {"changed": changes | consent} if changes else {}
    computed = {name: compute(contents, model, own) for name, own in settings.items()}
    logged = recorded(contents)
    _show(contents, model, logged, computed)
    if output is not None:
        _write(output, contents[0], logged, computed)
        print(f"{output}: figures and tokens.")
    return 0


# Inputs.


def _step_folder(dump: Path) -> Path:
    """Return the folder of one step, or the file of one process, that `dump` is or holds."""
    if dump.is_file() or (dump.is_dir() and ranks_in(dump)):
        return dump
    if not dump.exists():
        raise ConfigError([Problem(str(dump), ABSENT, "no such folder", "Correct the path.")])
    held = steps_in(dump) or steps_in(dump / FOLDER) or steps_in(dump / "failures")
    if len(held) == 1:
        return next(iter(held.values()))
    if held:
        some = ", ".join(map(str, list(held)[:20])) + (", ..." if len(held) > 20 else "")
        cure = f"Name one: {next(reversed(held.values()))}."
        raise ConfigError([Problem(str(dump), ABSENT, f"the folder holds the steps {some}", cure)])
    cure = f"Train with record_batches: 1, and name a step's folder, such as RUN/{FOLDER}/step_1."
    raise ConfigError([Problem(str(dump), ABSENT, "the folder holds no recorded batch", cure)])


def changes_in(keys: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `GRPOExtConfig` that `--key value ...` sets; a key without a value is true.

    Raises:
        ConfigError: an unknown field, or a value without a key.
    """
    names, hints = [f.name for f in dataclasses.fields(GRPOExtConfig) if f.init], get_type_hints(GRPOExtConfig)
    words = [part for word in keys for part in (word.split("=", 1) if word.startswith("--") else [word])]
    changes: dict[str, Any] = {}
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("--") and word[2:] not in names:
            raise ConfigError([Problem(word, ABSENT, "no setting has this name", did_you_mean(word[2:], names))])
        if word.startswith("--"):
            changes[word[2:]] = True
        elif before.startswith("--"):
            is_text = holds(str, hints[before[2:]])  # where `none` is a name
            changes[before[2:]] = None if word.lower() == "none" and not is_text else parse_value(word)
        else:
            raise ConfigError([Problem(word, ABSENT, "a value without a key", "Give settings as --key value.")])
    return changes


def recorded_weights(folder: Path, content: Content) -> str:
    """Return the model, or the checkpoint beside the recording, at the beginning of a step.

    Raises:
        ConfigError: it was not kept.
    """
    before, run_folder = content["step"] - 1, folder.resolve().parents[2 if folder.is_file() else 1]
    checkpoint = run_folder / f"checkpoint-{before}"
    if holds_weights(checkpoint):
        return str(checkpoint)
    if before == 0 and content["model"] and not content["adapter"]:
        return str(content["model"])
    initial = "the adapter at its initialization" if content["adapter"] else "a model passed in memory"
    reason = f"{checkpoint} holds no weights" if before else f"{initial} is not on the disk"
    cure = (
        "Name other weights by --model; or save at least as often as batches are recorded (save_steps: 10, "
        "record_batches: 10)."
    )
    problem = Problem(str(folder), ABSENT, f"the weights before step {content['step']} were not kept ({reason})", cure)
    raise ConfigError([problem])


# Computation.


def compute(contents: Sequence[Content], model: str, changes: Mapping[str, Any]) -> Computed:
    """Compute the step under the recorded settings with `changes`.

    Raises:
        ConfigError: the model cannot be loaded or has another tokenizer; the loss needs data that was not recorded.
    """
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # hides the trainer's output
        args = config_of(contents, changes, folder)
        policy, tokenizer = _loaded(contents, model, args)
        rows = Dataset.from_list([{"prompt": "-"}] * int(args.generation_batch_size or 1))
        with loading(model, only_code=True):
            step = OneStep(policy, [_unscored], args, rows, processing_class=tokenizer)
        return step.compute(contents)


def _unscored(completions: list[object], **_: object) -> list[float | None]:
    return [None] * len(completions)


def _loaded(
    contents: Sequence[Content], model: str, args: GRPOExtConfig
) -> tuple[PeftModel | str, PreTrainedTokenizerBase]:
    """Return the policy (an adapter on its base, else the path) and its tokenizer."""
    path = find_trained(model).model
    with loading(path):
        tokenizer = load_tokenizer_of(path, trust_remote_code=args.trust_remote_code)
        _check_tokenizer(contents, tokenizer, model)
        base = base_of(path)
        if base is None:
            return path, tokenizer
        parts = (RecipeArguments(dataset_name="-"), DataConfig(), args)
        recipe = Recipe(*parts, ModelConfig(model_name_or_path=path), DatasetMixtureConfig())
        policy = adapted_policy(recipe, base, tokenizer)
        args.model_init_kwargs = None  # used above; TRL would warn that it ignores them
        return policy, tokenizer


def _check_tokenizer(contents: Sequence[Content], tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    for content in contents:
        there, here = content.get("tokens", {}), texts(tokenizer, content.get("micro_batches", []))
        differing = next((i for i in there if there[i] != here.get(i)), None)
        if differing is not None:
            reason = f"its token {differing} is {here.get(differing)!r}, and the recorded one {there[differing]!r}"
            cure = f"Name a model with the tokenizer of {content['model'] or 'the run'}."
            raise ConfigError([Problem("--model", model, reason, cure)])


def recorded(contents: Sequence[Content]) -> dict[str, float]:
    """Return loss and gradient norm of the step in the run."""
    losses = [sum(batch["loss"].item() for batch in content.get("micro_batches", [])) for content in contents]
    logged = {"loss": sum(losses) / contents[0]["processes"]}
    return logged | ({"grad_norm": contents[0]["grad_norm"]} if "grad_norm" in contents[0] else {})


# Output.


def _show(
    contents: Sequence[Content], model: str, logged: Mapping[str, float], computed: Mapping[str, Computed]
) -> None:
    """Print the figures side by side, and the tokens with the largest terms."""
    first = contents[0]
    origin = f"step {first['step']}, recorded by {first['processes']} process(es) with grpo-ext {first['grpo_ext']}"
    show(f"{origin}; weights: {model}")
    for name, one in computed.items():
        show(f"{name}: {one.objective}")
    table = Table("figure", "in the run", *computed, box=None)
    figures = {name: {"loss": one.loss, "grad_norm": one.grad_norm} | one.figures for name, one in computed.items()}
    for figure in dict.fromkeys(figure for each in figures.values() for figure in each):
        table.add_row(figure, _short(logged.get(figure)), *(_short(each.get(figure)) for each in figures.values()))
    for block in dict.fromkeys(block for one in computed.values() for block in one.blocks):
        norms = (_short(one.blocks.get(block)) for one in computed.values())
        table.add_row(f"grad_norm of {block}", "", *norms)
    show(table)
    show(_verdict(logged["loss"], computed["recorded loss"].loss))
    name, last = list(computed.items())[-1]
    terms = Table("row", "token", "text", "advantage", "ratio", "entropy", "term", box=None)
    for token in _largest(last.tokens)[:_SHOWN]:
        numbers = (token.advantage, token.ratio, token.entropy, token.term)
        text = repr(first["tokens"].get(str(token.id), "?"))
        terms.add_row(str(token.row), str(token.place), text, *map(_short, numbers))
    show(f"The largest terms of {len(last.tokens):,} tokens ({name}):", terms)


def _largest(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens by the size of their term; non-finite terms come first."""
    return sorted(tokens, key=lambda token: -abs(token.term) if math.isfinite(token.term) else -math.inf)


def _verdict(there: float, here: float) -> str:
    difference = abs(there - here) / max(abs(there), abs(here), 1e-12)
    if difference <= SAME or (math.isnan(there) and math.isnan(here)):
        return f"The loss is that of the run (relative difference {difference:.0e})."
    cause = "other weights, another version or another precision"
    return f"The loss is NOT that of the run (relative difference {difference:.0e}): {cause}."


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _write(output: Path, first: Content, logged: Mapping[str, float], computed: Mapping[str, Computed]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    results = {name: dataclasses.asdict(one) for name, one in computed.items()}
    content = {"step": first["step"], "texts": first["tokens"], "in the run": logged, **results}
    output.write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")


def _finite(value: object) -> object:
    """Return `value` with None for NaN and inf, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
