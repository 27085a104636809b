"""Every tuner of PEFT that takes a causal language model, and the initialisations and biases of LoRA."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from transformers import PreTrainedModel

from grpo_ext.versions import release
from support import tiny

TOKENS_LOST = release("transformers") >= (5, 24)
"""Whether PEFT generates without its virtual tokens."""
needs_virtual_tokens = pytest.mark.skipif(TOKENS_LOST, reason="PEFT generates without its virtual tokens")

LINEAR = ["q_proj", "v_proj"]
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}


def config(kind: str, **options: Any) -> Callable[[], PeftConfig]:
    return lambda: getattr(peft, f"{kind}Config")(**{**CAUSAL, **options})


def lora(**options: Any) -> Callable[[], PeftConfig]:
    return config("Lora", **{"r": 4, "target_modules": LINEAR, **options})


PROMPTS: dict[str, Any] = {"num_virtual_tokens": 4}
# Without LoftQ, which needs a GPU, AdaMSS, which needs scikit-learn, and Poly, whose forward needs task_ids.
TUNERS: dict[str, Callable[[], PeftConfig]] = {
    "lora": lora(),
    "lora gaussian": lora(init_lora_weights="gaussian"),
    "lora random": lora(init_lora_weights=False),
    "lora orthogonal": lora(init_lora_weights="orthogonal"),
    "lora pissa": lora(init_lora_weights="pissa"),
    "lora pissa_niter_2": lora(init_lora_weights="pissa_niter_2"),
    "lora olora": lora(init_lora_weights="olora"),
    "lora eva": lora(init_lora_weights="eva", eva_config=peft.EvaConfig()),
    "lora corda": lora(init_lora_weights="corda", corda_config=CordaConfig()),
    "lora mica": lora(init_lora_weights="mica"),
    "lora bias all": lora(bias="all"),
    "lora bias lora_only": lora(bias="lora_only"),
    "lora lora_bias": lora(lora_bias=True),
    "lora dora": lora(use_dora=True),
    "lora rslora": lora(use_rslora=True),
    "lora tokens": lora(trainable_token_indices=[5, 6, 7]),
    "lora embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "lora whole head": lora(modules_to_save=["lm_head"]),
    "lora parameters": lora(target_modules=[], target_parameters=["q_proj.weight"]),
    "adalora": config("AdaLora", target_modules=LINEAR, init_r=4, target_r=2, total_step=10),
    "adaption prompt": config("AdaptionPrompt", adapter_len=4, adapter_layers=2),
    "beft": config("Beft", target_modules=["v_proj"]),
    "boft": config("BOFT", target_modules=["q_proj"], boft_block_size=4),
    "boft bias": config("BOFT", target_modules=["q_proj"], boft_block_size=4, bias="all"),
    "c3a": config("C3A", target_modules=["q_proj"], block_size=8),
    "cartridge": config("Cartridge", **PROMPTS),
    "cpt": config("CPT", cpt_token_ids=[5, 6], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2]),
    "deft": config("Deft", target_modules=LINEAR, r=4),
    "delora": config("Delora", target_modules=LINEAR, r=4),
    "fourierft": config("FourierFT", target_modules=LINEAR, n_frequency=20),
    "frod": config("Frod", target_modules=["q_proj"]),
    "glora": config("Glora", target_modules=LINEAR, r=4),
    "gralora": config("Gralora", target_modules=LINEAR, r=4, gralora_k=2),
    "hira": config("Hira", target_modules=LINEAR, r=4),
    "hra": config("HRA", target_modules=LINEAR, r=4),
    "ia3": config("IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lily": config("Lily", target_modules=LINEAR, r=4),
    "ln tuning": config("LNTuning", target_modules=["input_layernorm", "norm"]),
    "loha": config("LoHa", target_modules=LINEAR, r=4),
    "lokr": config("LoKr", target_modules=LINEAR, r=4),
    "miss": config("Miss", target_modules=LINEAR, r=4),
    "oft": config("OFT", target_modules=["q_proj"], oft_block_size=4, r=0),
    "oft bias": config("OFT", target_modules=["q_proj"], oft_block_size=4, r=0, bias="all"),
    "osf": config("OSF", target_modules=["q_proj"]),
    "p-tuning": config("PromptEncoder", encoder_hidden_size=16, **PROMPTS),
    "peanut": config("Peanut", target_modules=LINEAR, r=4),
    "prefix": config("PrefixTuning", **PROMPTS),
    "prompt": config("PromptTuning", **PROMPTS),
    "psoft": config("Psoft", target_modules=LINEAR, r=4),
    "pvera": config("Pvera", target_modules=["q_proj"], r=4),
    "randlora": config("RandLora", target_modules=["q_proj"], r=4),
    "road": config("Road", target_modules=["q_proj"], group_size=16),
    "shadow": config("Shadow", r=4),
    "shira": config("Shira", target_modules=LINEAR, r=4),
    "supertuning": config("Supertuning", target_modules=LINEAR, r=4),
    "tinylora": config("TinyLora", target_modules=LINEAR, r=2),
    "tokens": config("TrainableTokens", token_indices=[5, 6, 7]),
    "unilora": config("UniLora", target_modules=LINEAR, r=4),
    "vblora": config("VBLoRA", target_modules=LINEAR, r=4, num_vectors=16, vector_length=8),
    "vera": config("Vera", target_modules=["q_proj"], r=4),
    "vera keys": config("Vera", target_modules=["q_proj"], r=4, save_projection=False),
    "waveft": config("WaveFT", target_modules=LINEAR, n_frequency=20),
}


def perturbed(model: PeftModel, size: float = 0.05) -> PeftModel:
    """Move the trained weights, as an earlier training has."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(size * torch.randn(parameter.shape, generator=g))
    return model


def prepared(name: str, base: str) -> tuple[PreTrainedModel, PeftConfig]:
    """Load a model for a tuner, with what its initialisation reads."""
    torch.manual_seed(2)
    model, tuner = tiny.load(base), TUNERS[name]()
    if name == "lora corda":
        preprocess_corda(model, tuner, run_model=lambda: model(input_ids=torch.arange(5, 37)[None]))
    return model, tuner


def adapted(base: str, name: str) -> PeftModel:
    return peft.get_peft_model(*prepared(name, base))
