"""Facts of a run in words, and the settings that differ between runs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ext.config.setting import Change
from grpo_ext.config.settings import settings_changed_by
from grpo_ext.report.reading import RunFolder

_OWN_PATH = re.compile(r"(?<![\w.])(?:~|/)[^\s'\",]*/([^/\s'\",]+)")
"""A path of the machine; only its last part is shown."""

_Record = Mapping[str, Any]


def facts(run: RunFolder) -> dict[str, str]:
    """Return names and values of the facts on record."""
    r, o = run.record, run.objective
    end = (run.finished or {}).get("max_steps") or r.get("max_steps")
    planned = f" of {end}" if isinstance(end, int) and end > 0 else ""
    state = "" if run.step == end else ", not finished according to this folder"
    beta = o.get("beta")
    kl = f"beta {beta:g}, {o.get('kl')} in the {o.get('kl_placement')}" if isinstance(beta, int | float) else None
    axes = ("advantage", "combination", "aggregation")
    values = {
        "steps": f"{run.step}{planned}{', finished' if run.finished else state}",
        "loss": o.get("loss_type"),
        "formula, minimised": o.get("formula"),
        "paper": o.get("paper"),
        ", ".join(axes): ", ".join(str(o[axis]) for axis in axes if o.get(axis) is not None),
        "KL": kl,
        "loss's options": _options(o.get("options")),
        "rewards": "; ".join(_reward(run, name, weight) for name, weight in run.rewards.items()),
        "model": r.get("model_name_or_path"),
        "data": _data(r),
        "sampling": _named(r, ("temperature", "top_p", "top_k", "num_generations", "max_completion_length")),
        "optimizer": _named(r, ("optim", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm")),
        "completions a step": r.get("rows_per_step"),
        "seed": r.get("seed"),
        "machine": _machine(r),
        "versions": ", ".join(f"{key[8:]} {r[key]}" for key in sorted(r) if key.startswith("version.")),
    }
    return {name: without_paths(str(value)) for name, value in values.items() if value not in (None, "")}


def without_paths(text: str) -> str:
    """Return `text` with each path of the machine shortened to its last part."""
    return _OWN_PATH.sub(lambda path: f"…/{path[1]}", text)


def shown_setting(run: RunFolder, key: str) -> str:
    """Return a setting as text; empty if it is None or not on record."""
    value = run.record.get(key)
    return "" if value is None else without_paths(str(value))


def differing(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs and may change what is trained."""
    keys = sorted({key for run in runs for key in run.record} - settings_changed_by(Change.NOTHING))
    rows = [(key, [shown_setting(run, key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _named(content: _Record, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {content[key]}" for key in keys if content.get(key) is not None)


def _options(options: object) -> str:
    return _named(options, list(options)) if isinstance(options, Mapping) else ""


def _reward(run: RunFolder, name: str, weight: float | None) -> str:
    options = _options(run.record.get(f"rewards.{name}.kwargs"))
    return name + ("" if weight is None else f" x {weight:g}") + (f" ({options})" if options else "")


def _data(record: _Record) -> str:
    mixed = [str(part.get("path")) for part in record.get("datasets") or () if isinstance(part, Mapping)]
    names = mixed or [str(record[key]) for key in ("dataset_name", "dataset_config") if record.get(key)]
    rows = str(record.get("data") or "").partition(",")[0]
    return ", ".join([*names, *([rows] if rows else [])])


def _machine(record: _Record) -> str:
    """Return processes, device and engine of a run."""
    if not record:
        return ""
    count = record.get("world_size")
    parts = [f"{count} process{'' if count == 1 else 'es'}"] if count else []
    parts += ["CPU"] if record.get("use_cpu") else []
    parts += [name for name in ("bf16", "fp16") if record.get(name)]
    parts += [f"sharded by {record['engine']}"] if record.get("engine") not in (None, "none") else []
    parts += [f"vLLM, {record.get('vllm_mode')}"] if record.get("use_vllm") else ["completions by transformers"]
    return ", ".join(parts)
