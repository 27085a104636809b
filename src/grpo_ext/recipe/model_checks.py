"""Check a policy before its weights are loaded: whether GRPO can train it, and with the settings of a recipe."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import errors as hub
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig, get_peft_config

from grpo_ext.config.adapters import base_of, is_adapter, peft_problems
from grpo_ext.config.added_losses import INITIAL, TEACHER, Distillation, added_losses, other_vocabulary
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.routes import route_problem
from grpo_ext.config.rules import as_far_as_sound, refusal
from grpo_ext.config.truncation import scores_over_support, unbounded_problems
from grpo_ext.config.vllm import adapter_problem, leaves_packed, quantized_problem, whole_weights
from grpo_ext.data.files import data_path_problems, is_path
from grpo_ext.errors import ABSENT, ConfigError, Problem, first_line
from grpo_ext.packing.routes import no_routes
from grpo_ext.quickstart.model import LESSONS, build_model, build_tokenizer
from grpo_ext.recipe.loading import load_tokenizer_of
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.models.loaded_model import own_weights
from grpo_ext.rollout.vllm.adapters import QUANTIZED, slots, unheld
from grpo_ext.rollout.vllm.unpushable import unpushable


@dataclass
class InspectedPolicy:
    """A policy without its weights, as far as it is known.

    Args:
        empty: the model on the meta device, with its adapter if it has one.
        tokenizer: as it is trained.
        parameters: their number.
        trained: the number of trained parameters.
        taught: the number of parameters of teachers that are models of their own.
        context: tokens that prompt and completion may have together.
        unknown: why the model is not known.
        push: what vLLM gets of an adapter.
        slots: options by which vLLM has room for it, where it gets the adapter alone.
    """

    empty: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    parameters: int = 0
    trained: int = 0
    taught: int = 0
    context: int | None = None
    unknown: str = ""
    push: str = ""
    slots: dict[str, Any] = field(default_factory=dict)


def inspect_policy(model: ModelConfig, training: GRPOExtConfig) -> tuple[InspectedPolicy, list[Problem]]:
    """Return the policy of a recipe and all that is wrong with it; an unreachable hub is not a problem.

    `training` may hold values that are refused already (`config.rules`).
    """
    policy, problems = InspectedPolicy(), list[Problem]()
    with own_weights():  # ZeRO-3 would partition the model over processes, and it has no data
        if model.model_name_or_path in LESSONS:
            policy.tokenizer = build_tokenizer(LESSONS[model.model_name_or_path].words)
            policy.empty = build_model(policy.tokenizer)  # the warm one takes a short training
        else:
            problems += as_far_as_sound(_load(policy, model, training))
        if policy.empty is not None:
            policy.context = _context(policy.empty.config)
            policy.parameters = policy.trained = sum(p.numel() for p in policy.empty.parameters())
            problems += as_far_as_sound(_context_problems(policy.context, training))
            problems += as_far_as_sound(_model_problems(policy.empty, model, training))
            problems += _tokenizer_problems(policy, model)
            problems += as_far_as_sound(_adapter_problems(policy, policy.empty, model, training))
            problems += as_far_as_sound(_teacher_problems(policy, training))
    return policy, problems


# The model's configuration, its class and its tokenizer.


def _load(policy: InspectedPolicy, model: ModelConfig, training: GRPOExtConfig) -> Iterator[Problem]:
    """Load what is known without weights into `policy`, and yield what is wrong."""
    name, trust = os.path.expanduser(str(model.model_name_or_path)), bool(training.trust_remote_code)
    problem = partial(Problem, "model_name_or_path", model.model_name_or_path)
    if is_path(name) and (missing := data_path_problems(name, "model_name_or_path")):
        policy.unknown = "see above"
        yield from missing
        return
    try:
        whole, revision = base_of(name, model.model_revision) or (name, model.model_revision)
    except ConfigError:  # an adapter without a base, which `adapter_problems` reports
        policy.unknown = "see above"
        return
    except OSError:
        whole, revision = name, model.model_revision
    try:
        config = AutoConfig.from_pretrained(whole, revision=revision, trust_remote_code=trust)
    except Exception as error:  # training would meet the same error
        policy.unknown = first_line(error)
        yield from _config_problems(str(model.model_name_or_path), error)
        return
    if config.is_encoder_decoder:  # GRPO in TRL would cut the text of a decoder beside an encoder
        policy.unknown, kind = "see above", (config.architectures or ["model"])[0]
        cure = "Name a model that generates text, such as Qwen/Qwen2.5-0.5B-Instruct."
        yield problem(f"a {kind}, encoder and decoder; GRPO in TRL is for decoders only", cure)
        return
    try:
        policy.empty = _build(config, trust)
    except Exception as error:
        policy.unknown = first_line(error)
        yield problem(f"no model can be made from its config.json ({policy.unknown})", "Correct it.")
    cure = "Save it there: AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)."
    if _lacks_tokenizer(name) and _lacks_tokenizer(whole):
        yield problem("this folder has no tokenizer", cure)
        return
    try:
        policy.tokenizer = load_tokenizer_of(name, model.model_revision, trust)
    except Exception as error:
        if Path(name).is_dir():
            yield problem(f"no tokenizer can be loaded from it ({first_line(error)})", cure)


def _build(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return architecture._from_config(config)


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "processor_config.json"),
)


def _lacks_tokenizer(name: str) -> bool:
    """Return True for a folder without a tokenizer's file, from which transformers would make an empty one."""
    folder = Path(name)
    return folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES)


_OF_THE_HUB = (hub.GatedRepoError, hub.RevisionNotFoundError, hub.RepositoryNotFoundError, hub.HFValidationError)
_UNKNOWN = ("trust_remote_code", "does not recognize this architecture", "is not a local folder")


def _config_problems(name: str, error: Exception) -> Iterator[Problem]:
    """Yield transformers' error about the configuration of a model; an unreachable hub is not a problem."""
    local = Path(name).expanduser().exists() and not _is_due_to(error, hub.LocalEntryNotFoundError)
    unknown = any(words in str(error) for words in _UNKNOWN) or isinstance(error, KeyError)
    if local or unknown or _is_due_to(error, *_OF_THE_HUB):
        yield Problem("model_name_or_path", name, first_line(error), "")


def _is_due_to(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__ or error.__context__
    return error is not None


# The settings of the recipe.


def _model_problems(empty: PreTrainedModel, model: ModelConfig, training: GRPOExtConfig) -> Iterator[Problem]:
    quantized = getattr(empty.config, "quantization_config", None)
    if training.router_aux_loss_coef and not hasattr(empty.config.get_text_config(), "output_router_logits"):
        reason = f"{type(empty).__name__} has no experts to balance"
        yield Problem("router_aux_loss_coef", training.router_aux_loss_coef, reason, "Remove it.")
    if training.replay_routes and (obstacle := no_routes(empty)):
        yield route_problem(obstacle)
    if training.use_vllm and scores_over_support(training):
        yield from unbounded_problems(training.top_k, empty.config.get_text_config().vocab_size)
    adapted = model.use_peft or is_adapter(model.model_name_or_path)
    given = as_mapping(training.model_init_kwargs).get("quantization_config")
    if training.use_vllm and quantized is not None and leaves_packed(quantized if given is None else given):
        yield quantized_problem("model_name_or_path", model.model_name_or_path)
    elif training.use_vllm and not adapted:
        yield from unpushable(empty, on_cpu=training.use_cpu)


def _tokenizer_problems(policy: InspectedPolicy, model: ModelConfig) -> Iterator[Problem]:
    tokenizer, problem = policy.tokenizer, partial(Problem, "model_name_or_path", model.model_name_or_path)
    if tokenizer is None or policy.empty is None:
        return
    size = getattr(policy.empty.config.get_text_config(), "vocab_size", None)
    if tokenizer.eos_token_id is None:
        reason = "its tokenizer has no eos_token, so that no completion could end"
        yield problem(reason, "Set one and save it there.")
    if size is not None and len(tokenizer) > size and not is_adapter(model.model_name_or_path):  # its base grows
        reason = f"its tokenizer has {len(tokenizer)} tokens, its embedding {size} rows"
        yield problem(reason, "Call model.resize_token_embeddings(len(tokenizer)), and save both.")


def _context(config: PreTrainedConfig) -> int | None:
    """Return the number of the model's positions, with those that a scaling of its rotary embedding adds."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = as_mapping(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if isinstance(positions, int) and isinstance(factor, int | float):
        return max(positions, int(factor * (original or positions)))
    return positions if isinstance(positions, int) else None


def _context_problems(context: int | None, training: GRPOExtConfig) -> Iterator[Problem]:
    longest = training.max_completion_length
    if {"max_position_embeddings", "rope_scaling", "rope_parameters"} & as_mapping(training.model_init_kwargs).keys():
        return
    if context is not None and longest is not None and longest >= context:
        reason = f"the model has {context} positions, for prompt and completion together"
        cure = f"Set max_completion_length: {context // 2}, or what the prompts leave."
        yield Problem("max_completion_length", longest, reason, cure)


def _adapter_problems(
    policy: InspectedPolicy, empty: PreTrainedModel, model: ModelConfig, training: GRPOExtConfig
) -> Iterator[Problem]:
    """Put the adapter that is trained on the model, and yield why it cannot be, or not pushed to vLLM."""
    name = str(model.model_name_or_path)
    if is_adapter(name):
        try:
            config: Any = PeftConfig.from_pretrained(str(Path(name).expanduser()))
            if config.is_prompt_learning:
                raise ValueError("it loads a saved prompt to use it, not to train it further")
            if problems := [*peft_problems(config)]:
                yield from problems
                return
            config.inference_mode, config.base_model_name_or_path = False, None  # PEFT would warn of its new name
            if init := getattr(config, "init_lora_weights", None):  # PiSSA and others read weights; these have none
                config.init_lora_weights = True
            adapted = get_peft_model(empty, config)
            if init:
                config.init_lora_weights = init
        except NotImplementedError:  # an initialisation that reads weights
            return
        except Exception as error:
            reason = f"PEFT cannot put this adapter on its base ({first_line(error)})"
            yield Problem("model_name_or_path", name, reason, "Name another adapter.")
            return
    elif not model.use_peft:
        if training.use_vllm and training.vllm_push == "adapter":
            yield adapter_problem("all weights are trained")
        return
    elif problems := [*_unmatched(empty, model)]:
        yield from problems
        return
    else:
        try:
            adapted = get_peft_model(empty, cast(Any, get_peft_config(model)))
        except Exception as error:  # PEFT's own
            yield refusal(error, model, "lora_target_modules")
            return
    policy.trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    if training.use_vllm:
        yield from unpushable(adapted, on_cpu=training.use_cpu)
        yield from _push_problems(policy, cast(PeftModel, adapted), model, training)


def _push_problems(
    policy: InspectedPolicy, adapted: PeftModel, model: ModelConfig, training: GRPOExtConfig
) -> Iterator[Problem]:
    """Choose what a push sends, and yield why it cannot be the adapter if the recipe asks for it."""
    quantization = as_mapping(training.model_init_kwargs).get("quantization_config")
    packed = QUANTIZED if model.load_in_4bit or model.load_in_8bit or quantization else None
    if (reason := whole_weights(training) or packed or unheld(adapted)) is not None:
        policy.push = f"whole weights, with the adapter merged: {reason}"
        if training.vllm_push == "adapter":
            yield adapter_problem(reason)
        return
    policy.slots = slots(adapted, training.rollout_ahead)
    sizes = f"{policy.trained / 1e6:.2f} M numbers instead of {policy.parameters / 1e6:.2f} M"
    policy.push = f"the adapter alone, {sizes}, in up to {policy.slots['max_loras']} versions side by side"


def _teacher_problems(policy: InspectedPolicy, training: GRPOExtConfig) -> Iterator[Problem]:
    """Count what teachers add to the memory, and yield why one cannot teach the policy."""
    names = {loss.teacher for loss in added_losses(training) if isinstance(loss, Distillation)}
    if INITIAL in names and policy.trained == policy.parameters and not training.beta:
        policy.taught += policy.parameters  # elsewhere an adapter is switched off, or the reference teaches
    for name in sorted(names - {INITIAL}):
        teacher = InspectedPolicy()
        problems = [*_load(teacher, ModelConfig(model_name_or_path=name), training)]
        yield from (replace(problem, field=TEACHER) for problem in problems)
        if teacher.empty is not None:
            policy.taught += sum(p.numel() for p in teacher.empty.parameters())
        if policy.tokenizer is not None and teacher.tokenizer is not None:
            yield from other_vocabulary(name, policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab())


def _unmatched(empty: PreTrainedModel, model: ModelConfig) -> Iterator[Problem]:
    """Yield names in a list that match no module of the model: PEFT trains the others."""
    modules = dict(empty.named_modules())
    linear = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, torch.nn.Linear)})
    head = next((n for n, m in modules.items() if m is empty.get_output_embeddings()), None)
    layers = [name for name in linear if name != head]
    every = sorted({name.rpartition(".")[2] for name in modules if name})
    parameters = [name for name, _ in empty.named_parameters()]
    tails = sorted({".".join(name.split(".")[-2:]) for name in parameters})
    for setting, kind, names, known in (
        ("lora_target_modules", "module", modules, [*layers, "all-linear"]),
        ("lora_modules_to_save", "module", modules, every),
        ("lora_target_parameters", "parameter", parameters, tails),
    ):
        given = getattr(model, setting)
        for target in given or () if not isinstance(given, str) else ():  # PEFT refuses a text that fits nothing
            if not any(name == target or name.endswith(f".{target}") for name in names):
                reason = f"no {kind} of {type(empty).__name__} has the name {target!r}"
                yield Problem(setting, ABSENT, reason, did_you_mean(str(target), known))
    if head is not None and head in (model.lora_target_modules or ()):
        reason = (
            f"TRL takes log-probabilities from the weight of {head!r} directly, and would not train an adapter on it"
        )
        yield Problem("lora_target_modules", model.lora_target_modules, reason, "Remove it.")
