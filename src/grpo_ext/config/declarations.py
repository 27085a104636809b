"""The settings that are ours, and those of TRL that have another default or meaning here, each declared once."""

from dataclasses import dataclass

from grpo_ext.config.setting import (
    APART,
    CORRECTED,
    COUNT,
    ENVIRONMENTS,
    NOT_NEGATIVE,
    POSITIVE,
    VLLM,
    Change,
    setting,
)
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.estimate import estimators  # all: some are registered beside `advantages`
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.ratios import ratios

AS_THE_ROW_SAYS = "None (default): the value in the row of `loss_type` (see `loss_defaults`)."


@dataclass
class TrainingSettings:
    """The settings of training, which `GRPOExtConfig` puts before TRL's."""

    loss_type: str = setting(
        "dapo",
        f"The loss: {', '.join(losses)}, or './file.py:function'. `grpo-ext check` prints its formula and paper.",
    )
    loss_defaults: str = setting(
        "paper",
        "Where unset axes of the loss come from: 'paper' (default), the row of `loss_type`; 'trl', stock "
        "TRL's defaults, so that the run is stock TRL's to the last digit.",
        choices=("paper", "trl"),
    )
    importance_sampling_level: str | None = setting(
        None,
        "Level of the importance ratio: 'token', 'sequence' (geometric mean, GSPO) or 'product' "
        f"(DeepSeek-V3). {AS_THE_ROW_SAYS}",
        choices=ratios,
    )
    loss_kwargs: dict | str | None = setting(
        None, "Options of a surrogate of your own, those that have no field here."
    )
    epsilon: float | None = setting(
        None, f"Distance from 1 of the lower clip bound. {AS_THE_ROW_SAYS}", within=NOT_NEGATIVE
    )
    epsilon_high: float | None = setting(
        None,
        "Distance from 1 of the upper clip bound; for 'cispo' the upper bound itself. None (default): the "
        "value of `epsilon` where that is set, else that of the row.",
        within=NOT_NEGATIVE,
    )
    delta: float | None = setting(
        None, f"Cap of the ratio where the advantage is negative. {AS_THE_ROW_SAYS}", within=POSITIVE
    )
    kl_estimator: str | None = setting(
        None,
        f"One of {', '.join(kl_estimators)}, or './file.py:function'. Needs `beta` > 0. {AS_THE_ROW_SAYS}",
        choices=kl_estimators,
        function=True,
    )
    kl_placement: str | None = setting(
        None, f"'loss', or 'reward' (as RLOO and REINFORCE++ do). {AS_THE_ROW_SAYS}", choices=("loss", "reward")
    )
    use_bias_correction_kl: bool | None = setting(
        None, "TRL's name for `kl_estimator`: true is 'r_k3', false is 'k3'. " + AS_THE_ROW_SAYS
    )
    advantage_estimator: str | None = setting(
        None,
        f"One of {', '.join(estimators)}, or './file.py:function'. {AS_THE_ROW_SAYS}",
        choices=estimators,
        function=True,
    )
    advantage_kwargs: dict | str | None = setting(None, "Options of the advantage estimator, such as {'ddof': 0}.")
    scale_rewards: str | None = setting(
        None,
        f"TRL's name for `advantage_estimator` 'group', 'batch' or 'none'. {AS_THE_ROW_SAYS}",
        choices=("group", "batch", "none", True, False),
    )
    multi_objective_aggregation: str | None = setting(
        None,
        "How several rewards become one advantage: 'sum_then_normalize', 'normalize_then_sum' (GDPO) or "
        f"'average_advantages' (BNPO). {AS_THE_ROW_SAYS}",
        choices=combinations,
    )
    missing_rewards: str | None = setting(
        None,
        "The effect of a partial None on the weighted sum of rewards: 'renormalize' (default) leaves it out "
        "and scales up the rest, 'zero' counts it as 0 as stock TRL does.",
        choices=("renormalize", "zero"),
    )
    loss_aggregation: str | None = setting(
        None,
        f"One of {', '.join(aggregations)}, or './file.py:function'. {AS_THE_ROW_SAYS}",
        choices=aggregations,
        function=True,
    )
    loss_aggregation_kwargs: dict | str | None = setting(None, "Options of an aggregation of your own.")
    disable_dropout: bool | None = setting(
        None,
        "Whether to switch dropout off, so that rollouts, old log-probabilities and the loss see the same "
        "network. None (default): true, or false with `loss_defaults` 'trl'.",
    )
    dynamic_sampling: str | None = setting(
        None,
        "Replace groups without a signal by groups of fresh prompts (DAPO). The name of a reward: those "
        "whose completions it scores alike. 'reward': those without an advantage. None (default): off.",
        text="Write reward, or the name of one of the rewards, or leave it out.",
    )
    dynamic_sampling_max_rounds: int = setting(
        3,
        "How often a batch is refilled at most; what is then still without a signal stays in it.",
        within=COUNT,
        needs=("dynamic_sampling: a reward's name",),
    )

    rollout_engine: str = setting(
        "auto",
        "How completions are made without vLLM: 'grouped', prompts run once per group and finished "
        "completions leave the batch; 'generate', transformers' own; 'process', 'grouped' in a process beside each "
        "trainer's, with random numbers of each attempt's own; 'auto' (default), 'grouped' where it gives the same "
        "distribution and `loss_defaults` is 'paper', else 'generate'.",
        choices=("auto", "grouped", "generate", "process"),
        needs=("use_vllm: false", "use_transformers_continuous_batching: false"),
    )
    rollout_device: str | None = setting(
        None,
        "Where the process of `rollout_engine` 'process' samples: 'cpu', or 'cuda:1', which is then the device of "
        "each machine's first process, and the others follow. None (default): the device that trains.",
        text="Write cpu, cuda or cuda:1, or leave it out.",
        needs=("rollout_engine: process",),
        change=Change.ROUNDING,
    )

    rollout_ahead: int = setting(
        0,
        "How many generations are sampled and scored while one trains: each is sampled by weights exactly this many "
        "generations older than those that it begins to train, which `sampler_correction` corrects for. Needs "
        "`rollout_engine` 'process' or a vLLM server. 0 (default): off.",
        within=NOT_NEGATIVE,
    )
    completion_length_counts: str = setting(
        "all",
        "The tokens of a conversation with environments that `max_completion_length` counts: 'all' (default) "
        "behind the prompt, as TRL does, or those that the 'policy' wrote.",
        choices=("all", "policy"),
        needs=ENVIRONMENTS,
    )
    environment_waves: str = setting(
        "ready",
        "When the policy answers environments: 'ready' (default), as soon as some have answered; "
        "'turn', only when all have, so that a run with environments in processes of their own is a function of "
        "its recipe and seed to the last bit.",
        choices=("ready", "turn"),
        needs=ENVIRONMENTS,
        change=Change.ROUNDING,
    )

    shared_prefix: str | None = setting(
        "auto",
        "Whether a prompt is computed once for the completions that share a micro-batch: true, false, or "
        "'auto' (default), where it is exact and pays.",
        choices=("auto", "true", "false", True, False),
        change=Change.ROUNDING,
    )
    micro_batch_tokens: int | None = setting(
        None,
        "The most tokens that a forward and backward of the loss computes: micro-batches are cut into pieces, whose "
        "gradients are added. A shared prompt counts once, elsewhere padding counts too; a completion that has more "
        "with its prompt is a piece of its own. None (default): a micro-batch is one piece.",
        within=COUNT,
        change=Change.ROUNDING,
    )
    skip_zero_advantages: bool | None = setting(
        None,
        "Whether completions with an advantage of zero leave forward and backward where nothing else "
        "gives them a gradient; the entropy metric then leaves them out. None (default): true, or false with "
        "`loss_defaults` 'trl'.",
    )

    vllm_weight_transfer: str = setting(
        "auto",
        "How weights reach a vLLM server: 'nccl', 'gloo' (TCP, needs no GPU) or 'auto' (default), NCCL "
        "where both sides have CUDA.",
        choices=("auto", "nccl", "gloo"),
        needs=(*VLLM, "vllm_mode: server"),
        change=Change.NOTHING,
    )
    vllm_push: str = setting(
        "auto",
        "What a push sends to vLLM when an adapter is trained: 'adapter', its A and B alone; 'merged', whole weights "
        "with their sum; 'auto' (default), the adapter where vLLM can hold it.",
        choices=("auto", "adapter", "merged"),
        needs=VLLM,
        change=Change.ROUNDING,
    )
    vllm_dtype: str = setting(
        "auto",
        "dtype of the sampler's weights: 'float32', 'bfloat16', 'float16' or 'auto' (default), the one "
        "that the trainer computes in.",
        choices=("auto", "float32", "bfloat16", "float16"),
        needs=VLLM,
    )
    replay_routes: bool = setting(
        False,
        "Mixtures of experts: whether the forwards of the loss and of the old policy send each token to the experts "
        "that vLLM sent it to, with the policy's own gate weights (R3, arXiv:2510.11370). false (default): each "
        "forward chooses.",
    )
    sampler_correction: dict | str | list | None = setting(
        None,
        "What corrects for a vLLM that is not quite the policy: {level, statistic, lower, upper, action, normalize}, "
        "or a list of such blocks. None (default): {level: token, upper: 2.0}, truncated token ratios; with TRL's "
        "names, or with `loss_defaults` 'trl', TRL's.",
        needs=APART,
    )
    vllm_importance_sampling_mode: str | None = setting(
        None,
        "TRL's name for `sampler_correction`: level and action of a block, such as 'token_truncate'; bounds are "
        "`vllm_importance_sampling_clip_min` and `_max`.",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        needs=CORRECTED,
    )
    vllm_importance_sampling_clip_max: float | None = setting(
        None,
        "TRL's name for the upper bound; a value chooses TRL's correction. None (default): 3.0, stock TRL's, where "
        "`vllm_importance_sampling_mode` or `loss_defaults` 'trl' chooses it.",
        within=POSITIVE,
        needs=CORRECTED,
    )
    old_logps: str = setting(
        "recomputed",
        "The log-probabilities that the loss's ratio is taken to: 'recomputed' (default), those of the policy before "
        "it trains on a generation, by its own forward; 'sampler', those that vLLM or an older policy returned, "
        "without that forward and without `sampler_correction`; 'interpolated', between the two by the age of the "
        "sampler's weights (A-3PO), without that forward, and weighed by the ratio to the sampler up to 2.",
        choices=("recomputed", "sampler", "interpolated"),
        needs=APART,
    )
    losses: list | str | None = setting(
        None,
        "Losses beside the policy's, each {type, weight, weight_schedule, where, aggregation, name} and what its type "
        "takes: 'reverse_kl' or 'jsd' to a teacher, 'cross_entropy' on demonstrations. None (default): none.",
    )
    vllm_engine_kwargs: dict | str | None = setting(
        None,
        "Further options of vLLM's engine, as its `EngineArgs` names them, such as {'kv_cache_dtype': 'fp8'}. With "
        "`vllm_mode` 'server' `grpo-ext serve` starts the server with them.",
        needs=VLLM,
    )
    rollout_drift: float | None = setting(
        None,
        "Largest mean difference, in nats per token, between vLLM's and the trainer's log-probabilities "
        "of the sampled tokens. None (default): 0.02 in float32, 0.05 in float16, 0.1 in bfloat16; 0: not checked.",
        within=NOT_NEGATIVE,
        needs=VLLM,
        change=Change.NOTHING,
    )
    rollout_drift_action: str = setting(
        "warn",
        "'warn' (default) or 'stop' when the difference is larger than `rollout_drift`.",
        choices=("warn", "stop"),
        needs=(*VLLM, "rollout_drift above 0 (0 means not checked)"),
        change=Change.NOTHING,
    )

    num_completions_to_print: int | None = setting(
        4,
        "Completions of each log that `log_completions` prints, evenly chosen. 4 (default); 0: none; None: all.",
        within=NOT_NEGATIVE,
        needs=("log_completions: true",),
        change=Change.NOTHING,
    )
    on_nonfinite: str = setting(
        "stop",
        "The effect of inf in rewards, or NaN or inf in log-probabilities, loss or gradients, before the "
        "optimizer sees it: 'stop' (default) ends the run on all processes, 'skip' drops the optimizer step (a "
        "reward: the completion counts as not scored). The batch is kept in `output_dir`/failures.",
        choices=("stop", "skip"),
        change=Change.NOTHING,
    )
    logging_nan_inf_filter: bool = setting(
        False,
        "transformers' filter, which logs a loss of NaN or inf as the mean of those before. False "
        "(default): the log has the loss itself.",
        change=Change.NOTHING,
    )


@dataclass
class RecipeSettings:
    """How completions are scored and evaluated, which a recipe puts before TRL's script arguments."""

    dataset_name: str | None = setting(
        None, "Path or name of the dataset; a mixture has `datasets` in its place, not both."
    )
    reward_funcs: list[str] | None = setting(
        None, "Rewards: a list of names, paths, reward models or {name, func, weight, kwargs, ...}; docs/rewards.md."
    )
    reward_workers: int | None = setting(
        None,
        "Worker processes that score rewards beside each training process. None (default): its share of "
        "the cores, at most 8; 0: in the training process itself, where no call can be stopped or contained.",
        within=NOT_NEGATIVE,
        change=Change.NOTHING,
    )
    eval_sets: list[str] | None = setting(
        None,
        "Data that `grpo-ext eval` and the training run evaluate on: a list of {name, dataset_name, "
        "split, samples, k, temperature, top_p, limit, every, judge, ...}; docs/evaluation.md.",
        change=Change.NOTHING,
    )
    reward_memory_gib: float = setting(
        8.0,
        "Memory that a reward worker, or an environment's process, may use, in GiB; 0: no limit.",
        within=NOT_NEGATIVE,
        change=Change.NOTHING,
    )
    environments: list[str] | None = setting(
        None,
        "Environments with which completions are conversations: a list of {name or path, kwargs, tools, "
        "max_turns, turn_timeout, weight, on_error, isolate, secrets}; docs/environments.md.",
    )
