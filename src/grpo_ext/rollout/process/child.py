"""The process that samples: builds the policy without adapters, loads versions of its weights, and decodes.

It waits for requests of its parent only. It ends when the parent closes the connection, or has ended in any way.
"""

import copy
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from grpo_ext.child_processes import end_with_parent, traceback_tail
from grpo_ext.rollout.decoding import decode, ended, padded
from grpo_ext.rollout.process.memory_file import load
from grpo_ext.rollout.process.messages import Failure, Machine, ModelSpec, SampleRequest, Start
from grpo_ext.rollout.prompt_cache import Unsupported
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.support_log import SamplerRecord, SupportLog

ALIVE_SECONDS = 1.0


def main() -> None:
    """Answer the requests of the parent; arguments are the descriptor of the connection and the parent's PID."""
    descriptor, parent = map(int, sys.argv[1:3])
    end_with_parent(parent)  # which starts this process in any of its threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    connection = Connection(descriptor)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return
    except BaseException as error:
        unsupported = isinstance(error, Unsupported)
        failure = Failure(str(error) if unsupported else traceback_tail(error), unsupported)
        connection.send_bytes(pickle.dumps(failure))


def _serve(connection: Connection) -> None:
    decoder: Decoder | None = None
    while True:
        request: SampleRequest = pickle.loads(connection.recv_bytes())
        if request.start is not None:
            decoder = Decoder(request.start)
        assert decoder is not None
        if request.weights is not None:
            file = recv_handle(connection)
            load(decoder.model, request.weights, file)
            os.close(file)
        sampled = decoder.sample(request, _Heartbeat(lambda: connection.send_bytes(pickle.dumps([]))))
        connection.send_bytes(pickle.dumps(sampled))


class Decoder:
    """The model of the process, and how it decodes."""

    def __init__(self, start: Start) -> None:
        _set_up(start.machine)
        self.device, self.settings = start.machine.device, start.decoding
        self.model = built(start.model, self.device)
        mixed = start.model.autocast
        self.autocast = nullcontext() if mixed is None else torch.autocast(self.device.type, mixed)

    @torch.no_grad()
    def sample(self, request: SampleRequest, after_forward: Callable[..., None]) -> list[Sampled]:
        """Sample a completion after each context, as the trainer would in its own process."""
        settings, count = self.settings, len(request.contexts)
        ids, mask = padded(request.contexts, settings.pad, settings.multiple)
        record = SamplerRecord(log=SupportLog(count) if settings.with_support else None)
        method = partial(
            decode, record=record, uniforms=torch.from_numpy(request.uniforms), limits=torch.tensor(request.limits)
        )
        config = copy.deepcopy(settings.config)
        config.max_new_tokens = max(request.limits)
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        blocks = [block for part in self.model.modules() if isinstance(part, nn.ModuleList) for block in part]
        with ExitStack() as hooked, self.autocast:  # around the whole generation: it casts each weight once
            for block in blocks:  # a long prompt takes a forward long
                hooked.enter_context(block.register_forward_hook(after_forward))
            output = cast(Any, self.model).generate(**inputs, generation_config=config, custom_generate=method)
        rows = zip(output[:, ids.shape[1] :].tolist(), request.limits, strict=True)
        completions = [ended(row[:limit], settings.ends) for row, limit in rows]
        supports: Sequence[Tensor | None] = record.supports(completions) or [None] * count
        of_rows = zip(completions, record.logps[-1].tolist(), supports, strict=True)
        return [Sampled(row, its[: len(row)], sets) for row, its, sets in of_rows]


class _Heartbeat:
    """A hook of a model's blocks that sends a sign of life, at most every second, while the model computes."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send, self._last = send, time.monotonic()

    def __call__(self, *_: object) -> None:
        if time.monotonic() - self._last > ALIVE_SECONDS:
            self._send()
            self._last = time.monotonic()


def _set_up(machine: Machine) -> None:
    torch.set_num_threads(machine.threads)
    torch.set_float32_matmul_precision(machine.matmul_precision)
    torch.use_deterministic_algorithms(machine.deterministic, warn_only=True)
    if machine.device.type != "cpu":
        torch.accelerator.set_device_index(machine.device.index or 0)


def built(spec: ModelSpec, device: torch.device) -> PreTrainedModel:
    """Return the model that `spec` describes, without its weights."""
    with torch.device(device), no_init_weights():
        model: PreTrainedModel = spec.kind._from_config(spec.config)
    model.tie_weights()  # what `no_init_weights` leaves out
    model.generation_config = spec.generation_config
    if spec.embedding_dtype is not None:
        _cast_head(model, spec.embedding_dtype)
    return model.eval()


def _cast_head(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let an LM head in float32 compute in it, as TRL's `cast_lm_head_to_fp32` does."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, nn.Module)
    head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    embeddings.register_forward_hook(lambda _, args, output: output.to(dtype))
