"""The hub: a branch for each checkpoint, and where a run can be looked at."""

import logging
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from transformers.utils import PushInProgress
from transformers.utils.hub import hf_api
from trl.trainer.utils import get_comet_experiment_url, get_trackio_space_url

from grpo_ext.errors import ConfigError

logger = logging.getLogger(__name__)

OF_A_RESUME = ["*.pt", "*.pth", "training_args.bin", "trainer_state.json", "manifest.json", "*/*"]
"""What of a checkpoint a model's user has no need of."""


def make_repository(args: Any) -> None:
    """Create the repository that a run pushes to, unless it is there.

    Raises:
        ConfigError: the hub cannot be reached, or refuses.
    """
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        hf_api().create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if getattr(error, "response", None) is not None or isinstance(error, ValueError):
            problem = f"the hub does not accept the repository {name!r} ({reason}). Check hub_model_id and the token"
            cure = "(hf auth whoami), or set push_to_hub: false."
        else:
            problem = f"the hub cannot be reached ({reason}), so nothing could be pushed. Check this machine's network"
            cure = "and HF_ENDPOINT, or set push_to_hub: false and run `hf upload` afterwards."
        raise ConfigError([f"push_to_hub=True: {problem} {cure}"]) from error


def make_branch(trainer: Any, branch: str | None) -> None:
    """Create a branch of the run's repository, unless it is there; pushing to one that is not fails."""
    if branch is not None:
        hf_api().create_branch(trainer.hub_model_id, branch=branch, token=trainer.args.hub_token, exist_ok=True)


def revision_of(trainer: Any) -> str:
    """The branch of this step's checkpoint, as Open-R1 calls it."""
    return f"{trainer.args.hub_revision or 'main'}-step-{trainer.state.global_step:09d}"


def push_revision(trainer: Any, checkpoint: Path) -> None:
    """Upload the model of a checkpoint to a branch of its own, in the background."""
    branch, step = revision_of(trainer), trainer.state.global_step
    job = hf_api().run_as_future(partial(_push, trainer, checkpoint, branch, step))
    job.add_done_callback(partial(_tell, branch))
    if trainer.push_in_progress is None:
        trainer.push_in_progress = PushInProgress()
    trainer.push_in_progress.jobs.append(job)


def _push(trainer: Any, checkpoint: Path, branch: str, step: int) -> None:
    make_branch(trainer, branch)
    hf_api().upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=checkpoint,
        revision=branch,
        commit_message=f"Step {step}",
        token=trainer.args.hub_token,
        ignore_patterns=OF_A_RESUME,
    )


def _tell(branch: str, job: "Future[None]") -> None:
    if (error := job.exception()) is not None:
        logger.warning(f"revision {branch} could not be pushed: {error}")


def tracked() -> list[str]:
    """Addresses of the run at the trackers that have one."""
    wandb: Any = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    return [url for url in (getattr(run, "url", None), get_trackio_space_url(), get_comet_experiment_url()) if url]
