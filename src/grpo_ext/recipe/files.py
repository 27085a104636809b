"""Find a recipe and read its YAML."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from grpo_ext.config.spec import kind
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.safe_reading import MAX_DEPTH, read_text


def recipes_folder() -> Path:
    """Folder of the packaged recipes, inside the wheel or at the root of a checkout."""
    inside = Path(__file__).parent / "packaged"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """Packaged recipes by name, such as `quickstart/grpo`."""
    root = recipes_folder()
    recipes = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))}
    return {name: path for name, path in recipes.items() if not name.startswith("accelerate_configs")}


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--config` (either form) and the other arguments."""
    rest = [piece for arg in argv for piece in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in rest:
        return None, rest
    i = rest.index("--config")
    if i + 1 == len(rest):
        raise ConfigError([Problem("--config", ABSENT, "no value", "Give a path or the name of a packaged recipe.")])
    return rest[i + 1], rest[:i] + rest[i + 2 :]


def unset(values: dict[str, Any], args: Sequence[str], keys: Collection[str]) -> list[str]:
    """Remove the keys that a command line sets to null from a recipe's values; return the command line without them.

    `keys` are the keys that have a default.
    """
    kept: list[str] = []
    rest = [*args]
    while rest:
        word = rest.pop(0)
        key, _, value = word.removeprefix("--").replace("-", "_").partition("=")
        alone = rest[:1] == ["null"] and (len(rest) == 1 or rest[1].startswith("--"))
        if word.startswith("--") and key in keys and (value == "null" or alone):
            values.pop(key, None)
            rest = rest[1:] if alone else rest
        else:
            kept.append(word)
    return kept


def find_recipe(name: str) -> Path:
    """Return the file of that path, or the packaged recipe of that name.

    Raises:
        ConfigError: neither exists; the message names the closest recipes.
    """
    if Path(name).is_file():
        return Path(name)
    packaged = packaged_recipes()
    key = name.removesuffix(".yaml")
    if key not in packaged:
        reason = "neither a file nor a packaged recipe"
        raise ConfigError([Problem(f"--config {name}", ABSENT, reason, f"{_closest(key, packaged)}{LISTED}")])
    return packaged[key]


LISTED = "`grpo-ext recipes` lists the packaged ones."


def _closest(name: str, packaged: Collection[str]) -> str:
    """Return a question with the recipes of a similar name, else of that folder or file name; empty without any."""
    if (close := did_you_mean(name, packaged)).startswith("Did"):
        return f"{close} "
    head = name.partition("/")[0]
    kin = [recipe for recipe in packaged if name in recipe.split("/")] or [
        k for k in packaged if k.startswith(f"{head}/")
    ]
    return f"Did you mean {' or '.join(map(repr, kin[:3]))}? " if kin else ""


LARGEST = 2**20
"""Most bytes of a YAML file."""
_MOST_VALUES, _MOST_KEYS, _LONGEST_NUMBER = 20_000, 1_000, 100


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may occur only once, and 1e-6 is a number, as in YAML 1.2.

    The values that it may hold, with those that anchors repeat, and their depth are bounded.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._extents: dict[int, tuple[int, int]] = {}
        """Values and depth of each whole node, by its id; an alias counts as what it repeats."""
        self._seen = self._open = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node within the bounds."""
        self._seen, self._open = self._seen + 1, self._open + 1
        _check_extent(self._seen, self._open)
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._open -= 1
        if node is None or (alias and id(node) in self._extents):
            return node
        inside = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
        sizes, depths = zip((0, 0), *(self._extents[id(part)] for part in parts), strict=True)
        self._extents[id(node)] = 1 + sum(sizes), 1 + max(depths)
        _check_extent(*self._extents[id(node)])
        return node


def _check_extent(values: int, depth: int) -> None:
    if values > _MOST_VALUES:
        raise _refusal("the file", f"more than {_MOST_VALUES:,} values, with those that anchors repeat")
    if depth > MAX_DEPTH:
        raise _refusal("the file", f"lists and mappings inside each other more than {MAX_DEPTH} deep")


def _refusal(place: str, reason: str, cure: str = "Shorten it.") -> ConfigError:
    return ConfigError([Problem(place, ABSENT, reason, cure)])


def _mapping_without_repeats(loader: _StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    merge = "tag:yaml.org,2002:merge"  # `<<: *anchor`, which gives what the mapping itself has not
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
    for key in keys[: _MOST_KEYS + 1]:
        if (count := keys.count(key)) > 1:
            raise _refusal(str(key), f"occurs {count} times in the recipe", "Keep one.")
    if len(keys) > _MOST_KEYS:
        raise _refusal(f"line {node.start_mark.line + 1}", f"a mapping of {len(keys):,} keys, at most {_MOST_KEYS:,}")
    return loader.construct_mapping(node, deep=True)


def _text(loader: _StrictLoader, node: yaml.ScalarNode) -> str:
    """Return a text in which the two halves of a character, as JSON writes an emoji, are one."""
    text = loader.construct_yaml_str(node)
    if not re.search("[\ud800-\udfff]", text):
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        place, reason = f"line {node.start_mark.line + 1}", "the text has half of a character (\\ud800 to \\udfff)"
        raise _refusal(place, reason, "Write the character itself.") from None


def _number(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    if re.search(r"^[-+]?0\d|:", node.value):  # YAML 1.1 reads 010 as 8 and 1:30 as 90
        reason = f"{node.value} is another number in YAML 1.1 (base 8 or 60) than in YAML 1.2"
        raise _refusal(f"line {node.start_mark.line + 1}", reason, "Write it without the zero, or in quotes.")
    if len(node.value) > _LONGEST_NUMBER:  # Python would not print it
        raise _refusal(f"line {node.start_mark.line + 1}", f"a number of {len(node.value):,} digits")
    return loader.construct_yaml_int(node)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _number)
_StrictLoader.add_constructor("tag:yaml.org,2002:str", _text)
_StrictLoader.yaml_implicit_resolvers = {k: list(v) for k, v in _StrictLoader.yaml_implicit_resolvers.items()}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


_CURES = {
    r"found character '\t'": "Write spaces in place of the tab.",
    "mapping values are not allowed": 'Put text that holds ": " in quotes.',
    "block mapping, expected <block end>, but found '<scalar>'": "Put the whole text in quotes.",
}
_OPEN = {
    "flow sequence": "Close the [ with a ].",
    "flow mapping": "Close the { with a }.",
    "quoted scalar": "Close the quotes.",
}
"""Constructs that do not end in their line, as YAML calls them."""


def _told(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    """Return where and why a text is no YAML, and a cure."""
    told = ", ".join(filter(None, (error.context, error.problem)))
    begun = next((cure for words, cure in _OPEN.items() if words in (error.context or "")), None)
    mark = error.context_mark if begun and error.context_mark else error.problem_mark
    cure = begun or next((cure for words, cure in _CURES.items() if words in told), "Correct that line.")
    return f"not valid YAML in line {mark.line + 1 if mark else '?'}: {told}", cure


def parse_value(text: str) -> Any:
    """Read a word of a command line as YAML: a number, a bool, null, a list or mapping, else the text itself."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, ConfigError):
        return text


def read_list(key: str, value: object, problems: list[Problem]) -> object:
    """Return a list that the command line gives as one word in JSON, or whose entries it gives so, as a list.

    `--reward_funcs '["accuracy", {"name": "format", "weight": 0.2}]'`; any other value is returned as it is. Text that
    begins as a list and is none is added to `problems`.
    """
    if not isinstance(value, list):
        return value
    if len(value) == 1 and isinstance(value[0], str) and value[0].startswith("["):
        read = parse_value(value[0])
        if isinstance(read, list):
            return read
        cure = f'Write --{key} A B, or --{key} \'["A", "B"]\'.'
        problems.append(Problem(key, value[0], "not a list in JSON", cure))
    return [parse_value(entry) if isinstance(entry, str) and entry.startswith("{") else entry for entry in value]


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: it cannot be read, is not YAML, is not a mapping, or has a key twice.
    """
    reason, cure = "", ""
    cause: Exception | None = None
    try:
        content = yaml.load(read_text(path, LARGEST), Loader=_StrictLoader)
        if isinstance(content, dict):
            return content
        reason, cure = f"{kind(content)}, not a mapping of keys to values", "Write key: value."
        if content is None:
            reason, cure = "empty", "Write keys and values into it; `grpo-ext recipes` lists examples."
    except ConfigError as error:
        raise ConfigError(replace(problem, field=f"{path}: {problem.field}") for problem in error.problems) from None
    except UnicodeDecodeError as error:
        reason, cure, cause = f"not UTF-8 ({error})", "Save it as UTF-8.", error
    except OSError as error:
        reason, cure, cause = f"cannot be read: {error}", "Name another file.", error
    except yaml.MarkedYAMLError as error:
        (reason, cure), cause = _told(error), error
    except (yaml.YAMLError, ValueError) as error:  # 2020-13-45 is taken for a date
        reason, cure, cause = f"not valid YAML: {error}", "Correct it.", error
    raise ConfigError([Problem(str(path), ABSENT, reason, cure)]) from cause
