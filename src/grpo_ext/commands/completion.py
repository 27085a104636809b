"""`grpo-ext completion bash|zsh|fish`: a script that completes commands, recipes and common keys."""

import argparse
import re

from grpo_ext.commands.arguments import COMMANDS, OPTIONS
from grpo_ext.recipe.files import packaged_recipes

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
_FISH = """\
complete -c grpo-ext -n __fish_use_subcommand -f -a "{commands}"
complete -c grpo-ext -n "not __fish_use_subcommand" -l config -r -a "{recipes}"
for key in {keys}
    complete -c grpo-ext -n "not __fish_use_subcommand" -l (string sub -s 3 -- $key) -r
end
"""
SCRIPTS = {"bash": _BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}", "fish": _FISH}
INSTALL = """\
eval "$(grpo-ext completion bash)"   # in ~/.bashrc
eval "$(grpo-ext completion zsh)"   # in ~/.zshrc, after compinit
grpo-ext completion fish > ~/.config/fish/completions/grpo-ext.fish"""


def run(options: argparse.Namespace) -> int:
    """Print the script, or how to install it."""
    if options.shell is None:
        print(INSTALL)
        return 0
    words = {"commands": list(COMMANDS), "recipes": list(packaged_recipes()), "keys": keys()}
    print(SCRIPTS[options.shell].format_map({name: " ".join(found) for name, found in words.items()}), end="")
    return 0


def keys() -> list[str]:
    """Return the options of all commands and the keys of the packaged recipes; to list every key takes seconds."""
    texts = (path.read_text() for path in packaged_recipes().values())
    recipe_keys = {f"--{key}" for text in texts for key in re.findall(r"^(\w+):", text, re.MULTILINE)}
    own = {name for options in OPTIONS.values() for option in options for name in option.names}
    return sorted({"--help", *recipe_keys, *(name for name in own if name.startswith("--"))})
