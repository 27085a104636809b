"""The model card: what was trained from what, by which loss, with what measured, and how to ask it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from grpo_ext.objective.objective import Objective

FIGURES = re.compile(r"(eval_)?(reward|rewards/.*/mean|completions/(mean_length|clipped_ratio)|kl)")
"""What of the log a card shows."""


def on_the_hub(name: Any) -> bool:
    """Whether a name is a repository's, and not a folder here nor a task that is made."""
    if not isinstance(name, str) or "/" not in name or Path(name).exists() or Path(name).suffix in (".jsonl", ".csv"):
        return False
    if name.startswith(("quickstart/", "reasoning_gym/", ".", "~")):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def model_card(
    name: str,
    *,
    address: str,
    record: Mapping[str, Any],
    objective: Objective,
    rewards: Mapping[str, float],
    log: Sequence[Mapping[str, Any]],
    adapter_of: str | None,
    steps: tuple[int, int],
    tags: Sequence[str],
    tracked: Sequence[str] = (),
) -> str:
    """The whole file.

    Args:
        name: of the model.
        address: its repository or folder.
        record: what defines the run (`recipe.json`).
        objective: the loss.
        rewards: weights by name.
        log: `log_history`.
        adapter_of: the base, of an adapter.
        steps: made, and planned.
        tags: of the hub.
        tracked: where the run can be looked at.
    """
    start = record.get("model_name_or_path") or adapter_of or "a model handed in, whose name is not known"
    base = adapter_of or start
    data = ModelCardData(
        base_model=base if on_the_hub(base) else None,
        datasets=[source for source in _sources(record) if on_the_hub(source)] or None,
        library_name="peft" if adapter_of else "transformers",
        model_name=name,
        pipeline_tag="text-generation",
        tags=sorted({"generated_from_trainer", *tags}),
    )
    parts = {
        f"# {name}": _summary(start, base, objective, adapter_of is not None, steps),
        "## How to ask it": _asking(address, record, adapter_of is not None),
        "## Data": _data(record),
        "## Loss": _loss(objective),
        "## Rewards": _rewards(rewards, record),
        "## Training": _training(record, steps, tracked),
        "## Measured": _measured(log),
        "## Versions": ", ".join(f"{key[8:]} {record[key]}" for key in sorted(record) if key.startswith("version.")),
    }
    return (
        f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(f"{title}\n\n{text}" for title, text in parts.items()) + "\n"
    )


def _link(name: str, kind: str = "") -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})" if on_the_hub(name) else f"`{name}`"


def _summary(start: str, base: str, objective: Objective, adapter: bool, steps: tuple[int, int]) -> str:
    further = f", which goes on from {_link(start)}" if adapter and start != base else ""
    what = f"An adapter for {_link(base)}{further}" if adapter else _link(start)
    end = "" if steps[0] >= steps[1] else f" It is the state after {steps[0]} of {steps[1]} steps."
    return (
        f"{what}, trained by reinforcement learning with the loss `{objective.loss_type}` of "
        f"grpo-ext on [TRL](https://github.com/huggingface/trl).{end}"
    )


def _asking(address: str, record: Mapping[str, Any], adapter: bool) -> str:
    chat, system = record.get("conversational"), record.get("system_prompt")
    loader = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    source = "peft" if adapter else "transformers"
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "..."}]
    keywords = "".join(f", {key}={value!r}" for key, value in (record.get("chat_template_kwargs") or {}).items())
    ask = (
        f"inputs = tokenizer.apply_chat_template(\n    {messages!r},\n    add_generation_prompt=True, return_dict=True"
    )
    ask += f', return_tensors="pt"{keywords},\n)'
    if chat is False:
        ask = 'inputs = tokenizer("...", return_tensors="pt")'
    sampled = {key: record[key] for key in ("temperature", "top_p", "top_k", "min_p") if record.get(key) is not None}
    limit = {"do_sample": True, "max_new_tokens": record.get("max_completion_length"), **sampled}
    options = ", ".join(f"{key}={value!r}" for key, value in limit.items() if value is not None)
    imports = ["from transformers import AutoTokenizer"] if adapter else []
    imports.append(f"from {source} import {loader}" + ("" if adapter else ", AutoTokenizer"))
    how = "as plain text, without a chat template" if chat is False else "as a chat"
    prompt = f", with the system prompt `{system}`" if system and chat is not False else ", without a system prompt"
    said = f"Training asked it {how}{'' if chat is False else prompt}, and sampled as here:"
    code = [
        *sorted(imports),
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{address}")',
        f'model = {loader}.from_pretrained("{address}")',
        ask,
        f"ids = model.generate(**inputs, {options})",
        'print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "\n".join([said, "", "```python", *code, "```"])


def _sources(record: Mapping[str, Any]) -> list[str]:
    mixed = [entry["path"] for entry in record.get("datasets") or () if isinstance(entry, Mapping)]
    return mixed or [name for name in [record.get("dataset_name")] if name]


def _data(record: Mapping[str, Any]) -> str:
    names = ", ".join(_link(name, "datasets/") for name in _sources(record)) or "Handed in by a script."
    of_it = [str(record[key]) for key in ("dataset_config", "dataset_train_split") if record.get(key)]
    single = record.get("dataset_name") and of_it
    rows = (record.get("data") or "").partition(",")[0]
    kept = [f"{key} {record[key]}" for key in ("min_pass_rate", "max_pass_rate") if record.get(key) is not None]
    return ", ".join([names, *(of_it if single else []), *([rows] if rows else []), *kept])


def _loss(objective: Objective) -> str:
    row = objective.row
    paper = re.sub(r"(\d{4}\.\d{5})", r"[\1](https://huggingface.co/papers/\1)", row.paper) or "of its own"
    lines = [f"`{objective.describe()}`", f"Minimised: `{row.formula or 'a function of its own'}`", f"Source: {paper}"]
    if departures := objective.departures():
        lines.append(f"Departures from that row: {'; '.join(departures)}.")
    return "\n\n".join(lines)


def _rewards(rewards: Mapping[str, float], record: Mapping[str, Any]) -> str:
    lines = ["| reward | weight | options |", "| --- | --- | --- |"]
    for name, weight in rewards.items():
        options = record.get(f"rewards.{name}.kwargs") or {}
        said = ", ".join(f"{key}: {value}" for key, value in options.items())
        lines.append(f"| `{name}` | {weight:g} | {said.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def _training(record: Mapping[str, Any], steps: tuple[int, int], tracked: Sequence[str]) -> str:
    keys = ("learning_rate", "lr_scheduler_type", "beta", "num_generations", "max_completion_length", "seed")
    facts = [f"{steps[0]} steps of {record.get('rows_per_step')} completions"]
    facts += [f"{key} {record[key]}" for key in keys if record.get(key) is not None]
    if record.get("lora_r") and record.get("use_peft"):
        facts.append(f"LoRA of rank {record['lora_r']}, alpha {record.get('lora_alpha')}")
    return ", ".join(facts) + "." + "".join(f" [The run]({url})." for url in tracked)


def _measured(log: Sequence[Mapping[str, Any]]) -> str:
    lines = list(_figures(log))
    if not lines:
        return "Nothing was logged."
    header = ["| figure | first | last | step |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [
            "Figures of the run's log: of training batches, and where they begin with `eval_` of the evaluation set.",
            "",
            *header,
            *lines,
        ]
    )


def _figures(log: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = dict.fromkeys(name for row in log for name in row if FIGURES.fullmatch(name))
    for name in names:
        rows = [row for row in log if isinstance(row.get(name), int | float)]
        if rows:
            yield f"| `{name}` | {rows[0][name]:.4g} | {rows[-1][name]:.4g} | {rows[-1]['step']} |"
