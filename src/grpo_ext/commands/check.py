"""`grpo-ext check`: every mistake of a recipe at once, or what it will do in numbers, before a model is loaded."""

import sys
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from grpo_ext.commands.console import print_sections, take_option, take_processes
from grpo_ext.commands.serve import server_url, wanted
from grpo_ext.config.engines import fsdp_on_cpu
from grpo_ext.config.launch import planned_processes, world_size
from grpo_ext.config.machine import lacks
from grpo_ext.config.warnings import warnings
from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.tools import schemas
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import read_yaml
from grpo_ext.recipe.launching import Launch, accelerate_config, launch_of
from grpo_ext.recipe.look import Look
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.policies import Policy
from grpo_ext.recipe.warnings import recipe_warnings
from grpo_ext.rollout.vllm.server import ServerUnreachable, mismatches, server_facts

Section = list[tuple[str, str]]


def loss_section(recipe: Recipe) -> Section:
    """The resolved loss."""
    objective = recipe.training.objective
    departures = objective.departures()
    but = f", but for the {', '.join(departures)}" if departures else ""
    return [
        ("loss", objective.describe()),
        ("formula", f"{objective.row.formula or 'of your own'}{but}"),
        ("paper", f"{objective.row.paper or 'of your own'}{but and ' (not as it stands there)'}"),
        ("rewards", ", ".join(f"{name} x {weight:g}" for name, weight in _rewards(recipe))),
    ]


def _rewards(recipe: Recipe) -> list[tuple[str, float]]:
    own = [(f"environment {spec.name}", spec.weight) for spec in recipe.environments if spec.owns_reward]
    return [*((spec.name, spec.weight) for spec in recipe.rewards), *own]


def environment_section(recipe: Recipe) -> Section:
    """What each environment is: tools, turns, where it runs."""
    return [(spec.name, _environment(spec)) for spec in recipe.environments]


def _environment(spec: EnvironmentSpec) -> str:
    tools = [tool["function"]["name"] for tool in schemas(spec.target, spec.functions)] if spec.uses_tools else []
    where = "a process for each attempt" if spec.isolated else "this process"
    how = f"tools {', '.join(tools)}" if tools else "a conversation"
    return f"{how}, up to {spec.max_turns} turns of {spec.turn_timeout:g} s, in {where}"


def batch_section(recipe: Recipe, rows: int | None) -> Section:
    """Prompts, completions and optimizer steps."""
    c, processes = recipe.training, world_size()
    assert c.generation_batch_size
    assert c.steps_per_generation
    assert c.num_generations
    per_step = c.per_device_train_batch_size * processes * c.gradient_accumulation_steps
    per_generation = c.generation_batch_size // c.num_generations
    updates = c.steps_per_generation * c.num_iterations / c.gradient_accumulation_steps
    return [
        ("processes", str(processes)),
        (
            "optimizer step",
            f"{per_step} completions = {per_step / c.num_generations:g} prompts x {c.num_generations}; "
            f"{c.per_device_train_batch_size} x {c.gradient_accumulation_steps} accumulation per device",
        ),
        (
            "generation",
            f"{c.generation_batch_size} completions of {per_generation} prompts, up to {c.max_completion_length} "
            f"tokens each, used for {updates:g} optimizer steps",
        ),
        ("training rows", "not known before loading" if rows is None else f"{rows}"),
        ("optimizer steps", _optimizer_steps(recipe, rows, per_generation, updates)),
    ]


def _optimizer_steps(recipe: Recipe, rows: int | None, prompts: int, updates: float) -> str:
    c = recipe.training
    if c.max_steps > 0:
        return str(c.max_steps)
    if rows is None:
        return f"{c.num_train_epochs:g} epochs x rows / {prompts} x {updates:g}"
    return str(int(rows // prompts * updates * c.num_train_epochs))


def memory_section(recipe: Recipe, policy: Policy) -> Section:
    """Estimated memory of weights, gradients and optimizer, from the model's configuration alone."""
    if policy.unknown:
        return [("memory", f"not known: {policy.unknown}")]
    parameters, trained = policy.parameters, policy.trained
    bytes_each = 2 if (recipe.model.dtype or "float32") in ("bfloat16", "float16") else 4
    weights, gradients, adam = parameters * bytes_each, trained * bytes_each, 2 * trained * bytes_each
    reference = parameters * bytes_each if recipe.training.beta and trained == parameters else 0
    total = weights + gradients + adam + reference
    return [
        ("parameters", f"{parameters / 1e6:.2f} M, {trained / 1e6:.2f} M trained"),
        (
            "memory per replica",
            f"{_gib(total)} before activations: weights {_gib(weights)}, gradients {_gib(gradients)}, "
            f"Adam {_gib(adam)}, reference {_gib(reference)}",
        ),
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def plan(recipe: Recipe, look: Look) -> dict[str, Section]:
    """Sections of the plan, warnings last."""
    rows = len(look.train) if isinstance(look.train, Dataset) else None
    lines = (*map(str, warnings(recipe.training)), *recipe_warnings(recipe), *look.notes)
    return {
        "Loss": loss_section(recipe),
        **({"Environments": environment_section(recipe)} if recipe.environments else {}),
        "Batch": batch_section(recipe, rows),
        "Memory": memory_section(recipe, look.policy),
        "Warnings": [("", warning) for warning in lines],
        "Not on this machine": [("", str(line)) for line in lacks(recipe.training, recipe.model)],
    }


def run(argv: list[str]) -> int:
    """Print the plan; 2 when the recipe has problems."""
    try:
        name, processes = take_option(argv, "--accelerate_config"), take_processes(argv)
        asked = launch_of(argv)
        launch = asked if name is None else Launch(accelerate_config(name), asked.processes)
        with planned_processes(processes or launch.planned, here=processes is None):
            datasets.disable_progress_bars()
            look = Look()
            recipe = load_recipe(argv, look)
            if recipe.training.use_cpu and launch.config and _is_fsdp(launch.config):
                raise ConfigError([fsdp_on_cpu(f"accelerate_config={launch.config.stem} with use_cpu")])
            print_sections(plan(recipe, look))
            return _check_server(recipe)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _is_fsdp(config: Path) -> bool:
    return read_yaml(config).get("distributed_type") == "FSDP"


def _check_server(recipe: Any) -> int:
    """Compare the recipe with its vLLM server, where it has one; 2 when they do not fit."""
    if not (recipe.training.use_vllm and recipe.training.vllm_mode == "server"):
        return 0
    url = server_url(recipe)
    try:
        facts = server_facts(url)
        problems = list(mismatches(wanted(recipe), facts))
    except ServerUnreachable as error:
        print(f"vLLM server: {error}.")
        return 0
    except OSError as error:  # of the tokenizer: no hub can be reached, which `check` does not need
        print(f"vLLM server at {url}: not compared with the recipe ({str(error).splitlines()[0]}).")
        return 0
    for problem in problems:
        print(f"vLLM server at {url}: {problem}", file=sys.stderr)
    if not problems:
        print(f"vLLM server at {url}: fits the recipe.")
    return 2 if problems else 0
