"""`grpo-ext merge`: an adapter and its base as one plain model, checked against the two."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_ext.commands.runs import Trained, find
from grpo_ext.config.adapters import Base, base_of
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.policy import load_policy, load_tokenizer_of
from grpo_ext.trainer.checkpoints.identity import write_record

ALLOWED = 1e-4
"""Largest difference of a logit, as a share of the largest logit, with which a merged model is kept."""
SMALL = 1e9
"""Parameters up to which logits are compared in float64, which shows the rounding of the sums alone."""


def merge(trained: Trained, output: Path, dtype: str = "float32") -> tuple[float, float]:
    """Write the merged model with its tokenizer; the sums are made in float32, whatever the dtype it is written in.

    Returns:
        The largest difference between logits of what was written and of adapter and base, and the largest logit.

    Raises:
        ConfigError: no adapter, or its base is quantized, or `output` holds something, or the two differ.
    """
    base = base_of(trained.model)
    if base is None:
        raise ConfigError([f"{trained.model} is a plain model already: it has no adapter to merge."])
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError([f"--output {output}: there is something already. Name a folder that is new or empty."])
    tokenizer = load_tokenizer_of(trained.model, **trained.loading)
    _check_not_quantized(trained, base)
    model = load_policy(trained.model, tokenizer, base=base, dtype=torch.float32, **trained.loading)
    ids = torch.arange(min(64, len(tokenizer)))[None] * (len(tokenizer) // 64 or 1)
    wide = torch.float64 if model.num_parameters() <= SMALL else torch.float32
    expected = _logits(model.to(wide), ids)
    merged = model.float().merge_and_unload().to(getattr(torch, dtype))
    merged.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if trained.record:
        write_record(output, trained.record)
    del model, merged
    written = AutoModelForCausalLM.from_pretrained(output, dtype=wide, **trained.loading).eval()
    difference, largest = (_logits(written, ids) - expected).abs().max().item(), expected.abs().max().item()
    if dtype == "float32" and not difference <= ALLOWED * largest:
        shutil.rmtree(output)
        raise ConfigError(
            [
                f"{trained.model}: merged, its logits differ by {difference:.1e} from those of adapter and base (the "
                f"largest is {largest:.1f}), so that it was not kept. Serve the adapter on its base instead."
            ]
        )
    return difference, largest


def _check_not_quantized(trained: Trained, base: Base) -> None:
    config = AutoConfig.from_pretrained(base.model, revision=base.revision, **trained.loading)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            [
                f"{base.model}, the base of {trained.model}, is quantized: a sum on its grid would lose the adapter. "
                "Name the model it was quantized from as base_model_name_or_path in adapter_config.json."
            ]
        )


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.double()


def run(argv: Sequence[str]) -> int:
    """Merge, and say what was checked; 2 where that cannot be done."""
    parser = argparse.ArgumentParser(prog="grpo-ext merge", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="an output_dir, a checkpoint, an adapter's folder or hub id")
    parser.add_argument("--output", metavar="DIR", type=Path, help="where the model goes (default: RUN-merged)")
    choices = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=choices, default="float32", help="of the weights (default: %(default)s)")
    options = parser.parse_args(argv)
    disable_progress_bar()
    try:
        trained = find(options.run)
        output = options.output or Path(f"{options.run.rstrip('/').rsplit('/', 1)[-1]}-merged")
        if options.output is None and Path(options.run).expanduser().is_dir():
            output = Path(options.run).expanduser().resolve().parent / output.name
        difference, largest = merge(trained, output, options.dtype)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{trained.model} and its base, merged in float32 and written in {options.dtype}: {output}")
    relative = difference / largest
    print(f"Logits differ from those of adapter and base by {difference:.1e} at most, {relative:.1e} of the largest.")
    if trained.record.get("load_in_4bit") or trained.record.get("load_in_8bit"):
        print("Note: it was trained on the quantized base; this is the sum with the unquantized one.")
    if options.dtype == "float32":
        print("--dtype bfloat16 halves the files and rounds the sums.")
    return 0
