"""`grpo-ext completion bash|zsh|fish`: a script by which the tab key completes commands, recipes and common keys."""

import re
import sys

from grpo_ext.commands.cli import COMMANDS
from grpo_ext.recipe.files import packaged_recipes
from grpo_ext.registry import did_you_mean

_BASH = """\
_grpo_ext() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
    elif [ "$before" = --config ]; then
        COMPREPLY=($(compgen -W "{recipes}" -- "$current") $(compgen -f -- "$current"))
    elif [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "{keys}" -- "$current"))
    fi
}}
complete -o default -F _grpo_ext grpo-ext
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH = """\
complete -c grpo-ext -n __fish_use_subcommand -f -a "{commands}"
complete -c grpo-ext -n "not __fish_use_subcommand" -l config -r -a "{recipes}"
for key in {keys}
    complete -c grpo-ext -n "not __fish_use_subcommand" -l (string sub -s 3 -- $key) -r
end
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
INSTALL = {
    "bash": 'eval "$(grpo-ext completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(grpo-ext completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "grpo-ext completion fish > ~/.config/fish/completions/grpo-ext.fish",
}


def run(argv: list[str]) -> int:
    """Print the script, or how to have it."""
    if not argv:
        print("\n".join(INSTALL.values()))
        return 0
    if argv[0] not in SCRIPTS:
        print(f"grpo-ext completion {argv[0]}: no such shell. {did_you_mean(argv[0], SCRIPTS)}", file=sys.stderr)
        return 2
    words = {"commands": list(COMMANDS), "recipes": list(packaged_recipes()), "keys": keys()}
    print(SCRIPTS[argv[0]].format_map({name: " ".join(found) for name, found in words.items()}), end="")
    return 0


def keys() -> list[str]:
    """The command line's options, and the keys that packaged recipes set: to learn all would take seconds."""
    texts = (path.read_text() for path in packaged_recipes().values())
    found = {key for text in texts for key in re.findall(r"^(\w+):", text, re.MULTILINE)}
    own = ["accelerate_config", "config", "explain", "file", "help", "num_processes"]
    return [f"--{key}" for key in sorted({*found, *own})]
