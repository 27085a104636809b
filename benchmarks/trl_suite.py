"""Run TRL's own tests of GRPO on GRPOExtTrainer, and on stock TRL beside it: `trl_suite.py CHECKOUT`.

CHECKOUT is a clone of huggingface/trl. Its tests load tiny models and a dataset from the hub; the same architectures
are built here at random, in a separate cache, without downloads. Tests whose models need a processor
are left out. Writes benchmarks/results/trl_suite.json: the tests that stock passes and grpo-ext does not.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "trl_suite.json"
TRAINER = "TRL_SUITE_TRAINER"
ORGANISATION = "trl-internal-testing"
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
MODELS = {  # name on the hub: configuration, head, chat template of TRL, further settings
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "CausalLM", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "CausalLM", "qwen3", {"head_dim": 8}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", "CausalLM", "qwen3", EXPERTS | {"head_dim": 8}),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "CausalLM", "llama3_2", {}),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "CausalLM", "qwen2_5", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "CausalLM", "gemma", {"head_dim": 8}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "SequenceClassification", "qwen2_5", {"num_labels": 1}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "SequenceClassification", "qwen3", {"num_labels": 1}),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "SequenceClassification", "llama3_2", {"num_labels": 1}),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
LEFT_OUT = "TestGRPOTrainerVLM or Slow or vllm or remote"
"""Tests that need a processor, a GPU, an engine or code from the hub."""


def tokenizer(template: str):
    """Bytes and a few special tokens, with one of TRL's chat templates."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*SPECIAL, *letters])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:3]})
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    return fast


def build_models(cache: Path) -> None:
    """Save each of MODELS where huggingface_hub looks for what it has downloaded."""
    import torch
    import transformers

    for name, (architecture, head, template, further) in MODELS.items():
        folder = cache / "hub" / f"models--{ORGANISATION}--{name}"
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0" * 40)
        words = tokenizer(template)
        ids = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
        config = getattr(transformers, f"{architecture}Config")(**SIZES, **ids, bos_token_id=None, **further)
        torch.manual_seed(0)
        getattr(transformers, f"{architecture}For{head}")(config).save_pretrained(snapshot)
        words.save_pretrained(snapshot)


def load_dataset(name: str, config: str | None = None, split: str | None = None, streaming: bool = False):
    """Stand in for `datasets.load_dataset` on TRL's test data: 17 and 2 short prompts."""
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    assert name == f"{ORGANISATION}/zen", name
    lines = [f"Beautiful is better than ugly, line {i}" for i in range(19)]
    prompts = [[{"role": "user", "content": line}] for line in lines] if "conversational" in str(config) else lines
    rows = {"train": prompts[:17], "test": prompts[17:]}
    sets = DatasetDict({key: Dataset.from_dict({"prompt": value}) for key, value in rows.items()})
    if streaming:
        sets = IterableDatasetDict({key: value.to_iterable_dataset() for key, value in sets.items()})
    return sets if split is None else sets[split]


# Used as a pytest plug-in, in the process that runs the tests.


def pytest_configure() -> None:
    """Replace what would download."""
    if TRAINER in os.environ:
        import datasets
        from trl import import_utils

        datasets.load_dataset = load_dataset
        for name in re.findall(r"is_\w+_available", Path("tests/testing_utils.py").read_text()):
            if not hasattr(import_utils, name):  # the tests are of another version than the one installed
                setattr(import_utils, name, lambda: False)


def pytest_collection_finish(session) -> None:
    """Give the test module our trainer and configuration, by TRL's names."""
    if os.environ.get(TRAINER) == "grpo_ext":
        from grpo_ext import GRPOExtConfig, GRPOExtTrainer

        for module in {item.module for item in session.items}:  # TRL's conftest sets use_cpu too late for our checks
            module.GRPOTrainer, module.GRPOConfig = GRPOExtTrainer, partial(GRPOExtConfig, use_cpu=True)


# Used as a command.


def outcomes(checkout: Path, trainer: str, cache: Path, further: list[str]) -> dict[str, str]:
    """Test: '' if it passed, 'skipped', or the last line of its error."""
    report = cache / f"{trainer}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "trl_suite", "-p", "no:cacheprovider"]
    command += ["-k", f"not ({LEFT_OUT})", "tests/test_grpo_trainer.py", f"--junitxml={report}", "-o", "addopts="]
    own = {TRAINER: trainer, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([*command, *further], cwd=checkout, env=os.environ | own | {"PYTHONPATH": path}, check=False)
    cases = ET.parse(report).iter("testcase")
    return {f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    failure = case.find("failure") if case.find("failure") is not None else case.find("error")
    return "" if failure is None else (failure.get("message") or "failed").strip()[:500]


def main() -> None:
    """Run both and write what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    options, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        build_models(Path(folder))
        alone = (
            Path(folder) / "checkout"
        )  # without its package, which Python would import in place of the installed one
        shutil.copytree(options.checkout / "tests", alone / "tests")
        stock, ours = (outcomes(alone, name, Path(folder), further) for name in ("trl", "grpo_ext"))
    passed = [name for name, outcome in stock.items() if outcome == ""]
    found = {
        "passed by stock TRL": len(passed),
        "of these, passed by grpo-ext": sum(ours[name] == "" for name in passed),
        "failed by stock TRL": sorted(name for name, outcome in stock.items() if outcome not in ("", "skipped")),
        "skipped": sum(outcome == "skipped" for outcome in stock.values()),
        "failed by grpo-ext alone": {name: ours[name] for name in passed if ours[name]},
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
