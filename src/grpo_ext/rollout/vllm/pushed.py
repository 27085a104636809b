"""vLLM with the policy's weights, which TRL's VLLMGeneration pushes to an engine of its own or to a server."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from accelerate.utils.other import get_free_port
from peft import PeftModel
from torch import Tensor
from trl.generation import vllm_generation

from grpo_ext.config.truncation import unbounded_problems
from grpo_ext.config.vllm import adapter_problem, sharded_problem
from grpo_ext.errors import ABSENT, ConfigError, ServerLost
from grpo_ext.rollout.vllm.adapters import adapter_weights, slots, unheld
from grpo_ext.rollout.vllm.colocated import engine_settings, load_adapter
from grpo_ext.rollout.vllm.gloo import BACKEND
from grpo_ext.rollout.vllm.requester import most_logprobs
from grpo_ext.rollout.vllm.server import (
    PROBE,
    ServerFacts,
    ServerTrouble,
    engine_mismatches,
    mismatches,
    server_facts,
    unsuited,
)
from grpo_ext.rollout.vllm.transfer import WeightClient
from grpo_ext.rollout.vllm.unpushable import unpushable
from grpo_ext.rollout.vllm.weights import HostCopy, Rounding, effective_weights, is_quantised, policy_dtype
from grpo_ext.waiting import SIGNALLED, shutdown

logger = logging.getLogger(__name__)

T = TypeVar("T")
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to reach a lost server."""


def broadcast(value: T) -> T:
    """Return the main process's `value` on every process."""
    [value] = broadcast_object_list([value], from_process=0)
    return value


class PushedEngine(vllm_generation.VLLMGeneration):
    """`trl.generation.vllm_generation.VLLMGeneration` whose pushes are timed and survive the server's death.

    Args:
        weight_transfer: 'auto', 'nccl' or 'gloo'.
        dtype: of the sampler's weights in colocate mode.
        engine_kwargs: further options of the engine, `vllm_engine_kwargs`.
        with_support: whether vLLM returns the sampling support.
        push: 'auto', 'adapter' or 'merged', `vllm_push`.
        whole: why the other settings need whole weights, if they do.
        ahead: `rollout_ahead`.
        with_routes: whether vLLM returns the experts that it chose.

    Raises:
        ServerLost: no server within `vllm_server_timeout`; on all processes.
    """

    vllm_client: WeightClient
    """The client of the main process."""
    _weight_metadata: Any
    server_base_url: str | None
    tp_group: Any = None
    adapts = False
    """Whether pushes send the adapter alone."""
    adapter: str | None = None
    """Name of the adapter of the last push."""
    _loaded: object = None
    kept: Collection[str] = ()
    """Adapters of earlier pushes that still sample; a server holds them too."""
    _served_dtype: str | None = None
    """dtype of the first server of the run; its sampled probabilities are rounded so."""

    def __init__(
        self,
        *args: Any,
        weight_transfer: str = "auto",
        dtype: str = "auto",
        engine_kwargs: Mapping[str, Any] = MappingProxyType({}),
        with_support: bool = False,
        push: str = "auto",
        whole: str | None = None,
        ahead: int = 0,
        with_routes: bool = False,
        **kwargs: Any,
    ) -> None:
        self.weight_transfer = weight_transfer
        self.dtype = dtype
        self.engine_kwargs = engine_kwargs
        self.with_support, self.with_routes = with_support, with_routes
        self.push, self.whole, self.ahead = push, whole, ahead
        self._held: dict[str, dict[str, Tensor]] = {}
        self._lock = threading.Lock()
        self.sync_seconds = 0.0
        self.sync_bytes = 0
        self.pushing: Callable[[], AbstractContextManager[None]] = nullcontext  # the trainer's timer
        self._rounding: Rounding | None = None
        super().__init__(*args, **kwargs)
        if (mark := getattr(self.model.config, "image_token_id", None)) is not None:  # as TRL does with transformers
            bias = {**self.generation_kwargs.get("logit_bias", {}), int(mark): -100.0}
            self.generation_kwargs = {**self.generation_kwargs, "logit_bias": bias}
        if with_support:
            self.logprobs = self.likeliest

    @property
    def policy_dtype(self) -> torch.dtype:
        """Dtype of the trainer's weights."""
        return policy_dtype(self.model)

    @cached_property
    def sampler_dtype(self) -> torch.dtype:
        """Dtype in which the engine computes."""
        if self.mode == "colocate":
            engine: Any = self.llm.llm_engine
            return cast(torch.dtype, engine.model_config.dtype)
        name = None
        if self.accelerator.is_main_process:
            name = self.vllm_client.get_server_info()["model_config"]["dtype"]
        return cast(torch.dtype, getattr(torch, str(broadcast(name)).removeprefix("torch.")))

    @property
    def server_url(self) -> str:
        """Address of the server."""
        return self.server_base_url or f"http://{self.server_host}:{self.server_port}"

    @property
    def likeliest(self) -> int:
        """Number of likely tokens to request beside the sampled one, where the support is wanted."""
        return min(most_logprobs(self.top_k), self._vocabulary) if self.with_support else 0

    @property
    def _vocabulary(self) -> int:
        config: Any = self.model.config
        return int(config.get_text_config().vocab_size)

    @property
    def _sees(self) -> bool:
        """Whether the policy takes more than text: vLLM keeps what its older weights made of images."""
        config: Any = self.model.config
        return config.get_text_config() is not config

    def _init_vllm(self) -> None:
        self._check_policy()
        self._choose_push()
        if self.mode == "server":
            self.on_main(self._connect)
            self.adapts = broadcast(self.adapts)
            _ = self.sampler_dtype  # its first read is collective
            return
        dtype = str(self.policy_dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        # TRL takes 29500 if it is free at that moment, as does every other run that starts then.
        os.environ.setdefault("MASTER_PORT", str(get_free_port()))
        needed: dict[str, Any] = {"max_logprobs": most_logprobs(self.top_k)} if self.with_support else {}
        if self.with_routes:
            needed["enable_return_routed_experts"] = True
        if self.adapts:
            needed |= {"enable_lora": True, **self.slots}
        with engine_settings(dtype, {**self.engine_kwargs, **needed}):
            super()._init_vllm()

    def _check_policy(self) -> None:
        """Check that the engine can be given this policy."""
        problems = [*unpushable(self.model, on_cpu=self.accelerator.device.type == "cpu")]
        if self.with_support:
            problems += unbounded_problems(self.top_k, self._vocabulary)
        if is_quantised(self.model) and (self._dist.is_fsdp or self._dist.is_zero3):
            problems.append(sharded_problem("quantization_config", ABSENT))
        if problems:
            raise ConfigError(problems)

    def _choose_push(self) -> None:
        """Choose between the adapter alone and whole weights, or raise if `vllm_push` asks for what cannot be."""
        if (reason := self.whole or unheld(self.model)) is not None:
            return self._merge(reason)
        self.adapts, self.slots = True, slots(cast(PeftModel, self.model), self.ahead)
        rank = self.slots["max_lora_rank"]  # scaling is in B, and vLLM takes ranks and names from the tensors
        self._config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}

    def _merge(self, reason: str) -> None:
        if self.push == "adapter":
            raise ConfigError([adapter_problem(reason)])
        self.adapts = False
        if self.push == "auto" and is_peft_model(self.model) and self.accelerator.is_main_process:
            logger.warning(f"Each push to vLLM sends whole weights, with the adapter merged: {reason}.")

    def _connect(self) -> None:
        """Connect to the server, which may need `vllm_server_timeout` seconds until it answers all requests."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            try:
                port, transfer = self.group_port, self.weight_transfer
                self.vllm_client = WeightClient(self.server_url, self.server_timeout, port, transfer)
                self._check_server(self.server_url)
                self.vllm_client.transfer = BACKEND if self.adapts else transfer
                return self.vllm_client.init_communicator(self.accelerator.device)
            except ServerTrouble:
                if shutdown().wait(1.0) or time.monotonic() > deadline:
                    raise

    def _check_server(self, url: str) -> None:
        """Compare the server with the policy, as `grpo-ext check` compares it with the recipe.

        Raises:
            RuntimeError: the server has another vocabulary, takes fewer tokens than a completion may have, does not
                sample from the policy, returns other log-probabilities than the sampler's, or computes in another
                dtype than the one that it replaces.
        """
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        probe = tuple(tokenizer.encode(PROBE, add_special_tokens=False))
        facts = server_facts(url)
        if self.adapts and self._served_dtype is None and not facts.max_loras:
            self._merge("the server was started without room for adapters (grpo-ext serve makes it)")
        routes = self.with_routes or None
        needed = ServerFacts(max_model_len=self.max_completion_length + 1, probe_ids=probe, routes=routes)
        if self.with_support:
            needed = replace(needed, logprobs_mode="processed_logprobs", max_logprobs=self.likeliest)
        elif facts.logprobs_mode != "raw_logprobs" or self.temperature != 1.0:  # at 1 they are the sampler's too
            needed = replace(needed, logprobs_mode="processed_logprobs")
        needed = replace(needed, **{**self.slots, "loads_adapters": True} if self.adapts else {"max_loras": 0})
        needed, self._served_dtype = replace(needed, dtype=self._served_dtype), self._served_dtype or facts.dtype
        dtype = str(self.policy_dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        better = ServerFacts(model=self.model.name_or_path, dtype=dtype)
        if broken := list(map(str, (*mismatches(needed, facts), *unsuited(facts.config)))):
            raise RuntimeError("\n".join([f"the one at {url} does not suit this run:", *broken]))
        for problem in (*mismatches(better, facts), *engine_mismatches(self.engine_kwargs, facts.config)):
            logger.warning(f"vLLM server at {url}: {problem}")

    # The main process talks to the server; every process gets the result.

    def on_main(self, action: Callable[[], object]) -> None:
        """Run `action` on the main process; collective.

        Raises:
            ServerLost: `action` raised; on every process.
        """
        error = None
        if self.accelerator.is_main_process:
            try:
                action()
            except Exception as raised:
                logger.debug("vLLM server", exc_info=True)
                error = f"vLLM server: {raised}"
        error = broadcast(error)
        if error is not None:
            raise ServerLost(error)

    def reopen(self, troubles: Sequence[Exception]) -> None:
        """Wait until the server is back and has a transfer group; main process, any thread.

        Args:
            troubles: the failures of a push or of requests, attempt by attempt.

        Raises:
            ServerLost: `server_timeout` seconds have passed since the first.
            Exception: the last of them, if it would come again.
        """
        first, last = troubles[0], troubles[-1]
        if not isinstance(last, ServerTrouble):
            raise last
        assert isinstance(first, ServerTrouble)
        deadline, pause = first.since + self.server_timeout, 0.5 * len(troubles)
        left, before = deadline - time.monotonic(), self.vllm_client.joined
        if not shutdown().is_set():
            logger.warning(f"vLLM server: {last}. Waiting up to {max(left, 0):.0f} s for it to come back.")
        while left > 0 and not shutdown().wait(min(pause, LONGEST_PAUSE, left)):
            try:
                self.vllm_client.reconnect(self.accelerator.device, patience=max(deadline - time.monotonic(), 1.0))
                if self.vllm_client.joined != before:
                    self._check_server(self.vllm_client.base_url)
                logger.warning("vLLM server: back. The weights are pushed again before it generates.")
                return
            except ServerTrouble as error:
                logger.debug(f"vLLM server: {error}")
            pause, left = 2 * pause, deadline - time.monotonic()
        raise self.lost(last)

    def lost(self, trouble: Exception) -> ServerLost:
        """Return the error that ends a run whose server did not recover from `trouble`."""
        if shutdown().is_set():
            return ServerLost(f"{trouble}; {SIGNALLED}")
        return ServerLost(
            f"{trouble}; it did not recover within vllm_server_timeout={self.server_timeout:g} s. "
            "Start it again (grpo-ext serve --config RECIPE), then resume."
        )

    # Weights.

    def sync_weights(self, copy: HostCopy | None = None) -> None:
        """Push the policy's weights; to a server until they have arrived.

        Args:
            copy: gets them on the main process.

        Raises:
            ServerLost: it died and did not come back; on all processes.
        """
        start = time.monotonic()
        with self.pushing():
            if self.adapts:
                self._push_adapter()
            elif self.mode == "server":
                troubles: list[Exception] = []
                while (trouble := self._push(copy)) is not None:
                    troubles.append(trouble)
                    self.on_main(partial(self.reopen, troubles))
                self.sync_bytes = self.vllm_client.bytes_sent if self.accelerator.is_main_process else 0
            else:
                self.sync_bytes = 0
                super().sync_weights()
                if self._sees:
                    self.llm.llm_engine.reset_encoder_cache()
        self.sync_seconds = time.monotonic() - start

    def _push_adapter(self) -> None:
        """Push the adapter, beside the one before and those that are kept; after a failure they are still there."""
        policy, gather, device = cast(PeftModel, self.model), self._dist.gather_params, self.accelerator.device
        tensors = {
            self._fix_param_name_to_vllm(name): tensor
            for name, tensor in adapter_weights(policy, self.sampler_dtype, gather, device)
        }
        self.sync_bytes = sum(tensor.nbytes for tensor in tensors.values())
        name = broadcast(f"/tmp/grpo-ext-{time.time_ns()}")
        if self.mode == "colocate":
            self._loaded = load_adapter(self.llm.llm_engine, name, self._config, tensors, self._loaded)
        else:
            self._held = {kept: self._held[kept] for kept in self.kept if kept in self._held} | {name: tensors}
            self.on_main(partial(self.push_again, HostCopy()))
        self.adapter = name

    def _push(self, copy: HostCopy | None) -> Exception | None:
        """Try once. Return the failure, which other processes than the main one know only as such."""
        trouble: Exception | None = None
        if self._weight_metadata is None:
            self._weight_metadata = [
                (name, str(param.dtype).removeprefix("torch."), list(param.shape))
                for name, param in self._iter_named_params()
            ]
        params = self._iter_named_params()
        if self.accelerator.is_main_process:
            params = params if copy is None else copy.taking(params)
            try:
                self._send(params)
            except Exception as error:
                trouble = error
        for _ in params:  # gathering a parameter is collective
            pass
        failed = broadcast(trouble is not None)
        return (trouble or ServerTrouble("")) if failed else None

    def _send(self, named: Iterator[tuple[str, Tensor]]) -> None:
        self.vllm_client.update_named_params(self._weight_metadata, named)
        self.vllm_client.reset_prefix_cache()
        if self._sees:
            self.vllm_client.reset_encoder_cache()
        self.vllm_client.arrived()

    def push_again(self, copy: HostCopy, troubles: Sequence[Exception] = ()) -> None:
        """Push weights that were copied, once the server is back; main process, any thread, no collective.

        Args:
            copy: the weights; adapters are sent from the copies of their pushes.
            troubles: failures of requests that the server did not answer, if it is known to be down.

        Raises:
            ServerLost: it did not come back within `vllm_server_timeout` seconds.
        """
        failures = [*troubles]
        with self._lock:
            while True:
                if failures:
                    self.reopen(failures)
                try:
                    if self.adapts:
                        return self.vllm_client.hold(self._held, self._config)
                    return self._send(copy.named(self.accelerator.device))
                except ServerTrouble as error:
                    failures.append(error)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        if is_peft_model(self.model) or is_quantised(self.model):
            self._rounding = Rounding()
            named = effective_weights(
                self.model, self.sampler_dtype, self._rounding, self._dist.gather_params, self.accelerator.device
            )
        else:
            named = super()._iter_named_params()
        for name, param in named:
            self.sync_bytes += param.nbytes
            yield self._fix_param_name_to_vllm(name), param

    @property
    def push_rounding(self) -> float | None:
        """Share of the adapters' update that the last push lost by rounding; None without adapters."""
        return None if self._rounding is None else self._rounding.share
