"""grpo-ext: train, check, serve, score, recipes, demo."""

import argparse
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `grpo-ext` command."""
    parser = argparse.ArgumentParser(prog="grpo-ext", description="GRPO-style training from a recipe.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("train", "train a recipe: --config RECIPE [--accelerate_config NAME] [--num_processes N] [--key value ...]"),
        ("check", "validate a recipe and print its plan: --config RECIPE [--num_processes N] [--key value ...]"),
        (
            "serve",
            "start the vLLM server of a recipe: --config RECIPE [--host H] [--port P] [--key value ...] [-- FLAGS]",
        ),
        ("score", "score saved completions: --config RECIPE --file COMPLETIONS.jsonl [--explain N] [--key value ...]"),
        ("recipes", "list the packaged recipes"),
        ("demo", "train a tiny model on this machine and report what it learned"),
    ):
        commands.add_parser(name, help=help_text, description=help_text, add_help=False)
    given = list(sys.argv[1:] if argv is None else argv)
    known, _ = parser.parse_known_args(given[:1])
    if {"-h", "--help"} & set(given[1:]):
        commands.choices[known.command].print_help()
        if known.command not in ("train", "demo"):
            sys.exit(0)
    command = {
        "train": _train,
        "check": _check,
        "serve": _serve,
        "score": _score,
        "recipes": _recipes,
        "demo": _demo,
    }
    sys.exit(command[known.command](given[1:]))


def _take(argv: list[str], option: str) -> str | None:
    """Remove `option VALUE` or `option=VALUE` from argv and return the value."""
    for i, arg in enumerate(argv):
        if arg.startswith(f"{option}="):
            return argv.pop(i).partition("=")[2]
    if option not in argv:
        return None
    i = argv.index(option)
    if i + 1 == len(argv):
        sys.exit(f"{option}: no value.")
    value = argv[i + 1]
    del argv[i : i + 2]
    return value


def _train(argv: list[str]) -> int:
    """In this process, or by accelerate when a launch configuration is named."""
    config, processes = _take(argv, "--accelerate_config"), _take(argv, "--num_processes")
    if config is None and processes is None:
        from .train import main as train_main

        train_main(argv)
        return 0
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    if config is not None:
        launch += ["--config_file", str(accelerate_config(config))]
    if processes is not None:
        launch += ["--num_processes", processes]
    return subprocess.call([*launch, "-m", "grpo_ext.train", *argv])


def accelerate_config(name: str) -> Path:
    """A file, or the packaged (else TRL's) launch configuration of that name."""
    from importlib.resources import files

    from .recipe import recipes_folder
    from .registry import did_you_mean

    if Path(name).is_file():
        return Path(name)
    folders = [recipes_folder() / "accelerate_configs", Path(str(files("trl"))) / "accelerate_configs"]
    shipped = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if name not in shipped:
        sys.exit(
            f"--accelerate_config {name}: neither a file nor a shipped configuration. {did_you_mean(name, shipped)}"
        )
    return shipped[name]


def _check(argv: list[str]) -> int:
    """Print the plan; 2 when the recipe has problems."""
    from .checks import planned_processes
    from .config import ConfigError
    from .data import DataError

    processes = _take(argv, "--num_processes")
    if processes is not None and not (processes.isdecimal() and int(processes)):
        print(f"--num_processes {processes}: not a number of processes. Give 1 or more.", file=sys.stderr)
        return 2
    try:
        with planned_processes(int(processes) if processes else None):
            from .plan import plan
            from .recipe import load_recipe

            recipe = load_recipe(argv)
            _print_plan(plan(recipe))
            return _check_server(recipe)
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return 2


def _check_server(recipe: Any) -> int:
    """Compare the recipe with its vLLM server, where it has one; 2 when they do not fit."""
    if not (recipe.training.use_vllm and recipe.training.vllm_mode == "server"):
        return 0
    from .rollout.serve import server_url, wanted
    from .rollout.server import ServerUnreachable, mismatches, server_facts

    url = server_url(recipe)
    try:
        problems = list(mismatches(wanted(recipe), server_facts(url)))
    except ServerUnreachable as error:
        print(f"vLLM server: {error}.")
        return 0
    for problem in problems:
        print(f"vLLM server at {url}: {problem}", file=sys.stderr)
    if not problems:
        print(f"vLLM server at {url}: fits the recipe.")
    return 2 if problems else 0


def _serve(argv: list[str]) -> int:
    """Start the recipe's vLLM server and stay with it; what follows `--` goes to vLLM."""
    from .config import ConfigError

    split = argv.index("--") if "--" in argv else len(argv)
    argv, extra = argv[:split], argv[split + 1 :]
    host, port = _take(argv, "--host") or "127.0.0.1", _take(argv, "--port")
    if port is not None and not port.isdecimal():
        sys.exit(f"--port {port}: not a port.")
    try:
        from .recipe import load_recipe
        from .rollout.serve import serve

        recipe = load_recipe([*argv, "--use_vllm", "true", "--vllm_mode", "server"])
        hint = f"grpo-ext train {' '.join(argv)} --use_vllm true --vllm_mode server"
        if host != "127.0.0.1":
            hint += f" --vllm_server_host {socket.gethostname() if host == '0.0.0.0' else host}"
        if port is not None:
            hint += f" --vllm_server_port {port}"
        return serve(recipe, host, int(port) if port else None, extra, hint=hint)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _print_plan(sections: dict[str, list[tuple[str, str]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, rows in sections.items():
        if not rows:
            continue
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in rows:
            table.add_row(name, value)
        console.print(table, "", markup=False)


def _score(argv: list[str]) -> int:
    """Print what the recipe's rewards and estimator make of a file; 2 when the recipe or the file has problems."""
    from .checks import planned_processes
    from .config import ConfigError

    file, row = _take(argv, "--file"), _take(argv, "--explain")
    try:
        from .recipe import load_recipe
        from .rewards.runtime import RewardError, Runtime
        from .score import read_rows, score

        if file is None:
            raise ConfigError(["--file: missing. Name a jsonl file of prompts and completions."])
        with planned_processes(None):  # the machine that scores need not be the one that trains
            recipe, rows = load_recipe(argv), read_rows(file)
        if row is not None and not (row.isdigit() and int(row) < len(rows)):
            raise ConfigError([f"--explain {row}: the rows are numbered 0 to {len(rows) - 1}."])
        runtime = Runtime(recipe.rewards, workers=recipe.script.reward_workers)
        try:
            scored = score(recipe, rows, runtime)
        finally:
            runtime.close()
    except (ConfigError, RewardError) as error:
        print(error, file=sys.stderr)
        return 2
    _print_scores(scored, recipe, None if row is None else int(row))
    return 0


def _print_scores(scored: Any, recipe: Any, row: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from .score import explain, summary

    if row is not None:
        _print_plan({f"Row {row}": explain(scored, row, recipe)})
        return
    console = Console()
    table = Table("reward", "mean", "std", "min", "max", "None", "errors", "seconds", title=f"{len(scored.rows)} rows")
    for line in summary(scored):
        table.add_row(*line)
    console.print(table)
    names = list(scored.rewards)
    table = Table("row", *names, "total", "advantage", title="Rows")
    for i in range(len(scored.rows)):
        values = [scored.rewards[name][i] for name in names]
        cells = ["None" if value is None else f"{value:.3f}" for value in values]
        table.add_row(str(i), *cells, f"{scored.total[i]:.3f}", f"{scored.advantages[i]:+.3f}")
    console.print(table)


def _recipes(argv: list[str]) -> int:
    """Name and first comment line of each packaged recipe."""
    from .recipe import packaged_recipes

    for name, path in packaged_recipes().items():
        first = path.read_text().splitlines()[0].removeprefix("#").strip()
        print(f"{name:32} {first}")
    return 0


def _demo(argv: list[str]) -> int:
    from .quickstart.demo import main as demo_main

    demo_main(argv)
    return 0


if __name__ == "__main__":
    main()
