"""`grpo-ext merge`: merge an adapter into its base, and check the merged model against the two."""

import argparse
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from grpo_ext.commands.runs import Trained, find_trained, loading
from grpo_ext.config.adapters import Base, base_of
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.loading import load_policy, load_tokenizer_of
from grpo_ext.trainer.checkpoints.identity import write_record
from grpo_ext.trainer.checkpoints.manifest import share

_TOLERANCE = 1e-4
"""Largest difference between logits, relative to the largest logit, of a merge in float32 that is kept."""
_ROUNDING = 16
"""The same of its rounding to `dtype`, in epsilons of the dtype; 3 were the most seen of adapters of any size."""
FLOAT64_PARAMETERS = 1e9
"""Largest number of parameters for which logits are compared in float64, free of rounding by the forward pass."""


def merge(trained: Trained, output: Path, dtype: str = "float32") -> tuple[float, float]:
    """Write the merged model and its tokenizer. The weights are summed in float32, then cast to `dtype`.

    Returns:
        The largest difference between logits of the written model and of adapter and base, and the largest logit.

    Raises:
        ConfigError: the model has no adapter, its base is quantized, `output` is not empty, or the logits differ.
    """
    base = base_of(trained.model)
    if base is None:
        reason = "it is a plain model already: it has no adapter to merge"
        raise ConfigError([Problem("RUN", trained.model, reason, "Name a run that trained an adapter.")])
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError([Problem("--output", str(output), "it is not empty", "Name a folder that is new or empty.")])
    with loading(trained.model):
        tokenizer = load_tokenizer_of(trained.model, **trained.loading)
        _check_not_quantized(trained, base)
        model = load_policy(trained.model, tokenizer, base=base, dtype=torch.float32, **trained.loading)
    ids = torch.arange(min(64, len(tokenizer)))[None] * (len(tokenizer) // 64 or 1)
    wide = torch.float64 if model.num_parameters() <= FLOAT64_PARAMETERS else torch.float32
    expected = _logits(cast(Any, model).to(wide), ids)
    kind, largest = getattr(torch, dtype), expected.abs().max().item()
    merged = model.float().merge_and_unload()
    _compare(_logits(merged.to(wide), ids), expected, _TOLERANCE, trained.model)
    merged.to(kind).save_pretrained(output)
    tokenizer.save_pretrained(output)
    if trained.record:
        write_record(output, trained.record)
    share(path for path in output.iterdir() if path.is_file())
    del model, merged
    written = AutoModelForCausalLM.from_pretrained(output, dtype=wide, **trained.loading).eval()
    try:
        bound = max(_TOLERANCE, _ROUNDING * torch.finfo(kind).eps)
        return _compare(_logits(written, ids), expected, bound, trained.model), largest
    except ConfigError:
        shutil.rmtree(output)
        raise


def _compare(logits: torch.Tensor, expected: torch.Tensor, bound: float, name: str) -> float:
    """Return the largest difference between logits."""
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= bound * largest:
        reason = (
            f"the logits of the merged model differ by {difference:.1e} from those of adapter and base (the largest "
            f"is {largest:.1f}), so it was not kept"
        )
        raise ConfigError([Problem("RUN", name, reason, "Serve the adapter on its base instead.")])
    return difference


def _check_not_quantized(trained: Trained, base: Base) -> None:
    config = AutoConfig.from_pretrained(base.model, revision=base.revision, **trained.loading)
    if getattr(config, "quantization_config", None) is not None:
        reason = f"{base.model}, its base, is quantized: rounding the sum to its grid would lose the adapter"
        cure = "Name the model it was quantized from as base_model_name_or_path in adapter_config.json."
        raise ConfigError([Problem(trained.model, ABSENT, reason, cure)])


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.double()


def run(options: argparse.Namespace) -> int:
    """Merge, and print what was checked."""
    disable_progress_bar()
    trained = find_trained(options.run, trust_remote_code=options.trust_remote_code)
    output = options.output or Path(f"{options.run.rstrip('/').rsplit('/', 1)[-1]}-merged")
    if options.output is None and Path(options.run).expanduser().is_dir():
        output = Path(options.run).expanduser().resolve().parent / output.name
    difference, largest = merge(trained, output, options.dtype)
    print(f"{trained.model} and its base, merged in float32 and written in {options.dtype}: {output}")
    relative = difference / largest
    print(f"Logits differ from those of adapter and base by at most {difference:.1e}, {relative:.1e} of the largest.")
    if trained.record.get("load_in_4bit") or trained.record.get("load_in_8bit"):
        print("Note: the adapter was trained on the quantized base and is merged into the unquantized one.")
    if options.dtype == "float32":
        print("--dtype bfloat16 halves the files and rounds the weights.")
    return 0
