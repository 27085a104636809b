"""TRL's VLLMGeneration on any device, with servers that may die and come back."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from accelerate.utils.other import get_free_port
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from grpo_ext.errors import ServerLost
from grpo_ext.rollout.vllm.client import CONNECTIONS, NOTHING, Client, ServerTrouble
from grpo_ext.rollout.vllm.late import VLLMGeneration, grpo_trainer, import_vllm, vllm_generation
from grpo_ext.rollout.vllm.plugin import keep_weights_in_place
from grpo_ext.rollout.vllm.server import PROBE, Wanted, mismatches, server_facts

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 5.0
"""Seconds between two attempts to reach a server that is gone."""


@contextmanager
def in_place_of_trls(use_vllm: bool, weight_transfer: str, dtype: str) -> Iterator[None]:
    """While a trainer is built, have it take our `Generation`."""
    if not use_vllm:
        yield
        return
    ours = partial(Generation, weight_transfer=weight_transfer, dtype=dtype)
    with patch.object(grpo_trainer, "VLLMGeneration", ours):
        yield


@contextmanager
def _engine_settings(dtype: str) -> Iterator[None]:
    """While TRL builds its engine: our dtype; on a CPU weights stay in place, and threads and memory stay small."""
    from vllm.platforms import current_platform

    import_vllm()
    settings: dict[str, Any] = {"dtype": dtype}
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads are not vLLM's to bind
        settings["enforce_eager"] = True
        keep_weights_in_place()
    threads = torch.get_num_threads()
    with patch.object(vllm_generation, "LLM", partial(vllm_generation.LLM, **settings)):
        yield
    torch.set_num_threads(threads)


class Generation(VLLMGeneration):
    """`trl.generation.vllm_generation.VLLMGeneration` that times its pushes and outlives its server.

    Args:
        weight_transfer: 'auto', 'nccl' or 'gloo'.
        dtype: of the sampler's weights in colocate mode.

    Raises:
        ServerLost: no server within `vllm_server_timeout`; on all processes alike.
    """

    vllm_client: Client
    _weight_metadata: Any
    server_base_url: str | None

    def __init__(self, *args: Any, weight_transfer: str = "auto", dtype: str = "auto", **kwargs: Any) -> None:
        """As TRL's."""
        self.weight_transfer = weight_transfer
        self.dtype = dtype
        self.sync_seconds = 0.0
        self.sync_bytes = 0
        self.pushing: Callable[[], AbstractContextManager[None]] = nullcontext  # the clock of who trains
        self._seeds: list[int] | None = None
        super().__init__(*args, **kwargs)

    @property
    def policy_dtype(self) -> torch.dtype:
        """What the trainer keeps its weights in."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def sampler_dtype(self) -> torch.dtype:
        """What the engine computes in."""
        if self.mode == "colocate":
            dtype: Any = self.llm.llm_engine.model_config.dtype
            return dtype
        name = None
        if self.accelerator.is_main_process:
            name = self.vllm_client.get_server_info()["model_config"]["dtype"]
        return getattr(torch, str(self._told(name)).removeprefix("torch."))

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._together(self._connect)
            return
        dtype = str(self.policy_dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        # TRL takes 29500 when it is free as it looks: so does every other run that starts at that moment.
        os.environ.setdefault("MASTER_PORT", str(get_free_port()))
        with _engine_settings(dtype):
            super()._init_vllm()

    def _connect(self) -> None:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.vllm_client = Client(url, self.group_port, self.server_timeout, self.weight_transfer)
        self._check_server(url)
        self.vllm_client.init_communicator(self.accelerator.device)

    def _check_server(self, url: str) -> None:
        """Compare the server with the policy, as `grpo-ext check` does with the recipe.

        Raises:
            RuntimeError: it reads another vocabulary, or takes fewer tokens than a completion has.
        """
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        needed = Wanted(
            length=self.max_completion_length + 1, probe_ids=tuple(tokenizer.encode(PROBE, add_special_tokens=False))
        )
        better = Wanted(model=self.model.name_or_path, dtype=None if self.dtype == "auto" else self.dtype)
        facts = server_facts(url)
        if broken := list(mismatches(needed, facts)):
            raise RuntimeError("\n".join([f"the one at {url} does not suit this run:", *broken]))
        for sentence in mismatches(better, facts):
            logger.warning(f"vLLM server at {url}: {sentence}")

    # One process talks to the server, all learn what came of it.

    def _told(self, outcome: Any) -> Any:
        """The main process's `outcome`, on every process."""
        box = [outcome]
        broadcast_object_list(box, from_process=0)
        return box[0]

    def _together(self, action: Callable[[], Any]) -> None:
        """Run `action` on the main process.

        Raises:
            ServerLost: it raised there; on every process.
        """
        error = None
        if self.accelerator.is_main_process:
            try:
                action()
            except Exception as raised:
                logger.debug("vLLM server", exc_info=True)
                error = f"vLLM server: {raised}"
        error = self._told(error)
        if error is not None:
            raise ServerLost(error)

    def _outlast(self, troubles: list[Exception]) -> None:
        """On the main process: wait until the server is back and has a transfer group again.

        Args:
            troubles: what went wrong with this push or these completions so far, attempt by attempt.

        Raises:
            ServerLost: `server_timeout` seconds have passed since the first; or the server refuses what it is asked.
        """
        first, last = troubles[0], troubles[-1]
        if not isinstance(last, ServerTrouble):
            raise last
        assert isinstance(first, ServerTrouble)
        deadline, pause = first.since + self.server_timeout, 0.5 * len(troubles)
        left = deadline - time.monotonic()
        logger.warning(f"vLLM server: {last}. Waiting up to {max(left, 0):.0f} s for it to come back.")
        while left > 0:
            time.sleep(min(pause, LONGEST_PAUSE, left))
            try:
                self.vllm_client.reconnect(self.accelerator.device, patience=max(deadline - time.monotonic(), 1.0))
                logger.warning("vLLM server: back. The weights are pushed again before it generates.")
                return
            except ServerTrouble as error:
                logger.debug(f"vLLM server: {error}")
            pause, left = 2 * pause, deadline - time.monotonic()
        raise ServerLost(
            f"{last}; it did not recover within vllm_server_timeout={self.server_timeout:g} s. "
            "Start it again (grpo-ext serve --config RECIPE), then resume."
        )

    # Weights.

    def sync_weights(self) -> None:
        """Push the policy's weights; to a server until they have arrived.

        Raises:
            ServerLost: it died and did not come back; on all processes.
        """
        start = time.monotonic()
        with self.pushing():
            if self.mode == "server":
                troubles: list[Exception] = []
                while (trouble := self._push()) is not None:
                    troubles.append(trouble)
                    self._together(partial(self._outlast, troubles))
                self.sync_bytes = self.vllm_client.bytes_sent if self.accelerator.is_main_process else 0
            else:
                self.sync_bytes = 0
                super().sync_weights()
        self.sync_seconds = time.monotonic() - start

    def _push(self) -> Exception | None:
        """One attempt; what went wrong on the main process, where that matters, or True elsewhere."""
        trouble: Exception | None = None
        if self._weight_metadata is None:
            self._weight_metadata = [
                (name, str(param.dtype).removeprefix("torch."), list(param.shape))
                for name, param in self._iter_named_params()
            ]
        params = self._iter_named_params()
        if self.accelerator.is_main_process:
            try:
                self.vllm_client.update_named_params(self._weight_metadata, params)
                self.vllm_client.reset_prefix_cache()
            except Exception as error:
                trouble = error
        for _ in params:  # gathering a parameter takes all processes
            pass
        failed = self._told(trouble is not None)
        return (trouble or ServerTrouble("")) if failed else None

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        model: Any = self.model
        sharded = self._dist.is_fsdp or self.accelerator.distributed_type == "DEEPSPEED"
        merged = is_peft_model(model) and not sharded
        for name, param in self._merged_params(model) if merged else super()._iter_named_params():
            self.sync_bytes += param.nbytes
            yield name, param

    def _merged_params(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Weights with their adapters merged, one at a time; the base weights stay what they were to the last bit."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
        for name, param in list(model.named_parameters()):
            if model.prefix in name or "original_module" in name or ".modules_to_save.ref." in name:
                continue
            parts = name.split(".")
            owners = (".".join(parts[:i]) for i, part in enumerate(parts) if part == "base_layer")
            around = [layers[owner] for owner in owners if owner in layers]
            value = merged_value(around, name.rpartition(".base_layer.")[2]) if around else param.data
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            yield self._fix_param_name_to_vllm(plain, extra_prefixes=["modules_to_save.default."]), value

    # Completions.

    @contextmanager
    def sampling_as(self, **settings: Any) -> Iterator[None]:
        """Other settings of sampling while it lasts."""
        before = {name: getattr(self, name) for name in settings}
        for name, value in settings.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @contextmanager
    def seeded(self, seeds: list[int]) -> Iterator[None]:
        """While it lasts each of this process's rows is sampled by its own seed.

        A server then gets a request for each row: the rows of one request would share their seed.
        """
        before, self._seeds = self._seeds, seeds
        try:
            yield
        finally:
            self._seeds = before

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        """As TRL's; asked again, after a push, if the server dies meanwhile. Nothing of a failed attempt is kept.

        Raises:
            ServerLost: it died and did not come back; on all processes.
        """
        seeds = None if self._seeds is None else [*self._seeds, *[0] * (len(prompts) - len(self._seeds))]
        if seeds is not None and self.mode == "colocate":
            each = partial(_each_seeded, self.llm.generate, self._of_engine(seeds))
            with patch.object(self.llm, "generate", each):
                return super().generate(prompts, images, num_generations, profiler)
        troubles: list[Exception] = []
        while True:
            if seeds is None:
                answer = super().generate(prompts, images, num_generations, profiler)
            else:
                answer = self._by_requests(prompts, seeds)
            if self.mode != "server" or answer[1] or not prompts:
                return answer
            if self.accelerator.is_main_process:
                troubles.append(self.vllm_client.failure or ServerTrouble("no completions"))
            self._together(partial(self._outlast, troubles))
            self.sync_weights()

    def _of_engine(self, seeds: list[int]) -> list[int]:
        """Seeds of all rows that a colocated engine gets, in TRL's order: with tensor parallelism those of its ranks.

        Every rank must give a row the same seed, or the ranks sample different tokens for it.
        """
        if self.tensor_parallel_size == 1:
            return seeds
        gathered: list[Any] = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, seeds, group=self.tp_group)
        return [seed for of_rank in gathered for seed in of_rank]

    def _by_requests(self, prompts: list[list[int]], seeds: list[int]) -> tuple[Any, ...]:
        """What TRL's `generate` returns, from a server that the main process asks for each row of all processes."""
        asked = gather_object(list(zip(prompts, seeds, strict=True)))
        answers = None
        if self.accelerator.is_main_process:
            self.vllm_client.failure = None
            try:
                with ThreadPoolExecutor(CONNECTIONS) as threads:
                    limit = self.max_completion_length
                    answers = list(threads.map(lambda row: self.completion_of(row[0], limit, row[1]), asked))
            except Exception as error:
                self.vllm_client.failure = error
        answers = self._told(answers)
        if answers is None:
            return NOTHING["prompt_ids"], NOTHING["completion_ids"], None, None
        mine = answers[self.accelerator.process_index * len(prompts) :][: len(prompts)]
        return prompts, [ids for ids, _ in mine], [logprobs for _, logprobs in mine], None

    def completion_of(self, context: list[int], limit: int, seed: int) -> tuple[list[int], list[list[float | None]]]:
        """Ask a server for one completion; its ids, and for each id a list that begins with its log-probability.

        Raises:
            ServerTrouble: the server did not answer, or has lost our weights.
        """
        answer = self.vllm_client.asked(
            prompts=[context],
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            max_tokens=limit,
            logprobs=self.logprobs,
            structured_outputs_regex=self.structured_outputs_regex,
            generation_kwargs={**(self.generation_kwargs or {}), "seed": seed},
        )
        return answer["completion_ids"][0], answer["logprobs"][0]


def _each_seeded(
    generate: Callable[..., Any], seeds: list[int], prompts: Any, *, sampling_params: Any, **options: Any
) -> Any:  # fmt: skip
    each = [sampling_params.clone() for _ in prompts]
    for params, seed in zip(each, seeds, strict=True):
        params.seed = seed
    return generate(prompts, sampling_params=each, **options)


def merged_value(layers: list[Any], name: str) -> Tensor:
    """A weight of the module that `layers`, one around the other, adapt, with all their adapters merged into it.

    The module has its own weights back afterwards: quantised ones are replaced by merging, others changed in place.
    """
    base = layers[0].get_base_layer()
    kept = [(key, weight, weight.detach().clone()) for key, weight in base.named_parameters()]
    for layer in layers:
        layer.merge()
    value = base.get_parameter(name).detach().clone()
    for layer in reversed(layers):
        layer.unmerge()
    for key, weight, data in kept:
        owner, _, leaf = key.rpartition(".")
        setattr(base.get_submodule(owner), leaf, weight)
        weight.data.copy_(data)
    return value
