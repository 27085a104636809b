"""The settings of `GRPOExtConfig`, ours and TRL's, and the values that they settle to."""

from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from trl import GRPOConfig

from grpo_ext.config.declarations import TrainingSettings
from grpo_ext.config.launch import world_size
from grpo_ext.config.spec import holds
from grpo_ext.objective.objective import Objective, resolve
from grpo_ext.objective.sampler_correction import DEFAULT, SamplerRule, trl_rule

_MAPPINGS = [name for name, hint in get_type_hints(TrainingSettings).items() if holds(dict, hint)]


@dataclass
class GRPOExtArguments(TrainingSettings, GRPOConfig):  # type: ignore[misc]
    """`GRPOExtConfig` without its checks, for the rules that check it."""

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, *_MAPPINGS]  # noqa: RUF012

    @property
    def world_size(self) -> int:
        """The processes of this launch, or of the one that `grpo-ext check` plans."""
        return world_size()

    @property
    def objective(self) -> Objective:
        """The loss with every axis settled, computed again after a field was set."""
        if "_objective" not in vars(self):
            vars(self)["_objective"] = resolve(self)
        return cast(Objective, vars(self)["_objective"])

    def __setattr__(self, name: str, value: object) -> None:
        vars(self).pop("_objective", None)
        super().__setattr__(name, value)

    @property
    def exact_denominators(self) -> bool:
        """True if denominators count the optimizer step's active completions and tokens (stock TRL's do not)."""
        return self.loss_defaults == "paper"

    @property
    def prefix_setting(self) -> str:
        """`shared_prefix` as 'auto', 'true' or 'false', from YAML or the command line."""
        return str("auto" if self.shared_prefix is None else self.shared_prefix).lower()

    @property
    def zero_advantages_skipped(self) -> bool:
        """`skip_zero_advantages`, settled."""
        return self.loss_defaults == "paper" if self.skip_zero_advantages is None else self.skip_zero_advantages

    @property
    def samples_otherwise(self) -> bool:
        """Whether what samples may differ from the policy: it is vLLM, or it has older weights."""
        return bool(self.use_vllm or self.rollout_ahead)

    @property
    def trl_sampler_mode(self) -> str | None:
        """The mode of TRL's correction of the sampler, or None where it is not TRL's."""
        name = "vllm_importance_sampling_"
        is_bounded = any(getattr(self, name + bound) is not None for bound in ("clip_min", "clip_max", "cap"))
        stock = self.sampler_correction is None and (is_bounded or self.loss_defaults == "trl")
        return self.vllm_importance_sampling_mode or (GRPOConfig.vllm_importance_sampling_mode if stock else None)

    @property
    def trl_sampler_bound(self) -> float:
        """The upper bound of TRL's correction of the sampler."""
        clip_max, stock = self.vllm_importance_sampling_clip_max, GRPOConfig.vllm_importance_sampling_clip_max
        bounds = self.vllm_importance_sampling_cap, clip_max, stock
        return next(float(bound) for bound in bounds if bound is not None)

    @property
    def sampler_rules(self) -> tuple[SamplerRule, ...]:
        """`sampler_correction`, settled; empty without a correction of the sampler."""
        if not self.vllm_importance_sampling_correction or self.old_logps != "recomputed":
            return ()
        if (mode := self.trl_sampler_mode) is not None:
            lower = self.vllm_importance_sampling_clip_min
            return (trl_rule(mode, None if lower is None else float(lower), self.trl_sampler_bound),)
        if (correction := self.sampler_correction) is None:
            return DEFAULT
        blocks = cast(list[dict[str, Any]], correction if isinstance(correction, list | tuple) else [correction])
        return tuple(SamplerRule(**{k: v for k, v in block.items() if v is not None}) for block in blocks)

    @property
    def sampler_dtype(self) -> str:
        """`vllm_dtype`, settled as far as it can be before the model is loaded."""
        if self.vllm_dtype != "auto":
            return self.vllm_dtype
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "auto"

    @property
    def rollout_engine_resolved(self) -> str:
        """`rollout_engine`, settled as far as it can be before the model is loaded; stock TRL draws by `generate`."""
        stock = self.rollout_engine == "auto" and self.loss_defaults == "trl"
        return "generate" if stock else self.rollout_engine

    @property
    def dropout_disabled(self) -> bool:
        """`disable_dropout`, settled."""
        return self.loss_defaults == "paper" if self.disable_dropout is None else self.disable_dropout
