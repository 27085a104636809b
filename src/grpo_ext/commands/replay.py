"""`grpo-ext replay`: a recorded step computed again, under its own loss or any other, token by token."""

import argparse
import dataclasses
import io
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from grpo_ext.errors import ConfigError, DataError

PICTURES = (".svg", ".png", ".pdf")
SHOWN = 10
"""Tokens of the largest terms that the terminal shows."""
SAME = 1e-4
"""Relative difference of a loss that another machine may make."""


def run(argv: Sequence[str]) -> int:
    """Compute, and say what came of it; 2 when something is wrong."""
    parser = argparse.ArgumentParser(prog="grpo-ext replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("dump", type=Path, metavar="DUMP", help="a step's folder, in a run's batches/ or failures/")
    parser.add_argument("--model", metavar="RUN", help="weights; default: those that the step began with")
    parser.add_argument("--output", type=Path, help="what was computed as .json, or drawn as .svg, .png or .pdf")
    options, rest = parser.parse_known_args(argv)
    try:
        _replay(options, rest)
    except (ConfigError, DataError, OSError) as error:
        print(f"grpo-ext replay: {error}", file=sys.stderr)
        return 2
    return 0


def _replay(options: argparse.Namespace, argv: Sequence[str]) -> None:
    from grpo_ext.trainer.recording import read
    from grpo_ext.trainer.replaying import whole

    output = _checked(options.output)
    folder = _step_folder(options.dump)
    contents = [read(folder)] if folder.is_file() else whole(folder)
    changes = changes_in(argv)
    model = options.model or recorded_weights(folder, contents[0])
    settings: dict[str, dict[str, Any]] = {"recorded loss": {}} | ({"changed": changes} if changes else {})
    found = {name: computed(contents, model, own) for name, own in settings.items()}
    told = recorded(contents)
    show(contents, model, told, found)
    if output is not None:
        write(output, contents, told, found)
        print(f"{output}: {'the figures' if output.suffix == '.json' else 'gradient, ratios and terms'}.")


# What is asked for.


def _checked(output: Path | None) -> Path | None:
    if output is None or output.suffix in (".json", *PICTURES):
        return output
    raise ConfigError([f"--output {output}: no format of that name. Let it end in .json, {', '.join(PICTURES)}."])


def _step_folder(dump: Path) -> Path:
    """The folder of one step, or a process's file, that `dump` is or holds."""
    from grpo_ext.trainer.recording import FOLDER, ranks_in, steps_in

    if dump.is_file() or (dump.is_dir() and ranks_in(dump)):
        return dump
    if not dump.exists():
        raise ConfigError([f"{dump}: no such file or folder. Name a step's folder, such as RUN/{FOLDER}/step_1."])
    held = steps_in(dump) or steps_in(dump / FOLDER) or steps_in(dump / "failures")
    if len(held) == 1:
        return next(iter(held.values()))
    if held:
        some = ", ".join(map(str, list(held)[:20])) + (", ..." if len(held) > 20 else "")
        raise ConfigError([f"{dump} holds the steps {some}. Name one: {next(reversed(held.values()))}."])
    raise ConfigError([f"{dump} holds no recorded batch. Train with record_batches: 1, and name RUN/{FOLDER}/step_1."])


def changes_in(argv: Sequence[str]) -> dict[str, Any]:
    """What the command line says of `GRPOExtConfig`'s fields, `null` being None.

    Raises:
        ConfigError: a word that is none of them, or a value of another type.
    """
    from trl import TrlParser

    from grpo_ext.config.grpo_config import GRPOExtConfig
    from grpo_ext.registry import did_you_mean

    class Parser(TrlParser):
        def error(self, message: str) -> Any:
            raise ConfigError([message.removeprefix("argument ")])

    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    names = [f.name for f in dataclasses.fields(GRPOExtConfig) if f.init]
    for word in words:
        if word.startswith("--") and word[2:] not in names:
            raise ConfigError([f"{word}: no setting has this name. {did_you_mean(word[2:], names)}"])
    nothing = [i for i, word in enumerate(words) if word == "null" and i and words[i - 1][:2] == "--"]
    unset = {words[i - 1][2:]: None for i in nothing}
    rest = [word for i, word in enumerate(words) if i not in nothing and i + 1 not in nothing]
    parser = Parser(GRPOExtConfig, allow_abbrev=False)  # type: ignore[arg-type]
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given, extra = parser.parse_known_args(rest)
    if extra:
        raise ConfigError([f"{' '.join(extra)}: not understood. Give settings as --key value."])
    return vars(given) | unset


def recorded_weights(folder: Path, content: Mapping[str, Any]) -> str:
    """The model, or the checkpoint beside the recording, that a step began with.

    Raises:
        ConfigError: it was not kept.
    """
    from grpo_ext.trainer.checkpoints.finish import holds_weights

    before, run_folder = content["step"] - 1, folder.resolve().parents[2 if folder.is_file() else 1]
    checkpoint = run_folder / f"checkpoint-{before}"
    if holds_weights(checkpoint):
        return str(checkpoint)
    if before == 0 and content["model"] and not content["adapter"]:
        return str(content["model"])
    began = "an adapter as it began" if content["adapter"] else "a model that was handed over in memory"
    which = f"{checkpoint} holds no weights" if before else f"{began} is not on the disk"
    raise ConfigError(
        [
            f"{folder}: the weights that step {content['step']} began with were not kept ({which}). Name others by "
            "--model; or save at least as often as is recorded (save_steps: 10, record_batches: 10)."
        ]
    )


# What is computed.


def computed(contents: Sequence[dict[str, Any]], model: str, changes: Mapping[str, Any]) -> Any:
    """The step under the recorded settings with `changes`.

    Raises:
        ConfigError: the model cannot be loaded or is another's; the loss asks for what was not recorded.
    """
    from grpo_ext.trainer.one_step import OneStep, config_of

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # where the trainer says all this
        args = config_of(contents, changes, folder)
        policy, tokenizer = _loaded(contents, model, args)
        args.replay_batches = folder  # so that neither a sampler nor a reference is built
        rows = [{"prompt": "-"}] * int(args.generation_batch_size or 1)
        trainer = OneStep(policy, [_unscored], args, _dataset(rows), processing_class=tokenizer)
        return trainer.compute(contents)


def _unscored(completions: list, **_: Any) -> list[float | None]:
    return [None] * len(completions)


def _dataset(rows: list[dict[str, str]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _loaded(contents: Sequence[dict[str, Any]], model: str, args: Any) -> tuple[Any, Any]:
    """The policy (an adapter on its base, else the path) and its tokenizer."""
    from trl import DatasetMixtureConfig, ModelConfig

    from grpo_ext.commands.runs import find
    from grpo_ext.config.adapters import base_of
    from grpo_ext.data.config import DataConfig
    from grpo_ext.recipe.parts import Recipe, RecipeArguments
    from grpo_ext.recipe.policy import load_tokenizer_of
    from grpo_ext.train import adapted_policy

    path = find(model).model
    try:
        tokenizer = load_tokenizer_of(path, trust_remote_code=args.trust_remote_code)
        _check_tokenizer(contents, tokenizer, model)
        base = base_of(path)
        if base is None:
            return path, tokenizer
        script = RecipeArguments(dataset_name="-")
        parts = Recipe(script, DataConfig(), args, ModelConfig(model_name_or_path=path), DatasetMixtureConfig())
        policy = adapted_policy(parts, base, tokenizer)
        args.model_init_kwargs = None  # used above; TRL would warn that it ignores them
        return policy, tokenizer
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [f"--model {model}: it cannot be loaded ({reason}). Name a run, a checkpoint or a model."]
        ) from error


def _check_tokenizer(contents: Sequence[dict[str, Any]], tokenizer: Any, model: str) -> None:
    """Whether the recording's tokens are this model's."""
    from grpo_ext.trainer.recording import texts

    for content in contents:
        there, here = content.get("tokens", {}), texts(tokenizer, content.get("micro_batches", []))
        differing = next((i for i in there if there[i] != here.get(i)), None)
        if differing is not None:
            raise ConfigError(
                [
                    f"--model {model}: its token {differing} is {here.get(differing)!r}, and the recorded one "
                    f"{there[differing]!r}. Name a model with the tokenizer of {content['model'] or 'the run'}."
                ]
            )


def recorded(contents: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Loss and gradient norm of the step, as the run had them."""
    losses = [sum(batch["loss"].item() for batch in content.get("micro_batches", [])) for content in contents]
    told = {"loss": sum(losses) / contents[0]["processes"]}
    return told | ({"grad_norm": contents[0]["grad_norm"]} if "grad_norm" in contents[0] else {})


# What is shown.


def show(contents: Sequence[dict[str, Any]], model: str, told: Mapping[str, float], found: Mapping[str, Any]) -> None:
    """A table of figures beside each other, and the tokens with the largest terms."""
    from rich.console import Console
    from rich.table import Table

    console, first = Console(), contents[0]
    where = f"step {first['step']}, recorded by {first['processes']} process(es) with grpo-ext {first['grpo_ext']}"
    console.print(f"{where}; weights: {model}", markup=False)
    for name, one in found.items():
        console.print(f"{name}: {one.objective}", markup=False)
    table = Table("figure", "in the run", *found, box=None)
    figures = {name: {"loss": one.loss, "grad_norm": one.grad_norm} | one.figures for name, one in found.items()}
    for figure in dict.fromkeys(figure for each in figures.values() for figure in each):
        table.add_row(figure, _short(told.get(figure)), *(_short(each.get(figure)) for each in figures.values()))
    for block in dict.fromkeys(block for one in found.values() for block in one.blocks):
        norms = (_short(one.blocks.get(block)) for one in found.values())
        table.add_row(f"grad_norm of {block}", "", *norms)
    console.print(table)
    console.print(_verdict(told["loss"], found["recorded loss"].loss), markup=False)
    name, last = list(found.items())[-1]
    terms = Table("row", "token", "text", "advantage", "ratio", "entropy", "term", box=None)
    for token in largest(last.tokens)[:SHOWN]:
        numbers = (token.advantage, token.ratio, token.entropy, token.term)
        text = repr(first["tokens"].get(str(token.id), "?"))
        terms.add_row(str(token.row), str(token.place), text.replace("[", "\\["), *map(_short, numbers))
    console.print(f"The largest terms of {len(last.tokens):,} tokens ({name}):", terms, markup=False)


def largest(tokens: Sequence[Any]) -> list[Any]:
    """Tokens by the size of their term; what is no number comes first."""
    return sorted(tokens, key=lambda token: -abs(token.term) if math.isfinite(token.term) else -math.inf)


def _verdict(there: float, here: float) -> str:
    off = abs(there - here) / max(abs(there), abs(here), 1e-12)
    if off <= SAME or (math.isnan(there) and math.isnan(here)):
        return f"The loss is that of the run (relative difference {off:.0e})."
    return f"The loss is NOT that of the run (relative difference {off:.0e}): other weights, version or precision."


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def write(
    output: Path, contents: Sequence[dict[str, Any]], told: Mapping[str, float], found: Mapping[str, Any]
) -> None:
    """All that was computed as JSON, or drawn."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".json":
        known = {name: one.to_dict() for name, one in found.items()}
        content = {"step": contents[0]["step"], "texts": contents[0]["tokens"], "in the run": told, **known}
        output.write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")
        return
    try:
        draw(output, contents[0]["step"], found)
    except ImportError as error:
        raise ConfigError(
            [f"--output {output}: {error}. pip install 'grpo-ext[plot]', or let it end in .json."]
        ) from error


def _finite(value: Any) -> Any:
    """`value` as JSON has it: null for NaN and inf."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(output: Path, step: int, found: Mapping[str, Any]) -> None:
    """Gradient by block, ratios, and terms against ratios, a colour for each loss.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    gradient, ratios, terms = figure.subplots(1, 3)
    width = 0.8 / len(found)
    for i, (name, one) in enumerate(found.items()):
        places = [place + i * width for place in range(len(one.blocks))]
        gradient.bar(places, list(one.blocks.values()), width, label=f"{name}: {one.objective.partition(':')[0]}")
        gradient.set_xticks(places, list(one.blocks), rotation=90, fontsize=7)
        known = [token for token in one.tokens if math.isfinite(token.ratio) and math.isfinite(token.term)]
        ratios.hist([token.ratio for token in known], bins=50, histtype="step")
        terms.plot([token.ratio for token in known], [token.term for token in known], ".", markersize=2)
    gradient.set(title=f"norm of the gradient, step {step}", yscale="log")
    ratios.set(title="ratio, tokens", xlabel="policy / old policy", yscale="log")
    terms.set(title="term of the loss by ratio", xlabel="policy / old policy")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(output)
