"""The model card, and the hub: the run's repository, and a branch for each checkpoint."""

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import httpx
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment
from torch import Tensor
from transformers import TrainerState
from transformers.utils import PushInProgress
from transformers.utils.hub import hf_api
from trl.trainer.utils import get_comet_experiment_url, get_trackio_space_url

from grpo_ext.bounded import write_text
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.objective.objective import Objective
from grpo_ext.trainer.checkpoints.finish import CARD
from grpo_ext.trainer.checkpoints.identity import Record

logger = logging.getLogger(__name__)

_SHOWN = re.compile(r"(eval_)?(reward|rewards/.*/mean|completions/(mean_length|clipped_ratio)|kl)")
"""Logged metrics that a card shows."""
ONLY_FOR_RESUME = ["*.pt", "*.pth", "training_args.bin", "trainer_state.json", "manifest.json", "*/*"]
"""Files of a checkpoint that a branch of the hub leaves out."""


class CardRun(Protocol):
    """The members of a trainer that a card or a push reads."""

    args: GRPOExtConfig
    model: Any
    hub_model_id: Any
    objective: Objective
    push_in_progress: Any
    reward_func_names: list[str]
    reward_weights: Tensor
    state: TrainerState
    _tag_names: list[str]


def write(
    run: CardRun,
    folder: Path,
    record: Record,
    model_name: str | None = None,
    tags: str | Sequence[str] | None = None,
    dataset_name: str | None = None,
    **_: object,
) -> None:
    """Write README.md into a folder; takes the keywords of TRL's `create_model_card`."""
    adapters, address = getattr(run.model, "peft_config", {}), str(run.hub_model_id or run.args.output_dir)
    text = model_card(
        model_name or Path(address).name,
        address=address,
        record={"dataset_name": dataset_name, **record},
        objective=run.objective,
        rewards=dict(zip(run.reward_func_names, run.reward_weights.tolist(), strict=True)),
        log=run.state.log_history,
        adapter_of=adapters["default"].base_model_name_or_path if "default" in adapters else None,
        steps=(run.state.global_step, run.state.max_steps),
        tags=[*run._tag_names, *([tags] if isinstance(tags, str) else tags or ())],
        tracked=_tracked(),
    )
    write_text(folder / CARD, text)


def model_card(
    name: str,
    *,
    address: str,
    record: Record,
    objective: Objective,
    adapter_of: str | None,
    tags: Sequence[str],
    **facts: Any,
) -> str:
    """Return the text of a card.

    Args:
        name: the model's.
        address: where it is loaded from.
        record: what defines the run (`recipe.json`).
        objective: the loss.
        adapter_of: the base model of an adapter.
        tags: of the metadata.
        facts: further variables of the template: `rewards` (name to weight), `log`, `steps` (completed, planned) and
            `tracked` (addresses at experiment trackers).
    """
    start = record.get("model_name_or_path") or adapter_of or "a model object whose name is not known"
    base = adapter_of or start
    metadata = ModelCardData(
        base_model=base if on_the_hub(base) else None,
        datasets=[source for source in _sources(record) if on_the_hub(source)] or None,
        library_name="peft" if adapter_of else "transformers",
        model_name=name,
        pipeline_tag="text-generation",
        tags=sorted({"generated_from_trainer", *tags}),
    )
    functions = {"link": _link, "keywords": _keywords, "data": _data(record), "measured": _measured(facts["log"])}
    about = {"name": name, "address": address, "start": start, "base": base, "adapter": adapter_of is not None}
    paper = re.sub(r"(\d{4}\.\d{5})", r"[\1](https://huggingface.co/papers/\1)", objective.row.paper)
    template = files("grpo_ext.trainer").joinpath("card.md.jinja").read_text(encoding="utf-8")
    card = Environment(keep_trailing_newline=True).from_string(template)
    known = defaultdict(lambda: None, record)
    given = {"metadata": metadata.to_yaml(), "record": known, "objective": objective, "paper": paper}
    return card.render(**facts, **functions, **about, **given)


def on_the_hub(name: object) -> bool:
    """Return whether a name is that of a repository, not of a local folder or a generated task."""
    if not isinstance(name, str) or "/" not in name or Path(name).exists() or Path(name).suffix in (".jsonl", ".csv"):
        return False
    if name.startswith(("quickstart/", "reasoning_gym/", ".", "~")):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _link(name: str, kind: str = "") -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})" if on_the_hub(name) else f"`{name}`"


def _keywords(values: Record) -> str:
    return "".join(f", {key}={value!r}" for key, value in values.items() if value is not None)


def _sources(record: Record) -> list[str]:
    mixed = [entry["path"] for entry in record.get("datasets") or () if isinstance(entry, Mapping)]
    return mixed or [name for name in [record.get("dataset_name")] if name]


def _data(record: Record) -> str:
    names = ", ".join(_link(name, "datasets/") for name in _sources(record)) or "Passed in by a script."
    parts = [str(record[key]) for key in ("dataset_config", "dataset_train_split") if record.get(key)]
    rows = (record.get("data") or "").partition(",")[0]
    kept = [f"{key} {record[key]}" for key in ("min_pass_rate", "max_pass_rate") if record.get(key) is not None]
    return ", ".join([names, *(parts if record.get("dataset_name") else []), *([rows] if rows else []), *kept])


def _measured(log: Sequence[Record]) -> list[tuple[str, str, str, int]]:
    """Return the metrics that a card shows: name, first and last value, and the step of the last."""
    names = dict.fromkeys(name for row in log for name in row if _SHOWN.fullmatch(name))
    known = {name: [row for row in log if isinstance(row.get(name), int | float)] for name in names}
    return [(n, f"{x[0][n]:.4g}", f"{x[-1][n]:.4g}", x[-1]["step"]) for n, x in known.items() if x]


def _tracked() -> list[str]:
    """Return the addresses of the run at experiment trackers."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return [url for url in (getattr(run, "url", None), get_trackio_space_url(), get_comet_experiment_url()) if url]


# The hub.


def make_repository(args: GRPOExtConfig) -> None:
    """Create the repository that a run pushes to, unless it exists.

    Raises:
        ConfigError: the hub cannot be reached, or refuses.
    """
    name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
    try:
        hf_api().create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
    except (httpx.HTTPError, OSError, ValueError) as error:
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if getattr(error, "response", None) is not None or isinstance(error, ValueError):
            reason = f"the hub does not accept the repository {name!r} ({detail})"
            cure = "Check hub_model_id and the token (hf auth whoami), or set push_to_hub: false."
        else:
            reason = f"the hub cannot be reached ({detail}), so a push would fail"
            cure = "Check this machine's network and HF_ENDPOINT, or set push_to_hub: false and run `hf upload` later."
        raise ConfigError([Problem("push_to_hub", True, reason, cure)]) from error


def make_branch(run: CardRun, branch: str | None) -> None:
    """Create a branch of the run's repository, unless it exists; a push to a missing branch would fail."""
    if branch is not None:
        hf_api().create_branch(str(run.hub_model_id), branch=branch, token=run.args.hub_token, exist_ok=True)


def push_revision(run: CardRun, checkpoint: Path) -> None:
    """Upload the model of a checkpoint to its own branch in the background; the branch has Open-R1's name."""
    step = run.state.global_step
    branch = f"{run.args.hub_revision or 'main'}-step-{step:09d}"
    job = hf_api().run_as_future(partial(_push, run, checkpoint, branch, step))
    job.add_done_callback(partial(_warn_of_failure, branch))
    if run.push_in_progress is None:
        run.push_in_progress = PushInProgress()
    run.push_in_progress.jobs.append(job)


def _push(run: CardRun, checkpoint: Path, branch: str, step: int) -> None:
    make_branch(run, branch)
    hf_api().upload_folder(
        repo_id=str(run.hub_model_id),
        folder_path=checkpoint,
        revision=branch,
        commit_message=f"Step {step}",
        token=run.args.hub_token,
        ignore_patterns=ONLY_FOR_RESUME,
    )


def _warn_of_failure(branch: str, job: "Future[None]") -> None:
    if (error := job.exception()) is not None:
        logger.warning(f"revision {branch} could not be pushed: {error}")
