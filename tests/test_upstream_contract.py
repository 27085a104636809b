"""What grpo-ext relies on inside transformers, accelerate and peft, pinned: a release that changes it fails here.

One hash for each source that has been read, oldest release first, over all the releases that pyproject.toml allows.
After reading what changed: `python tests/test_upstream_contract.py` prints the hashes of what is installed.
"""

import hashlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import accelerate
import accelerate.commands.launch
import accelerate.utils.environment
import accelerate.utils.launch
import peft
import pytest
import torch
import transformers
from accelerate.utils import other
from packaging.requirements import Requirement
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import cache_utils, generation, masking_utils, trainer_pt_utils
from transformers.integrations import deepspeed, fsdp, sdpa_attention
from transformers.models.llama import modeling_llama

ROOT = Path(__file__).parent.parent

TARGETS = {
    # packing/attention.py, rollout/prompt_cache.py: attention of our own, chosen by the config, with its mask
    "AttentionInterface": transformers.AttentionInterface,
    "AttentionMaskInterface": masking_utils.AttentionMaskInterface,
    "PreTrainedConfig._attn_implementation": transformers.PreTrainedConfig._attn_implementation.fset,
    "create_causal_mask": masking_utils.create_causal_mask,
    "sdpa_attention_forward": sdpa_attention.sdpa_attention_forward,
    "LlamaAttention.forward": modeling_llama.LlamaAttention.forward,
    # rollout/prompt_cache.py: layers that stand in for these
    "DynamicLayer": cache_utils.DynamicLayer,
    "DynamicCache": transformers.DynamicCache,
    # rollout/decoding.py: in the place of generate's own decoding
    "GenerationMixin.generate": transformers.GenerationMixin.generate,
    "GenerationMixin._sample": transformers.GenerationMixin._sample,
    "EosTokenCriteria": generation.EosTokenCriteria,
    "MaxLengthCriteria": generation.MaxLengthCriteria,
    "is_fsdp_managed_module": fsdp.is_fsdp_managed_module,
    # rewards/models/loaded_model.py: weights that no sharding touches
    "is_deepspeed_zero3_enabled": deepspeed.is_deepspeed_zero3_enabled,
    # config/: what TRL's config inherits, which sets up the processes
    "TrainingArguments._setup_devices": transformers.TrainingArguments._setup_devices,
    "TrainingArguments.__post_init__": transformers.TrainingArguments.__post_init__,
    "AcceleratorConfig": trainer_pt_utils.AcceleratorConfig,
    # trainer/nonfinite.py, trainer/leaving.py: what comes before and after the optimizer's step
    "Trainer._run_epoch": transformers.Trainer._run_epoch,
    "Trainer._clip_grad_norm": transformers.Trainer._clip_grad_norm,
    "Trainer._get_grad_norm": transformers.Trainer._get_grad_norm,
    "Trainer._maybe_log_save_evaluate": transformers.Trainer._maybe_log_save_evaluate,
    # config/launch.py, commands/train.py: which processes there are, and which accelerate starts
    "get_cpu_distributed_information": accelerate.utils.environment.get_cpu_distributed_information,
    "PartialState._prepare_backend": accelerate.PartialState._prepare_backend,
    "PartialState.destroy_process_group": accelerate.PartialState.destroy_process_group,
    "prepare_simple_launcher_cmd_env": accelerate.utils.launch.prepare_simple_launcher_cmd_env,
    "launch_command": accelerate.commands.launch.launch_command,
    "get_free_port": other.get_free_port,
    # rollout/vllm/weights.py: an adapter's weights, merged one module at a time
    "BaseTunerLayer.merged": BaseTunerLayer.merged,
    "LoraLinear.merge": peft.tuners.lora.Linear.merge,
    "LoraLinear.unmerge": peft.tuners.lora.Linear.unmerge,
    "PeftModel.get_base_model": peft.PeftModel.get_base_model,
}

CONTRACT = {
    "AttentionInterface": "b5b1ad306aefecfb 6ed7bf8337578f6a",
    "AttentionMaskInterface": "11f19252e5a79327",
    "PreTrainedConfig._attn_implementation": "d21c7d26e7de323d",
    "create_causal_mask": "42c7dbd437493f22 08e44eae3326b5d7 bd4450cc85d63644 341ee68974b114b3 143e39d36ae2d186",
    "sdpa_attention_forward": "9123c5d5d025ecb2 2519bd4da7bc7181 6a965ca3df2d5f08 e3d016070b6ac957 9be3d6b1f79abc00",
    "LlamaAttention.forward": "dc6807936ef6103d e080b5cc468cd0a5",
    "DynamicLayer": "49b2b928e3e23c27 56c0a116b1284680 7c80a0e9206b659b e4b400811fcb213c 7c54e5066879eb98",
    "DynamicCache": "46b204422f1d9ca5 68900f2f4862df04 1b4b2abd366b3ebe 74ee392136820b9b 3f51af07f042df61",
    "GenerationMixin.generate": "666c79106d06e6e3 f314a5930a6eab07 1f9a789cfb7338fe a469558165533afe bb6628b88fc66ed8",
    "GenerationMixin._sample": "c924f0a5ed15d3cc 9f5d2e3906df6579 a6e4d9f96a55d11b",
    "EosTokenCriteria": "62543ca802423602 8750aa0374459e07 167fa1a21037b951",
    "MaxLengthCriteria": "e59fa990db1b8f41 08155e4f8bba46f4 4b90b9fcdbcfc698",
    "is_fsdp_managed_module": "a0e83f72227a7c16 1ee8f635d6308a19",
    "is_deepspeed_zero3_enabled": "3e3f9ededb3d709a",
    "TrainingArguments._setup_devices": "4ed7bb1b14e5050d 4a6325d187d508f5 27905a47c35fdc82",
    "TrainingArguments.__post_init__": "cfedc2a22f4fcaf4 c2e905ca748d31fe f3f6772df914c89a",
    "AcceleratorConfig": "28bbd8cfc414cdfb",
    "Trainer._run_epoch": "c704c082dae4b742 ebe374933064ecd6 31aff00f34c302a2",
    "Trainer._clip_grad_norm": "ec94a9cde081a825 ebfa9dc91d3088ab",
    "Trainer._get_grad_norm": "159a31c7dfa2beaa 913ba6f52f074d10",
    "Trainer._maybe_log_save_evaluate": "af101534f0f7b2d7",
    "get_cpu_distributed_information": "df9c75c1e5f9236a",
    "PartialState._prepare_backend": "a6ec770a6a4e8194 e81abbeaafee66d9",
    "PartialState.destroy_process_group": "8a9c849d33ac9548",
    "prepare_simple_launcher_cmd_env": "1cf2be051c3d5d91 07506e01824ad4de",
    "launch_command": "11fa46fe03e8d09e",
    "get_free_port": "4ef9f79d10627e64",
    "BaseTunerLayer.merged": "b26aaee2ed1de8b5",
    "LoraLinear.merge": "4fd45bf818b48207 660acdb14ddefcc6",
    "LoraLinear.unmerge": "7b9ea81fbe6e5077",
    "PeftModel.get_base_model": "d4e5baa9c5da5bae",
}


def fingerprint(target) -> str:
    """Hash of the source, the signature included."""
    function = inspect.unwrap(getattr(target, "func", getattr(target, "fget", target)))  # of properties, cached or not
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_relied_on_is_what_was_read(name):
    now = fingerprint(TARGETS[name])
    assert now in CONTRACT[name].split(), f"{name} has changed: read it and whoever relies on it, then add {now}"


def test_the_attention_of_a_config_is_an_attribute_of_that_name():
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=1, attn_implementation="eager")
    config._attn_implementation_internal = "grpo_ext_of_the_test"
    assert config._attn_implementation == "grpo_ext_of_the_test"


def test_deepspeeds_config_is_held_under_the_name_that_is_emptied():
    assert "_hf_deepspeed_config_weak_ref" in inspect.getsource(deepspeed.is_deepspeed_zero3_enabled)


def arguments(call) -> list[str]:
    return [argument.name for argument in call.default._schema.arguments]


def test_kernels_of_torch_take_what_they_are_given():
    """packing/flash.py and packing/kernels.py call them by position."""
    aten = torch.ops.aten
    forward, backward = aten._flash_attention_forward, aten._flash_attention_backward
    causal = ["dropout_p", "is_causal"]
    ragged = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    assert arguments(forward)[:10] == ["query", "key", "value", *ragged, *causal, "return_debug_mask"]
    assert arguments(backward)[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    assert arguments(cpu) == ["query", "key", "value", *causal, "attn_mask", "scale"]
    cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = ["grad_out", "query", "key", "value", "out", "logsumexp", *causal, "attn_mask", "scale"]
    assert arguments(cpu_backward) == given


def test_make_test_lowest_pins_every_dependency():
    """But the stubs of types, which have no lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(line for name in ("agents", "dev", "json", "qlora", "tasks", "test") for line in extras[name]),
    ]
    names = {Requirement(line).name for line in asked} - {"grpo-ext", "types-PyYAML"}
    pins = subprocess.run([sys.executable, ROOT / ".ci" / "lowest.py"], capture_output=True, text=True, check=True)
    assert {line.partition("==")[0] for line in pins.stdout.split()} == names


if __name__ == "__main__":
    for key, target in TARGETS.items():
        print(key, fingerprint(target))
