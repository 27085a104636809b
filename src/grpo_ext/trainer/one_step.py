"""Compute a recorded step again, with its own loss or another: loss, terms of its tokens, gradient; no weight changes.

The trainer itself computes it, in one process, with the micro-batches of all processes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.settings import FUNCTIONS, SETTINGS, values_of_replay
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.micro_batches import MicroBatch, live_mask, silent
from grpo_ext.trainer.batches import Generation, forward_only
from grpo_ext.trainer.callbacks import Progress
from grpo_ext.trainer.checkpoints.identity import plain
from grpo_ext.trainer.findings import BEFORE_THE_FORWARD, ORDER, ObservedBatch
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
from grpo_ext.trainer.loss import with_samplers_old
from grpo_ext.trainer.recording import Content, micro_batches, refusal, unpacked

IN_ONE_STEP = frozenset(name for name, setting in SETTINGS.items() if setting.in_one_step)
COMPUTED = (*ORDER[1 + len(BEFORE_THE_FORWARD) :], "entropies")
"""Tensors of a recording that its own forward computed."""
OF_ADVANTAGES = ("advantage", "advantage_kwargs", "combination", "missing_rewards")
_CONSENT = ("trust_remote_code", "allow_all_kernels")
"""Options by which code of a model is run."""
OF_THE_KL = ("beta", "kl", "kl_placement")
_NOT_OF_THE_LOSS = re.compile(
    r"loss|grad_norm|weights/change|tokens_per_second|learning_rate|epoch|step|.*time.*|num_tokens|nonfinite/.*|profiling/.*"
)
_BLOCK = re.compile(r"(?:^|\.)((?:layers|layer|blocks|block|h)\.\d+)\.")


@dataclass(frozen=True)
class Token:
    """One trained token.

    Attributes:
        row: among the step's completions.
        place: in its completion.
        ratio: of the policy to the old policy, or with `old_logps` "sampler" to the sampler.
        term: of the loss, before aggregation.
    """

    row: int
    place: int
    id: int
    advantage: float
    ratio: float
    entropy: float
    term: float


@dataclass(frozen=True)
class Computed:
    """The result of a step; `blocks` has the norm of the gradient by block of the model."""

    objective: str
    loss: float
    grad_norm: float
    figures: dict[str, float]
    blocks: dict[str, float]
    tokens: list[Token]


class OneStep(GRPOExtTrainer):
    """Computes the loss and the gradient of recorded micro-batches."""

    _needs_reference = False
    contents: Sequence[Content]

    def compute(self, contents: Sequence[Content]) -> Computed:
        """Compute the step that some processes have recorded.

        Raises:
            ConfigError: the loss needs something that was not recorded.
        """
        self.contents, settings = contents, contents[0]["settings"]
        self.use_vllm, self._older = bool(settings.get("use_vllm")), bool(settings.get("rollout_ahead"))
        self.remove_callback(Progress)
        self.train()
        log = next(row for row in self.state.log_history if "loss" in row)
        return Computed(
            objective=self.objective.describe(),
            loss=sum(watched.computed["loss"].item() for watched in self.window),
            grad_norm=self.norm.item(),
            figures={name: _number(value) for name, value in log.items() if not _NOT_OF_THE_LOSS.fullmatch(name)},
            blocks=by_block(self.gradients),
            tokens=tokens([replace(batch, inputs=self._as_the_loss_read(batch)) for batch in self.window]),
        )

    def _as_the_loss_read(self, batch: ObservedBatch) -> dict[str, Any]:
        inputs: Any = batch.inputs
        live = self._live_rows(inputs, "train")
        return {**with_samplers_old(self, batch.computed["per_token_logps"], inputs, live)}

    def _prepare_inputs(self, generation_batch: Any) -> MicroBatch:  # type: ignore[override]
        if self._step == 0:
            batches, totals = self._batches(), self.contents[0]["totals"]
            steps = () if totals is None else (StepTotals(*totals.to(self.accelerator.device)),)
            self._generation, self._buffered_inputs = Generation(batches, steps), batches
        return self._buffered_inputs[self._step]

    def _batches(self) -> list[MicroBatch]:
        there, here = self.contents[0]["objective"], plain(self.objective.to_dict())
        revalued, batches = not same_advantages(there, here), restored(self.contents, self.accelerator.device)
        check_tokens(self.model, batches)
        for batch in batches if revalued or not self._skips else ():
            self._fill_old(batch)
        check_recorded(self, batches)
        if revalued:
            revalue(self, batches, self.contents)
        check_credit(self.objective, batches)
        return batches

    def _fill_old(self, batch: MicroBatch) -> None:
        """Compute the old log-probabilities of rows that the recorded run left out of its forward."""
        old = batch.get("old_per_token_logps")
        if old is None:
            return
        unknown = silent(batch["advantages"]) & ~(old * live_mask(batch)).any(dim=1)
        if unknown.any():
            with forward_only(self.model, self.args):
                logps = self._scores(self.model, batch, None)[0]
            batch["old_per_token_logps"] = torch.where(unknown[:, None], logps.to(old.dtype), old)

    def _clip_grad_norm(self, model: Any) -> Any:
        self.accelerator.unscale_gradients()
        named = model.named_parameters()
        self.gradients = {n.removeprefix("module."): p.grad.detach().clone() for n, p in named if p.grad is not None}
        self.window = list(self._guard.window)
        self.norm = torch.nn.utils.get_total_norm(list(self.gradients.values()))
        return self.norm


def config_of(contents: Sequence[Content], changes: Mapping[str, Any], folder: str) -> GRPOExtConfig:
    """Return the recorded run's settings, with `changes`, for one step in one process.

    Raises:
        ConfigError: they are invalid.
    """
    first, known = contents[0], {f.name: f.default for f in fields(GRPOExtConfig)}
    fixed = values_of_replay()
    if without_effect := sorted(name for name in changes if name in fixed or name not in IN_ONE_STEP):
        reason, cure = "the loss of a recorded step does not depend on it", "Remove it."
        raise ConfigError([Problem(f"--{name}", ABSENT, reason, cure) for name in without_effect])
    recorded = plain({name: value for name, value in first["settings"].items() if name in IN_ONE_STEP})
    own = {name: value for name, value in recorded.items() if value != known[name]}
    if not changes.get("trust_remote_code"):
        own = _without_code(own, changes)
    if dtype := (own.get("model_init_kwargs") or {}).get("dtype"):
        own["model_init_kwargs"]["dtype"] = dtype.removeprefix("torch.")
    batches = micro_batches(contents)
    settings: dict[str, Any] = own | fixed | dict(changes)
    generation = (
        first["settings"]["steps_per_generation"] * first["processes"]
    )  # with its length, which stock's denominators need
    exact = settings.get("loss_defaults", "paper") == "paper"
    return GRPOExtConfig(
        **settings,
        output_dir=folder,
        per_device_train_batch_size=len(batches[0]["completion_ids"]),
        gradient_accumulation_steps=len(batches),
        steps_per_generation=len(batches) * recorded["num_generations"] if exact else generation,
        use_cpu=first["settings"]["use_cpu"] or not torch.accelerator.is_available(),
    )


def _without_code(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings without consent to code: the recording may be a stranger's.

    Raises:
        ConfigError: they name a function in a file or module, and `changes` do not.
    """
    named = {name: own[name] for name in FUNCTIONS & own.keys() - changes.keys()}
    reason, cure = "the recording asks to run this code", "Add --trust_remote_code if you trust it."
    if foreign := {name: value for name, value in named.items() if re.search("[.:]", str(value))}:
        raise ConfigError([Problem(name, value, reason, cure) for name, value in foreign.items()])
    loading = {k: v for k, v in as_mapping(own.get("model_init_kwargs")).items() if k not in _CONSENT}
    return {k: v for k, v in own.items() if k not in _CONSENT} | {"model_init_kwargs": loading or None}


def _number(value: float | None) -> float:
    """Return a logged figure; the log has None where a figure was NaN, as in the step of a NaN dump."""
    return math.nan if value is None else float(value)


# What was recorded, and its checks.


def restored(contents: Sequence[Content], device: torch.device) -> list[MicroBatch]:
    """Return the micro-batches of a step, as the loss takes them. Raises ConfigError: there are none."""
    inputs = ({name: value for name, value in b.items() if name not in COMPUTED} for b in micro_batches(contents))
    return [cast(MicroBatch, unpacked(batch, device)) for batch in inputs]


def check_tokens(model: Any, batches: Sequence[MicroBatch]) -> None:
    """Refuse batches of another model, or with images that were recorded in part.

    Raises:
        ConfigError: they are.
    """
    vocabulary = len(model.get_input_embeddings().weight)
    largest = max(int(ids.max()) for batch in batches for ids in (batch["prompt_ids"], batch["completion_ids"]))
    if largest >= vocabulary:
        reason = f"it holds token {largest}, and the model has {vocabulary}: it was recorded with another model"
        raise refusal("the batch", reason, "Give --model the one that was recorded.")
    if any("pixel_values" in batch for batch in batches):
        reason = "it holds images, which were not recorded in full"
        raise refusal("the batch", reason, "Replay batches of text only.")


def check_credit(objective: Objective, batches: Sequence[MicroBatch]) -> None:
    """Refuse recorded advantages that differ by token where the loss has one term for a whole completion.

    Raises:
        ConfigError: they do, and it has.
    """
    if any(batch["advantages"].dim() == 2 for batch in batches) and mixes_tokens(objective):
        reason = "the recorded advantages differ by token, and this loss has one term for a whole completion"
        cure = "Replay with a loss that has a term for each token, such as grpo or gspo."
        raise ConfigError([Problem("loss_type", objective.loss_type, reason, cure)])


def check_recorded(trainer: OneStep, batches: Sequence[MicroBatch]) -> None:
    """Check that the recording has everything that the loss reads. Raises ConfigError: something was not recorded."""
    if problems := list(_missing(trainer, batches[0])):
        raise ConfigError(problems)


def _missing(trainer: OneStep, first: MicroBatch) -> Iterator[Problem]:
    objective, quantile = trainer.objective, trainer.top_entropy_quantile
    if objective.kl_in_loss and "ref_per_token_logps" not in first:
        reason = "the recorded run had no reference (beta 0), whose log-probabilities this loss needs"
        yield Problem("beta", objective.beta, reason, "Record a run with beta > 0, or leave beta as it was.")
    if trainer._sampler_corrected and "importance_sampling_ratio" not in first:
        reason = "the batch has no log-probabilities of the sampler"
        cure = "Set it to false, or record a run with it."
        yield Problem("vllm_importance_sampling_correction", True, reason, cure)
    otherwise = trainer.use_vllm or trainer._older
    if trainer.args.old_logps == "sampler" and not (otherwise and "sampling_per_token_logps" in first):
        reason = "the batch has no log-probabilities of the sampler"
        yield Problem("old_logps", "sampler", reason, "Set it to recomputed, or record a run with vLLM.")
    if trainer.use_adaptive_entropy:
        reason = "the batch does not have the value of its coefficient"
        cure = (
            "Set --use_adaptive_entropy false, and --entropy_coef to the value in the log of this step (entropy_coef)."
        )
        yield Problem("use_adaptive_entropy", True, reason, cure)
    if quantile < 1.0 and trainer.contents[0]["processes"] > 1:
        reason = (
            "the run's quantile is over the micro-batches of all processes together, and a replay has them in turn"
        )
        yield Problem("top_entropy_quantile", quantile, reason, "Set --top_entropy_quantile 1.")


def same_advantages(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether two objectives estimate the same advantage."""
    in_reward = any(objective["beta"] and objective["kl_placement"] == "reward" for objective in (there, here))
    return all(there[name] == here[name] for name in OF_ADVANTAGES + (OF_THE_KL if in_reward else ()))


def revalue(trainer: OneStep, batches: Sequence[MicroBatch], contents: Sequence[Content]) -> None:
    """Replace the advantages of `batches` by those that the trainer's objective computes from the recorded rewards.

    Raises:
        ConfigError: it needs more than the rewards of these groups.
    """
    objective, first = trainer.objective, contents[0]
    keep = f"Keep the recorded advantages: --advantage_estimator {first['objective']['advantage']}"
    if objective.sees_tokens or objective.remembered_batches or "group_rewards" not in batches[0]:
        reason = "it needs more than this batch's rewards"
        raise ConfigError([Problem("advantage_estimator", objective.advantage, reason, f"{keep}.")])
    found, of_row = _groups(batches)
    weights = torch.tensor(first["reward_weights"], dtype=found.dtype, device=found.device)
    together = objective.advantages(found, weights)
    alone = torch.cat([objective.advantages(group[None], weights) for group in found])
    size = first["settings"]["per_device_train_batch_size"] * first["settings"]["steps_per_generation"]
    entire = sum(len(batch["completion_ids"]) for batch in batches) == size * first["processes"]
    if not entire and not torch.allclose(together, alone):
        reason = "it needs the rewards of the whole generation, and this step is a part of it"
        cure = f"{keep}, or record with steps_per_generation: gradient_accumulation_steps."
        raise ConfigError([Problem("advantage_estimator", objective.advantage, reason, cure)])
    rows = iter(of_row)
    for batch in batches:
        values = [together[next(rows), row % found.shape[1]] for row in batch["generation_row"].tolist()]
        batch["advantages"] = torch.stack(values).to(batch["advantages"].dtype)


def _groups(batches: Sequence[MicroBatch]) -> tuple[Tensor, list[int]]:
    """Return the rewards of each group once, [groups, completions, functions], and the group of each row."""
    size = batches[0]["group_rewards"].shape[1]
    numbers = [row // size for batch in batches for row in batch["generation_row"].tolist()]
    rewards = [rewards for batch in batches for rewards in batch["group_rewards"]]
    keys = [(number, tuple(group.flatten().tolist())) for number, group in zip(numbers, rewards, strict=True)]
    groups = dict(zip(keys, rewards, strict=True))
    order = {key: i for i, key in enumerate(groups)}
    return torch.stack(list(groups.values())), [order[key] for key in keys]


# Results.


def block_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to: `layers.3`, `embed_tokens`, `lm_head`."""
    match = _BLOCK.search(name)
    parts = [part for part in name.split(".") if part not in ("weight", "bias", "default", "lora_A", "lora_B")]
    return match[1] if match else parts[-1]


def by_block(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of each block's gradient, in the model's order."""
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        block = block_of(name)
        squares[block] = squares.get(block, 0.0) + gradient.double().square().sum().item()
    return {block: total**0.5 for block, total in squares.items()}


def tokens(window: Sequence[ObservedBatch]) -> list[Token]:
    """Return the trained tokens of a step's micro-batches, whose rows are numbered together."""
    sizes = [len(watched.inputs["completion_ids"]) for watched in window]
    placed = zip(accumulate([0, *sizes]), window, strict=False)
    return [token for first_row, watched in placed for token in _tokens(first_row, watched)]


def _tokens(first_row: int, watched: ObservedBatch) -> list[Token]:
    inputs, live = watched.inputs, live_mask(watched.inputs).bool()
    logps = watched.computed["per_token_logps"].float()
    advantages = inputs["advantages"]
    columns = (
        inputs["completion_ids"],
        advantages[:, None] if advantages.dim() == 1 else advantages,
        (logps - inputs.get("old_per_token_logps", logps).float()).exp(),
        watched.computed["entropies"].float(),
        watched.computed["per_token_loss"].float(),
    )
    rows, places = live.nonzero(as_tuple=True)
    values = [column.expand(live.shape)[live].tolist() for column in columns]
    placed = zip((rows + first_row).tolist(), places.tolist(), *values, strict=True)
    return [Token(*token) for token in placed]
