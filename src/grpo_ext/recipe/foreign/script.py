"""What a Python script or notebook hands to TRL and unsloth, as far as it is written down: nothing is run."""

import ast
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_CALLS = ("GRPOConfig", "LoraConfig", "from_pretrained", "get_peft_model", "GRPOTrainer", "load_dataset")
_OF_THE_TRAINER = ("model", "reward_funcs")
_OF_THE_MODEL = {"model_name", "max_seq_length", "load_in_4bit", "load_in_8bit", "fast_inference", "max_lora_rank"}
_OF_THE_MODEL |= {"gpu_memory_utilization", "full_finetuning", "dtype", "trust_remote_code", "torch_dtype"}


class NotWrittenDown(ValueError):
    """A value that only running the script would tell."""


def read_script(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of the calls that set a run up, and what could not be read of them.

    Raises:
        SyntaxError: it is no Python.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
        text = "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)
    tree = ast.parse(text)
    names = _assigned(tree)
    values: dict[str, Any] = {}
    unread: list[str] = []
    calls = dict(_calls(tree))
    if "GRPOConfig" not in calls:
        raise ValueError("it calls no GRPOConfig, which holds the settings")
    loading = calls.get("from_pretrained")
    if loading is not None and loading.lineno > calls["GRPOConfig"].lineno:  # what was trained, tried
        del calls["from_pretrained"]
    if {"get_peft_model", "LoraConfig"} & calls.keys():
        values["use_peft"] = True
    for name, call in calls.items():
        for key, value, problem in _keywords(name, call, names):
            if problem:
                unread.append(problem)
            elif key not in values:
                values[key] = value
    return values, unread


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls by the name of what they call, the first of each kind that sets something."""
    found: dict[str, ast.Call] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _CALLS and _is_of_the_run(name, node):
                found.setdefault(name, node)
    yield from found.items()


def _is_of_the_run(name: str, call: ast.Call) -> bool:
    owner = ast.unparse(call.func).partition(".")[0]
    return (
        name != "from_pretrained"
        or owner in ("FastLanguageModel", "FastModel", "FastVisionModel")
        or "Causal" in owner
    )


def _assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Names that are assigned exactly once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _keywords(name: str, call: ast.Call, names: dict[str, ast.expr]) -> Iterator[tuple[str, Any, str]]:
    if name == "load_dataset":
        for key, node in zip(("dataset_name", "dataset_config"), call.args, strict=False):
            yield from _one(key, node, names, name)
    if name == "from_pretrained" and call.args:
        yield from _one("model_name_or_path", call.args[0], names, name)
    for keyword in call.keywords:
        key, node = str(keyword.arg), keyword.value
        if name == "GRPOTrainer" and key not in _OF_THE_TRAINER:
            continue
        if name == "load_dataset":
            if key not in ("name", "split", "path"):
                continue
            key = {"name": "dataset_config", "split": "dataset_train_split", "path": "dataset_name"}[key]
        if key == "reward_funcs":
            yield key, [_function(each) for each in node.elts] if isinstance(node, ast.List) else [_function(node)], ""
        elif name == "GRPOTrainer":
            if isinstance(node, ast.Constant):
                yield "model_name_or_path", node.value, ""
        elif name == "LoraConfig":
            key = {"task_type": "lora_task_type"}.get(key, key)
            yield from _one(key, node, names, name)
        elif name != "from_pretrained" or key in _OF_THE_MODEL:
            yield from _one(key, node, names, name)


def _one(key: str, node: ast.expr, names: dict[str, ast.expr], call: str) -> Iterator[tuple[str, Any, str]]:
    try:
        yield key, _value(node, names), ""
    except NotWrittenDown:
        yield (
            key,
            None,
            f"{key}: {call} is given {ast.unparse(node)}, which only running the script would tell. Set it.",
        )


def _function(node: ast.expr) -> str:
    """The name of a reward as the script has it."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _value(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """A value that stands in the script: a constant, a list, a name assigned once, sums of those."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], {name: value for name, value in names.items() if name != node.id})
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, names) for each in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {
            _value(k, names): _value(v, names) for k, v in zip(node.keys, node.values, strict=True) if k is not None
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return node.attr
    raise NotWrittenDown(ast.unparse(node))
