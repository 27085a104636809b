"""`grpo-ext check`: all mistakes in a recipe at once, or its plan in numbers, before a model is loaded."""

import argparse
import sys
from collections.abc import Mapping

import datasets
from datasets import Dataset

from grpo_ext.commands.memory import copies, fitting, gib, of_recipe, shares, too_large, too_many
from grpo_ext.commands.serve import server_url, wanted
from grpo_ext.commands.train import is_fsdp, wanted_launch
from grpo_ext.config.added_losses import added_losses
from grpo_ext.config.ahead import described
from grpo_ext.config.engine_options import given_options
from grpo_ext.config.engines import fsdp_on_cpu
from grpo_ext.config.launch import planned_processes, world_size
from grpo_ext.config.loss import idle_clip
from grpo_ext.config.precision import expected_differences, precision
from grpo_ext.config.truncation import scores_over_support, truncations
from grpo_ext.config.warnings import warnings
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.tools import schemas
from grpo_ext.errors import ConfigError, redacted_text
from grpo_ext.recipe.checks import recipe_warnings
from grpo_ext.recipe.launching import Engine, Launch, engine_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.registry import imported
from grpo_ext.rollout.vllm.server import ServerTrouble, engine_mismatches, mismatches, server_facts, unsuited
from grpo_ext.tables import Table, show

Section = list[tuple[str, str]]
NO_LAUNCH = Launch()


def run(options: argparse.Namespace) -> int:
    """Print the plan; return 2 if the vLLM server does not fit the recipe.

    Raises:
        ConfigError: the recipe has mistakes.
    """
    launch = wanted_launch(options) or NO_LAUNCH
    with planned_processes(launch.planned, here=options.num_processes is None):
        datasets.disable_progress_bars()
        preflight, before = Preflight(), len(imported)
        try:
            recipe = load_recipe(options.keys, preflight)
        finally:
            if modules := sorted(set(imported[before:])):
                print(f"check has imported code that the recipe names: {', '.join(modules)}")
        if recipe.training.use_cpu and launch.config and is_fsdp(launch.config):
            raise ConfigError([fsdp_on_cpu(f"accelerate_config={launch.config.stem} with use_cpu")])
        print_sections(plan(recipe, preflight, launch))
        return _check_server(recipe)


def print_sections(sections: Mapping[str, Section]) -> None:
    """Print a table of names and values for each section that is not empty."""
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for row in rows:
            table.add_row(*row)
        if rows:
            show(table, "")


def plan(recipe: Recipe, preflight: Preflight, launch: Launch = NO_LAUNCH) -> dict[str, Section]:
    """Return the sections of the plan, warnings last."""
    engine = engine_of(launch)
    rows = len(preflight.train) if isinstance(preflight.train, Dataset) else None
    weights = recipe.model.dtype or "float32"  # TRL's default
    lines = (*warnings(recipe.training), *recipe_warnings(recipe), *preflight.notes)
    return {
        "Loss": _loss(recipe),
        "Environments": [(spec.name, _environment(spec)) for spec in recipe.environments],
        "Batch": _batch(recipe, rows, engine),
        "Memory": _memory(recipe, preflight, engine),
        "Sampler and policy": [
            ("formats", precision(recipe.training, weights)),
            *([("push", preflight.policy.push)] if preflight.policy.push else []),
            *expected_differences(recipe.training, weights),
        ],
        "Warnings": [("", str(warning)) for warning in lines],
    }


def _loss(recipe: Recipe) -> Section:
    objective = recipe.training.objective
    beta, paper = recipe.training.beta, objective.row.beta
    weights = [(spec.name, spec.weight) for spec in recipe.rewards]
    cut = ", ".join(truncations(recipe.training)) if scores_over_support(recipe.training) else ""
    weights += [(f"environment {spec.name}", spec.weight) for spec in recipe.environments if spec.owns_reward]
    return [
        ("loss", objective.describe()),
        ("formula", f"{objective.row.formula or 'of your own'}{' (modified)' if objective.departures() else ''}"),
        ("paper", objective.source or "of your own"),
        *(("beside it", loss.describe()) for loss in added_losses(recipe.training)),
        *([("scored over", f"the tokens that {cut} left to the sampler")] if cut else []),
        *([("clip", idle)] if (idle := idle_clip(recipe.training)) else []),
        *([("KL", f"the paper trains with beta: {paper:g}; here it is {beta:g}")] if beta != paper > 0 else []),
        ("rewards", ", ".join(f"{name} x {weight:g}" for name, weight in weights)),
    ]


def _environment(spec: EnvironmentSpec) -> str:
    tools = [tool["function"]["name"] for tool in schemas(spec.target, spec.functions)] if spec.uses_tools else []
    process = "one process per episode" if spec.isolated else "this process"
    kind = f"tools {', '.join(tools)}" if tools else "a conversation"
    return f"{kind}, up to {spec.max_turns} turns of {spec.turn_timeout:g} s, in {process}"


def _batch(recipe: Recipe, rows: int | None, engine: Engine) -> Section:
    c, processes = recipe.training, world_size()
    assert c.generation_batch_size
    assert c.steps_per_generation
    assert c.num_generations
    per_step = c.per_device_train_batch_size * processes * c.gradient_accumulation_steps
    prompts = c.generation_batch_size // c.num_generations
    updates = c.steps_per_generation * c.num_iterations / c.gradient_accumulation_steps
    if c.max_steps > 0:
        steps = str(c.max_steps)
    elif rows is None:
        steps = f"{c.num_train_epochs:g} epochs x rows / {prompts} x {updates:g}"
    else:
        steps = str(int(rows // prompts * updates * c.num_train_epochs))
    return [
        ("processes", str(processes)),
        *([("engine", str(engine) if engine.name else "DDP: each process has a whole copy")] if processes > 1 else []),
        (
            "optimizer step",
            f"{per_step} completions = {per_step / c.num_generations:g} prompts x {c.num_generations}; "
            f"{c.per_device_train_batch_size} x {c.gradient_accumulation_steps} accumulation per device",
        ),
        (
            "generation",
            f"{c.generation_batch_size} completions of {prompts} prompts, up to {c.max_completion_length} "
            f"tokens each, used for {updates:g} optimizer steps",
        ),
        ("training rows", "not known before loading" if rows is None else f"{rows}"),
        ("optimizer steps", steps),
        *([("rollout_ahead", described(c))] if c.rollout_ahead else []),
    ]


def _memory(recipe: Recipe, preflight: Preflight, engine: Engine) -> Section:
    """Return an estimate of a training process's memory, from the model's configuration and the engine only."""
    policy = preflight.policy
    if policy.unknown:
        return [("memory", f"not known: {policy.unknown}")]
    parts, hosted = shares(of_recipe(recipe, policy, preflight.longest_prompt), engine)
    shown = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    rows = [
        ("parameters", f"{policy.parameters / 1e6:.2f} M, {policy.trained / 1e6:.2f} M trained"),
        ("memory per process" if engine.split else "memory per replica", f"about {gib(sum(parts.values()))}: {shown}"),
    ]
    if hosted:
        rows.append(("in main memory", f"{gib(hosted)} of each process: {', '.join(engine.hosted)}"))
    if not engine.split and (recipe.training.deepspeed or recipe.training.fsdp):
        rows.append(("sharding", "not counted: the recipe's deepspeed or fsdp; accelerate_config is"))
    if size := copies(recipe, policy):
        rows.append(("weights for rollouts", f"{gib(size)} of main memory beside each training process"))
    if (limit := recipe.training.micro_batch_tokens) is not None:
        rows.append(("micro_batch_tokens", f"a forward has at most {limit} tokens, or one completion with its prompt"))
    fit = fitting(recipe, policy, preflight.longest_prompt, engine)
    warnings = too_large(recipe, parts, fit), too_many(recipe, size)
    return [*rows, *(("Warning", str(problem)) for problem in warnings if problem is not None)]


def _check_server(recipe: Recipe) -> int:
    """Compare a recipe with its vLLM server, if it has one; return 2 if they do not fit."""
    if not (recipe.training.use_vllm and recipe.training.vllm_mode == "server"):
        return 0
    url = redacted_text(server_url(recipe))
    try:
        facts = server_facts(server_url(recipe))
        problems = [*mismatches(wanted(recipe), facts), *unsuited(facts.config)]
        problems += engine_mismatches(given_options(recipe.training), facts.config)
    except ServerTrouble as error:
        print(redacted_text(f"vLLM server: {error}."))
        return 0
    except RuntimeError as error:
        print(redacted_text(f"vLLM server: {error}."), file=sys.stderr)
        return 2
    except ConfigError as error:  # the tokenizer is on a hub that cannot be reached, which `check` does not require
        print(f"vLLM server at {url}: not compared with the recipe ({error.problems[0].reason}).")
        return 0
    for problem in problems:
        print(f"vLLM server at {url}: {problem}", file=sys.stderr)
    if not problems:
        print(f"vLLM server at {url}: fits the recipe.")
    return 2 if problems else 0
