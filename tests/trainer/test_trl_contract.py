"""What grpo-ext relies on in TRL, pinned: a new TRL fails here, in one place, before anything subtle goes wrong.

After reading what changed: `python tests/test_trl_contract.py` prints the new table.
"""

import ast
import hashlib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import trl
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, utils

import grpo_ext
from grpo_ext import GRPOExtTrainer
from grpo_ext.packing.scorer import Scorer
from grpo_ext.rollout.vllm.generation import Generation
from grpo_ext.rollout.vllm.transfer import WeightClient

CONTRACT = {
    "GRPOTrainer.__init__": "18f01b7a46c9544b",
    "GRPOTrainer._calculate_rewards": "736ae29b083840b5",
    "GRPOTrainer._compute_loss": "80295546bbdbf6f7",
    "GRPOTrainer._generate": "2a27fdf8f5e6f356",
    "GRPOTrainer._generate_and_score_completions": "1fa48922792dcd5c",
    "GRPOTrainer._generate_single_turn": "e0f02e4fc094cefd",
    "GRPOTrainer._tool_call_loop": "1c501f7f3b469f7e",
    "GRPOTrainer._tokenize_prompts": "d2d27f7c9bfda85f",
    "GRPOTrainer._get_train_sampler": "36497afb4d311dc9",
    "GRPOTrainer._get_per_token_logps_and_entropies": "ea73c3909275851d",
    "GRPOTrainer._load_optimizer_and_scheduler": "5c1772becdfd7fdb",
    "GRPOTrainer._prepare_inputs": "f824e7fb07147956",
    "GRPOTrainer._save_checkpoint": "ec91bde123649111",
    "GRPOTrainer.compute_loss": "a2d6ef8bd29c3e26",
    "GRPOTrainer.get_off_policy_mask": "8ee1e196461141a7",
    "GRPOTrainer.log": "1e7772819cc8cf09",
    "GRPOTrainer.prediction_step": "008b555451073a5a",
    "utils.add_fused_lm_head": "422d009f04b66659",
    "utils.create_model_from_path": "5a78af7066b90c38",
    "utils.disable_dropout_in_model": "7e551ab8e455d5c5",
    "utils.nanmax": "3a1321313d7be8b6",
    "utils.nanmin": "1b3edb64304e73f6",
    "utils.nanstd": "081b874388d813a0",
    "utils.pad": "5b5cbf5245d686e0",
    "VLLMClient.__init__": "5d0ecab3e9b8f52b",
    "VLLMClient._get": "a33e6d43e6be1386",
    "VLLMClient._post": "6d49fa01931d2298",
    "VLLMClient.check_server": "1e1fad44d5d4cfd3",
    "VLLMClient.get_server_info": "45488d3788dca516",
    "VLLMClient.generate": "63635cf59ca8bb70",
    "VLLMClient._generate_from_features": "a689a8629e555c22",
    "VLLMClient.init_communicator": "5cbce8e8cedbad5c",
    "VLLMClient._start_weight_update": "c6ec295b8c2c09f9",
    "VLLMClient._finish_weight_update": "639f600c219ad0da",
    "VLLMClient.reset_prefix_cache": "ac75596a9e9bf2b2",
    "VLLMClient.update_named_params": "6acaa216cc7e2174",
    "VLLMClient.close_communicator": "70cd79521a6987bb",
    "VLLMGeneration.__init__": "3b2cda6d35bb97b4",
    "VLLMGeneration._init_vllm": "0e584002e0f6a9c0",
    "VLLMGeneration._fix_param_name_to_vllm": "c42c3965795e12dc",
    "VLLMGeneration._iter_named_params": "baab615d5c7bc3e1",
    "VLLMGeneration.sync_weights": "63d669fb32304ff5",
    "VLLMGeneration.generate": "2d2ac2be5b1309c4",
    "RepeatSampler.__iter__": "d80412d80424bd64",
    "ChunkedLogProbFunction.forward": "1d8220b44273cdf3",
    "GRPOConfig.__post_init__": "e833cd8d6b4619ad",
    "TrlParser.set_defaults_with_config": "6ca8d6b566990510",
}


def targets() -> dict[str, object]:
    own = {name for part in GRPOExtTrainer.__mro__ if part.__module__.startswith("grpo_ext.") for name in vars(part)}
    own |= {
        "_load_optimizer_and_scheduler",
        "get_off_policy_mask",
        "prediction_step",
    }  # called, or relied on, as they are
    methods = sorted(
        name for name in own & {*vars(trl.GRPOTrainer)} if inspect.isfunction(getattr(trl.GRPOTrainer, name))
    )
    functions = ["add_fused_lm_head", "create_model_from_path", "disable_dropout_in_model"]
    functions += ["nanmax", "nanmin", "nanstd", "pad"]
    found = {f"GRPOTrainer.{name}": getattr(trl.GRPOTrainer, name) for name in methods}
    found |= {f"utils.{name}": getattr(utils, name) for name in functions}
    for theirs, ours in ((VLLMClient, WeightClient), (VLLMGeneration, Generation)):
        for name, function in vars(theirs).items():
            if inspect.isfunction(function) and (
                getattr(ours, name) is not function or name == "_fix_param_name_to_vllm"
            ):
                found[f"{theirs.__name__}.{name}"] = function
    found["RepeatSampler.__iter__"] = utils.RepeatSampler.__iter__
    found["ChunkedLogProbFunction.forward"] = utils._ChunkedLogProbFunction.forward
    found["GRPOConfig.__post_init__"] = trl.GRPOConfig.__post_init__
    found["TrlParser.set_defaults_with_config"] = trl.TrlParser.set_defaults_with_config
    return found


def fingerprint(function) -> str:
    """Hash of the source, the signature included."""
    return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()[:16]


def test_trl_is_the_one_that_was_read():
    now = {name: fingerprint(function) for name, function in targets().items()}
    assert now == CONTRACT, "read what has changed against grpo_ext.trainer.grpo_trainer, then print the table anew"


UPSTREAM = ("trl", "transformers", "accelerate", "peft", "datasets")
HANDED_ON = {"self._scorer.tokens": Scorer.tokens}
"""What takes all the arguments of an override, where that is not the overridden method."""


def functions(owner: type) -> dict[str, Callable]:
    """Its own methods by name, without what Python itself calls."""
    own = {name: getattr(value, "__func__", value) for name, value in vars(owner).items()}
    return {name: value for name, value in own.items() if inspect.isfunction(value) and not name.startswith("__")}


def overrides() -> dict[str, tuple[Callable, Callable]]:
    """(ours, theirs) of every method of the package that another library calls."""
    found = {}
    for module in pkgutil.walk_packages(grpo_ext.__path__, "grpo_ext."):
        if module.name == "grpo_ext.rollout.vllm.engine":  # of vLLM's processes, where it is installed
            continue
        for owner in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(owner) and owner.__module__ == module.name:
                bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] in UPSTREAM]
                for name, ours in functions(owner).items():
                    theirs = next((functions(base)[name] for base in bases if name in functions(base)), None)
                    if theirs is not None:
                        found[f"{owner.__qualname__}.{name}"] = ours, theirs
    return found


OVERRIDES = overrides()


def taken(function: Callable) -> tuple[list[str], set[inspect._ParameterKind]]:
    """Names of the parameters that may be given by position, and the kinds of all."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD], {p.kind for p in parameters}


def assert_takes(ours: Callable, theirs: Callable) -> None:
    """Each argument by its name, and by position none under another name."""
    expected, named = taken(theirs)[0], taken(ours)[0]
    inspect.signature(ours).bind(**dict.fromkeys(expected))
    assert all(mine == their for mine, their in zip(named, expected, strict=False)), (named, expected)


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_takes_what_is_passed_and_hands_on_what_it_does_not_name(name):
    ours, theirs = OVERRIDES[name]
    assert_takes(ours, theirs)
    if inspect.Parameter.VAR_KEYWORD not in taken(ours)[1] or inspect.Parameter.VAR_KEYWORD in taken(theirs)[1]:
        return
    [function] = ast.parse(textwrap.dedent(inspect.getsource(ours))).body
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    whole = {ast.unparse(call.func) for call in calls if None in [keyword.arg for keyword in call.keywords]}
    assert whole, "it drops what it does not name"
    for target in whole - {f"super().{ours.__name__}"}:
        assert_takes(HANDED_ON[target], theirs)


OURS = ("reward_workers", "environments", "reward_memory_gib")


def test_the_trainer_takes_trls_arguments_in_their_order_and_three_more():
    theirs = inspect.signature(trl.GRPOTrainer.__init__).parameters
    ours = inspect.signature(GRPOExtTrainer.__init__).parameters
    assert list(ours) == [*theirs, *OURS]
    assert {name: p.default for name, p in ours.items() if name in theirs} == {n: p.default for n, p in theirs.items()}
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OURS)
    typed = {name: p.annotation for name, p in ours.items() if name != "self"}
    assert inspect.Parameter.empty not in typed.values()
    assert Any not in typed.values()
    explained = inspect.getdoc(GRPOExtTrainer.__init__)
    assert [name for name in typed if f"{name}: " not in explained] == []


@pytest.mark.parametrize(("typo", "meant"), [("peft_confg", "peft_config"), ("reward_func", "reward_funcs")])
def test_a_misspelt_argument_of_the_trainer_gets_the_one_that_was_meant(typo, meant):
    with pytest.raises(TypeError, match=f"GRPOExtTrainer has no argument '{typo}'. Did you mean '{meant}'"):
        GRPOExtTrainer("quickstart", **{typo: None})


def test_the_reference_is_created_under_the_name_that_is_replaced():
    assert grpo_trainer.create_model_from_path is utils.create_model_from_path
    assert "self.ref_model = create_model_from_path(" in inspect.getsource(trl.GRPOTrainer.__init__)


if __name__ == "__main__":
    print("CONTRACT = {")
    for key, function in targets().items():
        print(f'    "{key}": "{fingerprint(function)}",')
    print("}")
