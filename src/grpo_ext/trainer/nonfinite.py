"""Find NaN and inf before each optimizer step: one decision for all processes, with the batch kept on disk.

Each micro-batch leaves one flag on the device, which is read at the optimizer step. By then the gradients are reduced
and their norm is known. Gradients are clipped after the decision: a clip by a norm of NaN would turn all of them into
NaN, and hide which was first.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import NonFiniteError
from grpo_ext.rewards.text import completion_text
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.safe_reading import write_text
from grpo_ext.trainer.checkpoints.processes import local
from grpo_ext.trainer.diagnosis.recording import gradient_figures, is_logged
from grpo_ext.trainer.loss import LossOutput
from grpo_ext.trainer.nan_report import HOW_TO_LOOK, BadTensor, ObservedBatch, in_order, value_in, write
from grpo_ext.trainer.signals import signals

logger = logging.getLogger(__name__)

FOLDER = "failures"
KEPT = 10
"""Batches of skipped steps that are saved, at most."""
IN_A_ROW = 3
"""Consecutive skipped steps after which the run stops."""
SKIPPED = "nonfinite/skipped_steps"


class NonFiniteGuard:
    """Decides on all processes, before each optimizer step, whether to make it.

    Args:
        trainer: whose step, state and optimizer it reads.
        metrics: those of training.
        tokenizer: shows what a bad row says.
        dump: returns what is written of a step's micro-batches.

    Attributes:
        skipped: skipped steps since training began.
        requested: the signal that one of the processes received, 0 for none; the same on all processes.
        observed: micro-batches of the current optimizer step.
        updating: whether the optimizer may be changing the weights; the end of the step resets it.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        metrics: Mapping[str, list[float]],
        tokenizer: PreTrainedTokenizerBase,
        dump: Callable[[Sequence[ObservedBatch]], dict[str, Any]],
    ) -> None:
        self.trainer, self.metrics, self.tokenizer, self.dump = trainer, metrics, tokenizer, dump
        self.skips = cast(GRPOExtConfig, trainer.args).on_nonfinite == "skip"
        self.start()

    def start(self) -> None:
        """Reset before a call of `train`."""
        self.observed: deque[ObservedBatch] = deque()
        self._bad: Tensor | None = None
        self._computed: dict[str, Tensor] = {}
        self.skipped = self._in_a_row = self.requested = 0
        self.updating = False
        self.skipped_since_log = False

    def report(self) -> None:
        """Print at the end of a run how many of its steps were skipped."""
        if self.skipped:
            steps = self.trainer.state.global_step
            self.trainer.accelerator.print(
                f"{self.skipped} of {steps} steps were skipped for NaN or inf: {self.folder.parent}."
            )

    # Micro-batches. Without a device sync.

    def note(self, output: LossOutput) -> None:
        """Keep tensors [rows, time] that the loss has computed."""
        names = ("per_token_logps", "per_token_loss", "entropies")
        self._computed = {name: getattr(output, name).detach() for name in names}

    def watch(self, inputs: dict[str, Any], loss: Tensor) -> Tensor:
        """Flag a micro-batch; return the loss for the backward pass."""
        micro_batch = ObservedBatch(inputs, {**self._computed, "loss": loss.detach()})
        self._computed = {}
        self.observed.append(micro_batch)
        while len(self.observed) > self.trainer.current_gradient_accumulation_steps:
            self.observed.popleft()
        bad = micro_batch.bad()
        self._bad = bad if self._bad is None else self._bad | bad
        engine_skips = self._deepspeed or self.trainer.accelerator.scaler is not None  # bad steps, by itself
        if engine_skips and self.trainer.accelerator.sync_gradients:
            loss = loss * torch.where(self._bad, torch.nan, 1.0)  # which shows in the gradients
        return loss

    @property
    def _deepspeed(self) -> bool:
        return self.trainer.accelerator.distributed_type == DistributedType.DEEPSPEED

    # The optimizer step.

    def clip(self, model: Any, max_norm: float, stock: Callable[[], Any]) -> Any:
        """Clip the gradients as `stock` would, or drop them if the step is skipped; return their norm.

        Raises:
            NonFiniteError: NaN or inf was found, and `on_nonfinite` is not 'skip'; on all processes.
        """
        named = [(n.removeprefix("module."), p) for n, p in model.named_parameters() if p.grad is not None]
        if self._deepspeed or not self._torch_clips([p.grad for _, p in named]):
            norm = stock()
            self._settle(norm, named)
            return norm
        self.trainer.accelerator.unscale_gradients()
        norm = torch.nn.utils.get_total_norm([p.grad for _, p in named])
        sound = self._settle(norm, named)
        if sound and named and is_logged(self.trainer.state):
            for name, value in gradient_figures(named).items():
                self.metrics[name].append(value)
        if sound and max_norm < float("inf"):
            torch.nn.utils.clip_grads_with_norm_([p for _, p in named], max_norm, norm)
        return norm

    def _torch_clips(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether stock's clip is torch's two functions: at most one device mesh, and no engine."""
        if self.trainer.accelerator.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA):
            return False
        if self.trainer.accelerator.distributed_type == DistributedType.FSDP and not self.trainer.accelerator.is_fsdp2:
            return False
        meshes = {gradient.device_mesh if isinstance(gradient, DTensor) else None for gradient in gradients}
        return len(meshes) == 1

    def _settle(self, norm: Any, named: Sequence[tuple[str, Any]]) -> bool:
        """Decide on all ranks whether to step. The guard's only device sync and only collective."""
        accelerator = self.trainer.accelerator
        if norm is None:  # an engine that does not return it
            norm = float("nan") if accelerator.optimizer_step_was_skipped else 0.0
        norm = torch.as_tensor(norm.full_tensor() if isinstance(norm, DTensor) else norm, device=accelerator.device)
        flags = self._flags(norm)
        verdicts = (accelerator.gather(flags[None]) if accelerator.num_processes > 1 else flags[None]).tolist()
        self.requested = max(requested for *_, requested in verdicts)
        sound = not any(forward or gradient for forward, gradient, _ in verdicts)
        if sound:
            self._in_a_row = 0
        else:
            in_a_forward = any(forward for forward, *_ in verdicts)
            self._unsound(named, mine=bool(verdicts[accelerator.process_index][0]) or not in_a_forward)
        self.metrics[SKIPPED].append(float(not sound))
        self.observed.clear()
        self._bad, self.updating = None, True
        return sound

    def _flags(self, norm: Tensor) -> Tensor:
        """Return [bad forward, bad gradient, signal] of this process."""
        checked = self.trainer.accelerator.mixed_precision != "fp16"  # whose scaler finds the scale of the loss by inf
        gradient = ~norm.isfinite() if checked else torch.zeros_like(norm, dtype=torch.bool)
        forward = torch.zeros_like(gradient) if self._bad is None else self._bad.to(gradient.device)
        requested = torch.full_like(forward, signals.requested, dtype=torch.int)
        return torch.stack([forward.view(()).int(), gradient.view(()).int(), requested.view(())])

    def _unsound(self, named: Sequence[tuple[str, Any]], *, mine: bool) -> None:
        """Save the batch, find the bad tensor where it is `mine`, and stop or skip the step; on all ranks."""
        parameters = [name for name, p in named if not local(p.grad).isfinite().all()] if mine else []
        findings = self._findings(parameters, dict(named)) if mine else []
        self.skipped += 1
        self._in_a_row += 1
        again = self.skips and self._in_a_row >= IN_A_ROW
        kept = self.skipped <= KEPT or again or not self.skips
        report = {"findings": [asdict(f) for f in findings], "parameters": parameters}
        problem = self.save(report, list(self.observed)) if kept else ""
        gathered = gather_object([([asdict(f) for f in findings[:1]], problem)])
        everyone = sorted((BadTensor(**f) for first, _ in gathered for f in first), key=in_order)
        problem = next((p for _, p in gathered if p), "")
        text = self._text(everyone, problem if problem or not kept else f"The batch is in {self.folder}.")
        if again:
            text += f" It is the {IN_A_ROW}rd step in a row that is skipped: the run does not recover, and stops."
        if again or not self.skips:
            skip = "" if again else ", or set on_nonfinite: skip to skip such steps"
            raise NonFiniteError(
                f"{text} It was found before the optimizer step: weights, optimizer and checkpoints are untouched. "
                f"Look at the batch, lower learning_rate or max_grad_norm, train in another precision{skip}."
            )
        if self.trainer.accelerator.is_main_process:
            logger.warning(f"{text} The step is skipped (on_nonfinite: skip); weights and optimizer stay as they are.")
        cast(Optimizer, self.trainer.optimizer).zero_grad(set_to_none=True)
        self.skipped_since_log = True

    def _findings(self, parameters: Sequence[str], named: Mapping[str, Tensor]) -> list[BadTensor]:
        tensors = []
        for i, micro_batch in enumerate(self.observed, 1):
            if (bad := micro_batch.first_bad()) is not None:
                name, values = bad
                per_row = values.isfinite().flatten(1).all(1) if values.dim() > 1 else values.isfinite()
                rows = () if values.dim() == 0 else tuple((~per_row).nonzero().flatten().tolist())
                tensors.append(
                    BadTensor(name, self._rank, value_in(values), "", i, rows, self._words(micro_batch, rows))
                )
        if tensors:
            return sorted(tensors, key=in_order)
        gradient = named[parameters[0]].grad if parameters else None
        value = "nan or inf" if gradient is None else value_in(local(gradient))
        names = ", ".join(parameters[:3]) + ", ..." * (len(parameters) > 3)
        return [BadTensor("gradient", self._rank, value, names)]

    def _words(self, micro_batch: ObservedBatch, rows: Sequence[int]) -> str:
        ids, mask = (micro_batch.inputs.get(f"completion_{name}") for name in ("ids", "mask"))
        if not rows or ids is None or mask is None:
            return ""
        return str(self.tokenizer.decode(ids[rows[0]][mask[rows[0]].bool()][:32]))[:80]

    # Messages and files.

    @property
    def _rank(self) -> int:
        return self.trainer.accelerator.process_index

    @property
    def step(self) -> int:
        """The current step, from 1."""
        return self.trainer.state.global_step + 1

    @property
    def folder(self) -> Path:
        """Folder for the batches of this step."""
        return Path(str(self.trainer.args.output_dir)) / FOLDER / f"step_{self.step}"

    def _text(self, findings: Sequence[BadTensor], kept: str) -> str:
        first = findings[0] if findings else "nan or inf"
        several = len(findings) > 1 and findings[0].tensor != "gradient"
        also = f" (found on {len(findings)} ranks)" if several else ""
        return f"Step {self.step} of {self.trainer.state.max_steps}: {first}{also}. {kept}".rstrip()

    def save(self, report: dict[str, Any], observed: Sequence[ObservedBatch] = ()) -> str:
        """Write this rank's findings and batch; return a sentence if that failed, and "" otherwise."""
        path = self.folder / f"rank_{self._rank}.pt"
        try:
            write(path, self.dump(observed) | report)
            write_text(path.parent / "README.txt", HOW_TO_LOOK.format(step=self.step))
        except Exception as error:  # a full disk must not hide what was found
            return f"The batch could not be saved to {path} ({error})."
        return ""

    # Rewards, when they are returned, long before there is a gradient.

    def of_rewards(
        self, rewards: Tensor, rows: dict[str, list[int]], names: Sequence[str], prompts: list, completions: list
    ) -> tuple[list[dict[str, Any]], str]:
        """Return this process's bad rewards as dictionaries, and why its batch could not be saved, or "".

        `rows` are those in which a reward, by name, returned NaN or inf.
        """
        findings = []
        for name, bad in rows.items():
            if bad:
                value, text = value_in(rewards[bad, names.index(name)]), completion_text(completions[bad[0]])[:80]
                findings.append(asdict(BadTensor("rewards", self._rank, value, name, 0, tuple(bad), text)))
        batch = {"prompts": prompts, "completions": completions, "rewards": rewards.cpu(), "reward_names": list(names)}
        return findings, self.save({"findings": findings, **batch}) if self._stops_for_rewards else ""

    @property
    def _stops_for_rewards(self) -> bool:
        return not self.skips and cast(nn.Module, self.trainer.model).training

    def rewards(self, findings: Sequence[BadTensor], problem: str) -> None:
        """Stop for NaN or inf in the rewards of any process, or warn that they count as not scored.

        Raises:
            NonFiniteError: `on_nonfinite` is not 'skip'.
        """
        if self._stops_for_rewards:
            kept = problem or f"The completions are in {self.folder}."
            cure = "Correct the reward (None means that it cannot score), or set on_nonfinite: skip to count those"
            raise NonFiniteError(f"{self._text(findings, kept)} {cure} as not scored.")
        if self.trainer.accelerator.is_main_process:
            for finding in findings:
                logger.warning(f"{finding}: those completions count as not scored by it.")
