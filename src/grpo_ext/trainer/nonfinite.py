"""NaN and inf are found before the optimizer sees them: one decision of all processes, and the batch kept on disk.

Each micro-batch leaves one flag on the device, and nothing is read from there before the optimizer step. By then the
gradients are reduced and their norm is known; the clip waits for the decision, since by a norm of NaN it would make
NaN of every gradient, and nobody could say which was first.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_ext.errors import NonFiniteError
from grpo_ext.rewards.text import completion_text
from grpo_ext.trainer.checkpoints.shards import local
from grpo_ext.trainer.diagnosis.recording import gradient_figures, is_logged
from grpo_ext.trainer.findings import ORDER, Finding, Watched, value_in
from grpo_ext.trainer.recording import Recorder, file_of, origin, taken, write
from grpo_ext.trainer.signals import signals

logger = logging.getLogger(__name__)

FOLDER = "failures"
KEPT = 10
"""Batches of skipped steps that are saved."""
IN_A_ROW = 3
"""Skipped steps after which it is no accident."""
SKIPPED = "nonfinite/skipped_steps"
HOW_TO_LOOK = """\
Batches of the step in which NaN or inf was found, before optimizer step {step}; one file for each rank.
`grpo-ext replay` on this folder computes the step again, under any loss. By hand:

    import torch
    kept = torch.load("rank_0.pt")
    kept["findings"]       the first bad tensor of this rank, its micro-batch and rows; empty where it had none
    kept["micro_batches"]  each micro-batch of the step: token ids, masks, advantages, log-probabilities, loss
    kept["parameters"]     names of the parameters whose gradient was not finite
    kept["rewards"]        and prompts, completions, reward_names instead, where a reward returned it

Weights and optimizer were not touched: the last checkpoint has the weights of its own step.
"""


def rank_of_cause(finding: Finding) -> tuple[int, bool]:
    """Sort key: the earliest tensor first; of gradients, those whose parameter is known (a shard may lack it)."""
    return ORDER.index(finding.tensor), finding.tensor == "gradient" and not finding.name


class NonFiniteGuard:
    """Decides before each optimizer step, once for all processes, whether it may be made.

    Attributes:
        skipped: steps that were not made since training began.
        requested: the signal by which one of the processes was told to end, 0 for none; the same on all.
    """

    def __init__(self, trainer: Any) -> None:
        """For a trainer with `on_nonfinite` in its arguments."""
        self.trainer, self.skips = trainer, trainer.args.on_nonfinite == "skip"
        self.start()

    def start(self) -> None:
        """Forget what an earlier call of `train` has seen."""
        self._window: deque[Watched] = deque()
        self._bad: Tensor | None = None
        self._computed: dict[str, Tensor] = {}
        self._recorder = Recorder(self.trainer)
        self.skipped = self._in_a_row = self.requested = 0
        self.skipped_since_log = False

    def tell(self) -> None:
        """At the end of a run: how many of its steps were left out."""
        if self.skipped:
            steps, folder = self.trainer.state.global_step, Path(self.trainer.args.output_dir) / FOLDER
            self.trainer.accelerator.print(f"{self.skipped} of {steps} steps were skipped for NaN or inf: {folder}.")

    # Micro-batches: nothing here waits for the device.

    def note(self, **computed: Tensor) -> None:
        """Tensors [rows, time] on the way to the loss."""
        self._computed = {name: values.detach() for name, values in computed.items()}

    def watch(self, inputs: dict[str, Any], loss: Tensor) -> Tensor:
        """Flag a micro-batch; returns the loss to go backward from."""
        micro_batch = Watched(inputs, {**self._computed, "loss": loss.detach()})
        self._computed = {}
        self._window.append(micro_batch)
        while len(self._window) > self.trainer.current_gradient_accumulation_steps:
            self._window.popleft()
        bad = micro_batch.bad()
        self._bad = bad if self._bad is None else self._bad | bad
        if self._engine_skips and self.trainer.accelerator.sync_gradients:
            loss = loss * torch.where(self._bad, torch.nan, 1.0)  # so that the engine sees it in the gradients
        return loss

    @property
    def _deepspeed(self) -> bool:
        return self.trainer.accelerator.distributed_type == DistributedType.DEEPSPEED

    @property
    def _engine_skips(self) -> bool:
        """Whether another than we looks at the gradients and leaves the step out: DeepSpeed, fp16's scaler."""
        return self._deepspeed or self.trainer.accelerator.scaler is not None

    # The optimizer step.

    def clip(self, model: Any, max_norm: float, stock: Callable[[], Any]) -> Any:
        """Norm of the gradients, which are clipped as `stock` would, if the step may be made; else they are dropped.

        Raises:
            NonFiniteError: it may not, and the run is to stop; on all processes.
        """
        named = [(n.removeprefix("module."), p) for n, p in model.named_parameters() if p.grad is not None]
        ours = not self._deepspeed and self._torch_clips([p.grad for _, p in named])
        if not ours:
            norm = stock()
            self._settle(norm, named)
            return norm
        self.trainer.accelerator.unscale_gradients()
        norm = torch.nn.utils.get_total_norm([p.grad for _, p in named])
        sound = self._settle(norm, named)
        if sound and named and is_logged(self.trainer.state):
            for name, value in gradient_figures(named).items():
                self.trainer._metrics["train"][name].append(value)
        if sound and max_norm < float("inf"):
            torch.nn.utils.clip_grads_with_norm_([p for _, p in named], max_norm, norm)
        return norm

    def _torch_clips(self, gradients: Sequence[Tensor]) -> bool:
        """Whether stock's clip is torch's two functions: one device mesh, or none, and no engine."""
        if self.trainer.accelerator.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA):
            return False
        if self.trainer.accelerator.distributed_type == DistributedType.FSDP and not self.trainer.accelerator.is_fsdp2:
            return False
        meshes = {gradient.device_mesh if isinstance(gradient, DTensor) else None for gradient in gradients}
        return len(meshes) == 1

    def _settle(self, norm: Any, named: Sequence[tuple[str, Any]]) -> bool:
        """Whether the step may be made; the one wait for the device, and the one word between the processes."""
        accelerator = self.trainer.accelerator
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if norm is None:  # an engine that does not say
            norm = float("nan") if accelerator.optimizer_step_was_skipped else 0.0
        norm = torch.as_tensor(norm, device=accelerator.device)
        looks = accelerator.mixed_precision != "fp16"  # where inf is how the scale of the loss is found
        gradient = ~norm.isfinite() if looks else torch.zeros_like(norm, dtype=torch.bool)
        forward = torch.zeros_like(gradient) if self._bad is None else self._bad.to(gradient.device)
        told = torch.full_like(forward, signals.requested, dtype=torch.int)
        flags = torch.stack([forward.view(()).int(), gradient.view(()).int(), told.view(())])
        verdicts = accelerator.gather(flags[None]) if accelerator.num_processes > 1 else flags[None]
        verdicts = verdicts.tolist()
        self.requested = max(requested for *_, requested in verdicts)
        sound = not any(forward or gradient for forward, gradient, _ in verdicts)
        if not sound:
            of_a_batch = any(forward for forward, *_ in verdicts)
            self._unsound(named, mine=bool(verdicts[accelerator.process_index][0]) or not of_a_batch)
        else:
            self._in_a_row = 0
            self._recorder.keep(self._window, norm)
        self.trainer._metrics["train"][SKIPPED].append(float(not sound))
        self._window.clear()
        self._bad = None
        return sound

    def _unsound(self, named: Sequence[tuple[str, Any]], *, mine: bool) -> None:
        """Save the batch of every rank, name the fault of those where it is `mine`, and stop or drop the gradients."""
        parameters = [name for name, p in named if not local(p.grad).isfinite().all()] if mine else []
        findings = self._findings(parameters, dict(named)) if mine else []
        self.skipped += 1
        self._in_a_row += 1
        again = self.skips and self._in_a_row >= IN_A_ROW
        kept = self.skipped <= KEPT or again or not self.skips
        problem = self._save(findings, parameters) if kept else ""
        gathered = gather_object([([asdict(f) for f in findings[:1]], problem)])
        everyone = sorted((Finding(**f) for found, _ in gathered for f in found), key=rank_of_cause)
        problem = next((p for _, p in gathered if p), "")
        text = self._text(everyone, problem if problem or not kept else f"The batch is in {self.folder}.")
        if again:
            text += f" It is the {IN_A_ROW}rd step in a row that is skipped: the run does not recover, and stops."
        if again or not self.skips:
            raise NonFiniteError(f"{text} {self._cure(again)}")
        if self.trainer.accelerator.is_main_process:
            logger.warning(f"{text} The step is skipped (on_nonfinite: skip); weights and optimizer stay as they are.")
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.skipped_since_log = True

    def _findings(self, parameters: Sequence[str], named: dict[str, Any]) -> list[Finding]:
        found = []
        for i, micro_batch in enumerate(self._window, 1):
            bad = micro_batch.first_bad()
            if bad is not None:
                name, values = bad
                per_row = values.isfinite().flatten(1).all(1) if values.dim() > 1 else values.isfinite()
                rows = () if values.dim() == 0 else tuple((~per_row).nonzero().flatten().tolist())
                text = self._words(micro_batch, rows)
                rank = self.trainer.accelerator.process_index
                found.append(Finding(name, rank, value_in(values), "", i, rows, text))
        found.sort(key=lambda f: ORDER.index(f.tensor))
        if not found:
            rank = self.trainer.accelerator.process_index
            value = value_in(local(named[parameters[0]].grad)) if parameters else "nan or inf"
            found.append(Finding("gradient", rank, value, ", ".join(parameters[:3]) + ", ..." * (len(parameters) > 3)))
        return found

    def _words(self, micro_batch: Watched, rows: Sequence[int]) -> str:
        ids, mask = (micro_batch.inputs.get(f"completion_{name}") for name in ("ids", "mask"))
        if not rows or ids is None or mask is None:
            return ""
        return self.trainer._tokenizer.decode(ids[rows[0]][mask[rows[0]].bool()][:32])[:80]

    # What is told and kept.

    @property
    def step(self) -> int:
        """The step that is being computed."""
        return self.trainer.state.global_step + 1

    @property
    def folder(self) -> Path:
        """For the batches of this step."""
        return Path(self.trainer.args.output_dir) / FOLDER / f"step_{self.step}"

    def _text(self, findings: Sequence[Finding], kept: str) -> str:
        first = findings[0] if findings else "nan or inf"
        also = (
            f" ({len(findings)} ranks have found some)"
            if len(findings) > 1 and findings[0].tensor != "gradient"
            else ""
        )
        return f"Step {self.step} of {self.trainer.state.max_steps}: {first}{also}. {kept}".rstrip()

    def _cure(self, again: bool) -> str:
        skip = "" if again else ", or set on_nonfinite: skip to leave such a step out"
        return (
            "It was found before the optimizer step: weights, optimizer and checkpoints are untouched. Look at the "
            f"batch, lower learning_rate or max_grad_norm, train in another precision{skip}."
        )

    def _save(self, findings: Sequence[Finding], parameters: Sequence[str]) -> str:
        found = {"findings": [asdict(f) for f in findings], "parameters": list(parameters)}
        return self.save(found, list(self._window))

    def save(self, found: dict[str, Any], window: Sequence[Watched] = ()) -> str:
        """Keep this rank's part of what was found; a sentence if that failed, since a full disk must not hide it."""
        path = file_of(self.folder.parent, self.step, self.trainer.accelerator.process_index)
        try:
            write(path, (taken(self.trainer, window) if window else origin(self.trainer)) | found)
            (path.parent / "README.txt").write_text(HOW_TO_LOOK.format(step=self.step))
        except Exception as error:
            return f"The batch could not be saved to {path} ({error})."
        return ""

    # Rewards: found when they are returned, long before there is a gradient.

    def of_rewards(
        self, rewards: Tensor, rows: dict[str, list[int]], names: Sequence[str], prompts: list, completions: list
    ) -> tuple[list[dict[str, Any]], str]:
        """This process's findings, ready to be sent, and why its batch could not be saved if it could not.

        Args:
            rewards: this process's, [rows, rewards].
            rows: in which a reward of that name returned what is no number.
            names: of the rewards.
            prompts: of the rows.
            completions: of the rows.
        """
        rank, found = self.trainer.accelerator.process_index, []
        for name, bad in rows.items():
            if bad:
                value, text = value_in(rewards[bad, names.index(name)]), completion_text(completions[bad[0]])[:80]
                found.append(asdict(Finding("rewards", rank, value, name, 0, tuple(bad), text)))
        batch = {"prompts": prompts, "completions": completions, "rewards": rewards.cpu(), "reward_names": list(names)}
        return found, self.save({"findings": found, **batch}) if self._stops_for_rewards else ""

    @property
    def _stops_for_rewards(self) -> bool:
        return not self.skips and self.trainer.model.training

    def rewards(self, findings: Sequence[Finding], problem: str) -> None:
        """Stop for rewards, of all processes, that are no numbers; or say that they count as not scored.

        Raises:
            NonFiniteError: the run is to stop.
        """
        if self._stops_for_rewards:
            kept = problem or f"The completions are in {self.folder}."
            cure = "Correct the reward (None says that it cannot score), or set on_nonfinite: skip to count those"
            raise NonFiniteError(f"{self._text(findings, kept)} {cure} as not scored.")
        if self.trainer.accelerator.is_main_process:
            for finding in findings:
                logger.warning(f"{finding}: those completions count as not scored by it.")
