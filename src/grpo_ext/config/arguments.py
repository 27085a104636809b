"""The fields of `GRPOExtConfig`, TRL's and the axes of the loss, and the values that they settle to."""

from dataclasses import dataclass
from typing import Any, cast

from trl import GRPOConfig

from grpo_ext.config.launch import world_size
from grpo_ext.config.spec import described
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import Objective, resolve
from grpo_ext.objective.sampler_correction import DEFAULT, SamplerRule, trl_rule

KWARGS = ("loss_kwargs", "advantage_kwargs", "loss_aggregation_kwargs")
"""Fields that hold the options of a function."""
AS_THE_ROW_SAYS = "None (default): the value in the row of `loss_type` (see `loss_defaults`)."


@dataclass
class GRPOExtArguments(GRPOConfig):
    """`GRPOExtConfig` without its checks, for the rules that check it."""

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, *KWARGS, "vllm_engine_kwargs", "sampler_correction"]  # noqa: RUF012

    loss_type: str = described(
        GRPOConfig.loss_type,
        f"The loss: {', '.join(losses)}, or './file.py:function'. `grpo-ext check` prints its formula and paper.",
    )
    loss_defaults: str = described(
        "paper",
        "Where unset axes of the loss come from: 'paper' (default), the row of `loss_type`; 'trl', stock "
        "TRL's defaults, so that the run is stock TRL's to the last digit.",
    )
    importance_sampling_level: str | None = described(  # type: ignore[assignment]
        None,
        "Level of the importance ratio: 'token', 'sequence' (geometric mean, GSPO) or 'product' "
        f"(DeepSeek-V3). {AS_THE_ROW_SAYS}",
    )
    loss_kwargs: dict | str | None = described(
        None, "Options of a surrogate of your own, those that have no field here."
    )
    epsilon: float | None = described(None, f"Distance from 1 of the lower clip bound. {AS_THE_ROW_SAYS}")  # type: ignore[assignment]
    epsilon_high: float | None = described(
        None,
        "Distance from 1 of the upper clip bound; for 'cispo' the upper bound itself. None (default): the "
        "value of `epsilon` where that is set, else that of the row.",
    )
    delta: float | None = described(None, f"Cap of the ratio where the advantage is negative. {AS_THE_ROW_SAYS}")
    kl_estimator: str | None = described(
        None, f"One of {', '.join(kl_estimators)}, or './file.py:function'. Needs `beta` > 0. {AS_THE_ROW_SAYS}"
    )
    kl_placement: str | None = described(None, f"'loss', or 'reward' (as RLOO and REINFORCE++ do). {AS_THE_ROW_SAYS}")
    use_bias_correction_kl: bool | None = described(  # type: ignore[assignment]
        None, "TRL's name for `kl_estimator`: true is 'r_k3', false is 'k3'. " + AS_THE_ROW_SAYS
    )
    advantage_estimator: str | None = described(
        None, f"One of {', '.join(estimators)}, or './file.py:function'. {AS_THE_ROW_SAYS}"
    )
    advantage_kwargs: dict | str | None = described(None, "Options of the advantage estimator, such as {'ddof': 0}.")
    scale_rewards: str | None = described(  # type: ignore[assignment]
        None, f"TRL's name for `advantage_estimator` 'group', 'batch' or 'none'. {AS_THE_ROW_SAYS}"
    )
    multi_objective_aggregation: str | None = described(  # type: ignore[assignment]
        None,
        "How several rewards become one advantage: 'sum_then_normalize', 'normalize_then_sum' (GDPO) or "
        f"'average_advantages' (BNPO). {AS_THE_ROW_SAYS}",
    )
    missing_rewards: str | None = described(
        None,
        "The effect of a partial None on the weighted sum of rewards: 'renormalize' (default) leaves it out "
        "and scales up the rest, 'zero' counts it as 0 as stock TRL does.",
    )
    loss_aggregation: str | None = described(
        None, f"One of {', '.join(aggregations)}, or './file.py:function'. {AS_THE_ROW_SAYS}"
    )
    loss_aggregation_kwargs: dict | str | None = described(None, "Options of an aggregation of your own.")
    disable_dropout: bool | None = described(  # type: ignore[assignment]
        None,
        "Whether to switch dropout off, so that rollouts, old log-probabilities and the loss see the same "
        "network. None (default): true, or false with `loss_defaults` 'trl'.",
    )
    dynamic_sampling: str | None = described(
        None,
        "Replace groups without a signal by groups of fresh prompts (DAPO). The name of a reward: those "
        "whose completions it scores alike. 'reward': those without an advantage. None (default): off.",
    )
    dynamic_sampling_max_rounds: int = described(
        3, "How often a batch is refilled at most; what is then still without a signal stays in it."
    )

    rollout_engine: str = described(
        "auto",
        "How completions are made without vLLM: 'grouped', prompts run once per group and finished "
        "completions leave the batch; 'generate', transformers' own; 'process', 'grouped' in a process beside each "
        "trainer's, with random numbers of each attempt's own; 'auto' (default), 'grouped' where it gives the same "
        "distribution and `loss_defaults` is 'paper', else 'generate'.",
    )
    rollout_device: str | None = described(
        None,
        "Where the process of `rollout_engine` 'process' samples: 'cpu', or 'cuda:1', which is then the device of "
        "each machine's first process, and the others follow. None (default): the device that trains.",
    )

    rollout_ahead: int = described(
        0,
        "How many generations are sampled and scored while one trains: each is sampled by weights exactly this many "
        "generations older than those that it begins to train, which `sampler_correction` corrects for. Needs "
        "`rollout_engine` 'process' or a vLLM server. 0 (default): off.",
    )
    completion_length_counts: str = described(
        "all",
        "The tokens of a conversation with environments that `max_completion_length` counts: 'all' (default) "
        "behind the prompt, as TRL does, or those that the 'policy' wrote.",
    )
    environment_waves: str = described(
        "ready",
        "When the policy answers environments: 'ready' (default), as soon as some have answered; "
        "'turn', only when all have, so that a run with environments in processes of their own is a function of "
        "its recipe and seed to the last bit.",
    )

    shared_prefix: str | None = described(
        "auto",
        "Whether a prompt is computed once for the completions that share a micro-batch: true, false, or "
        "'auto' (default), where it is exact and pays.",
    )
    micro_batch_tokens: int | None = described(
        None,
        "The most tokens that a forward and backward of the loss computes: micro-batches are cut into pieces, whose "
        "gradients are added. A shared prompt counts once, elsewhere padding counts too; a completion that has more "
        "with its prompt is a piece of its own. None (default): a micro-batch is one piece.",
    )
    skip_zero_advantages: bool | None = described(
        None,
        "Whether completions with an advantage of zero leave forward and backward where nothing else "
        "gives them a gradient; the entropy metric then leaves them out. None (default): true, or false with "
        "`loss_defaults` 'trl'.",
    )

    vllm_weight_transfer: str = described(
        "auto",
        "How weights reach a vLLM server: 'nccl', 'gloo' (TCP, needs no GPU) or 'auto' (default), NCCL "
        "where both sides have CUDA.",
    )
    vllm_push: str = described(
        "auto",
        "What a push sends to vLLM when an adapter is trained: 'adapter', its A and B alone; 'merged', whole weights "
        "with their sum; 'auto' (default), the adapter where vLLM can hold it.",
    )
    vllm_dtype: str = described(
        "auto",
        "dtype of the sampler's weights: 'float32', 'bfloat16', 'float16' or 'auto' (default), the one "
        "that the trainer computes in.",
    )
    sampler_correction: dict | str | list | None = described(
        None,
        "What corrects for a vLLM that is not quite the policy: {level, statistic, lower, upper, action, normalize}, "
        "or a list of such blocks. None (default): {level: token, upper: 2.0}, truncated token ratios; with TRL's "
        "names, or with `loss_defaults` 'trl', TRL's.",
    )
    vllm_importance_sampling_mode: str | None = described(  # type: ignore[assignment]
        None,
        "TRL's name for `sampler_correction`: level and action of a block, such as 'token_truncate'; bounds are "
        "`vllm_importance_sampling_clip_min` and `_max`.",
    )
    vllm_importance_sampling_clip_max: float | None = described(
        None,
        "TRL's name for the upper bound; a value chooses TRL's correction. None (default): 3.0, stock TRL's, where "
        "`vllm_importance_sampling_mode` or `loss_defaults` 'trl' chooses it.",
    )
    old_logps: str = described(
        "recomputed",
        "The log-probabilities that the loss's ratio is taken to: 'recomputed' (default), those of the policy before "
        "it trains on a generation, by its own forward; 'sampler', those that vLLM or an older policy returned, "
        "without that forward and without `sampler_correction`; 'interpolated', between the two by the age of the "
        "sampler's weights (A-3PO), without that forward, and weighed by the ratio to the sampler up to 2.",
    )
    losses: list | str | None = described(
        None,
        "Losses beside the policy's, each {type, weight, weight_schedule, where, aggregation, name} and what its type "
        "takes: 'reverse_kl' or 'jsd' to a teacher, 'cross_entropy' on demonstrations. None (default): none.",
    )
    vllm_engine_kwargs: dict | str | None = described(
        None,
        "Further options of vLLM's engine, as its `EngineArgs` names them, such as {'kv_cache_dtype': 'fp8'}. With "
        "`vllm_mode` 'server' `grpo-ext serve` starts the server with them.",
    )
    rollout_drift: float | None = described(
        None,
        "Largest mean difference, in nats per token, between vLLM's and the trainer's log-probabilities "
        "of the sampled tokens. None (default): 0.02 in float32, 0.05 in float16, 0.1 in bfloat16; 0: not checked.",
    )
    rollout_drift_action: str = described(
        "warn", "'warn' (default) or 'stop' when the difference is larger than `rollout_drift`."
    )

    num_completions_to_print: int | None = described(
        4, "Completions of each log that `log_completions` prints, evenly chosen. 4 (default); 0: none; None: all."
    )
    on_nonfinite: str = described(
        "stop",
        "The effect of inf in rewards, or NaN or inf in log-probabilities, loss or gradients, before the "
        "optimizer sees it: 'stop' (default) ends the run on all processes, 'skip' drops the optimizer step (a "
        "reward: the completion counts as not scored). The batch is kept in `output_dir`/failures.",
    )
    logging_nan_inf_filter: bool = described(
        False,
        "transformers' filter, which logs a loss of NaN or inf as the mean of those before. False "
        "(default): the log has the loss itself.",
    )

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
        given = any(getattr(self, name + bound) is not None for bound in ("clip_min", "clip_max", "cap"))
        stock = self.sampler_correction is None and (given or self.loss_defaults == "trl")
        return self.vllm_importance_sampling_mode or (GRPOConfig.vllm_importance_sampling_mode if stock else None)

    @property
    def trl_sampler_bound(self) -> float:
        """The upper bound of TRL's correction of the sampler."""
        given, stock = self.vllm_importance_sampling_clip_max, GRPOConfig.vllm_importance_sampling_clip_max
        bounds = self.vllm_importance_sampling_cap, given, stock
        return next(float(bound) for bound in bounds if bound is not None)

    @property
    def sampler_rules(self) -> tuple[SamplerRule, ...]:
        """`sampler_correction`, settled; empty without a correction of the sampler."""
        if not self.vllm_importance_sampling_correction or self.old_logps != "recomputed":
            return ()
        if (mode := self.trl_sampler_mode) is not None:
            lower = self.vllm_importance_sampling_clip_min
            return (trl_rule(mode, None if lower is None else float(lower), self.trl_sampler_bound),)
        if (given := self.sampler_correction) is None:
            return DEFAULT
        blocks = cast(list[dict[str, Any]], given if isinstance(given, list | tuple) else [given])
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
