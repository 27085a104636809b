"""`grpo-ext train`: a recipe, in this process or by accelerate."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from grpo_ext.commands.console import take_option
from grpo_ext.recipe.files import recipes_folder
from grpo_ext.registry import did_you_mean


def run(argv: list[str]) -> int:
    """In this process, or by accelerate when a launch configuration is named."""
    config, processes = take_option(argv, "--accelerate_config"), take_option(argv, "--num_processes")
    if config is None and processes is None:
        from grpo_ext.train import main as train_main

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
    if Path(name).is_file():
        return Path(name)
    folders = [recipes_folder() / "accelerate_configs", Path(str(files("trl"))) / "accelerate_configs"]
    shipped = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if name not in shipped:
        sys.exit(
            f"--accelerate_config {name}: neither a file nor a shipped configuration. {did_you_mean(name, shipped)}"
        )
    return shipped[name]
