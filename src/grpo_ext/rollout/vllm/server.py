"""Facts about a running vLLM server, compared with the needs of a recipe."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from grpo_ext.config.engine_options import IN_PLACE, KEPT_ELSEWHERE, SPECULATION, WATERMARK
from grpo_ext.errors import Problem

PROBE = "The answer is 42. <think> x^2 ≠ ½ </think> 答案"
"""Text that different tokenizers encode differently."""
SECONDS = (5.0, 60.0)
"""Limits for connecting and for answering; vLLM needs long for its configuration on a busy machine."""
CONNECTIONS = 256
"""Requests of one process to a server at the same time."""


class ServerTrouble(ConnectionError):
    """A request failed, but may succeed when repeated.

    Attributes:
        since: time of the server's last sign of life, by `time.monotonic`; by default now.
    """

    def __init__(self, message: str, since: float | None = None) -> None:
        super().__init__(message)
        self.since = time.monotonic() if since is None else since


@dataclass(frozen=True)
class ServerFacts:
    """Configuration that a server has, or that a recipe needs of it: None where any value will do."""

    model: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    logprobs_mode: str | None = None
    weight_transfer: str | None = None
    probe_ids: tuple[int, ...] | None = None
    max_logprobs: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration, as the server reports it."""
    max_lora_rank: int | None = None
    max_loras: int | None = None
    routes: bool | None = None
    """Whether answers have the experts that vLLM chose."""
    loads_adapters: bool | None = None
    """Whether it takes adapters while it runs; None: it does not report that."""


def server_facts(url: str) -> ServerFacts:
    """Return the configuration of the server at `url`.

    Raises:
        ServerTrouble: no server answers.
        RuntimeError: its development endpoints are off.
    """
    try:
        info = requests.get(f"{url}/server_info", params={"config_format": "json"}, timeout=SECONDS)
        if info.status_code == 404:
            raise RuntimeError(
                f"the server at {url} has no development endpoints. Start it by grpo-ext serve, or with "
                "VLLM_SERVER_DEV_MODE=1"
            )
        reported = _json(info)
        config = reported["vllm_config"]
        model, adapters = config["model_config"], config.get("lora_config") or {}
        body = {"model": model["served_model_name"], "prompt": PROBE, "add_special_tokens": False}
        ids = _json(requests.post(f"{url}/tokenize", json=body, timeout=SECONDS))["tokens"]
    except requests.RequestException as error:
        raise ServerTrouble(f"no vLLM server answers at {url}") from error
    return ServerFacts(
        model=model["model"],
        max_model_len=int(model["max_model_len"]),
        dtype=str(model["dtype"]).removeprefix("torch."),
        logprobs_mode=model["logprobs_mode"],
        max_logprobs=math.inf if (most := int(model["max_logprobs"])) < 0 else most,
        weight_transfer=(config["weight_transfer_config"] or {}).get("backend"),
        probe_ids=tuple(ids),
        max_lora_rank=int(adapters.get("max_lora_rank", 0)),
        max_loras=int(adapters.get("max_loras", 0)),
        routes=bool((config.get("aux_output_config") or {}).get("enable_return_routed_experts")),
        loads_adapters=(reported.get("vllm_env") or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        config=config,
    )


def _json(response: requests.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise ServerTrouble(f"{response.url} answered {response.status_code}: {response.text[:300]}")
    answer: dict[str, Any] = response.json()
    return answer


def _same_model(a: str, b: str) -> bool:
    return a == b or Path(a).expanduser().resolve() == Path(b).expanduser().resolve()


_REASONS = {
    "model": "the recipe trains {}",
    "max_model_len": "prompt and completion of the recipe may have {} tokens",
    "dtype": "the recipe asks for {}",
    "logprobs_mode": "the correction of the sampler needs {}",
    "max_logprobs": "the loss reads the sampling support from as many log-probabilities, {}",
    "max_lora_rank": "the adapter needs room for the rank {}",
    "max_loras": "{} versions of an adapter may be there at once; a server with room for them takes no whole weights",
    "routes": "replay_routes needs the experts that vLLM chose, which it returns from release 0.31 on",
    "loads_adapters": "adapters are loaded while the server runs, which needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "weight_transfer": "the trainer sends weights by {}",
    "probe_ids": "the recipe's tokenizer encodes a probe text as {}, so the vocabularies differ",
}
_FITS: dict[str, Callable[[Any, Any], bool]] = {
    "model": _same_model,
    **dict.fromkeys(("max_model_len", "max_logprobs", "max_lora_rank"), lambda want, have: have >= want),
    "max_loras": lambda want, have: have >= want if want else not have,
    "loads_adapters": lambda want, have: have is not False,
}
_CURE = "Start the server by `grpo-ext serve --config RECIPE`, or correct the recipe."


def mismatches(want: ServerFacts, have: ServerFacts) -> Iterator[Problem]:
    """Yield a problem for each fact of the server that does not fit."""
    for name in (f.name for f in dataclasses.fields(want) if f.name in _REASONS):
        wanted, reported = getattr(want, name), getattr(have, name)
        if wanted is not None and not _FITS.get(name, lambda a, b: a == b)(wanted, reported):
            yield Problem(name, _shortened(reported), _REASONS[name].format(_shortened(wanted)), _CURE)


_REPORTED_AS = {"kv_cache_dtype": "cache_dtype"}
"""Options that a server reports by another name."""


def engine_mismatches(options: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each option of a recipe that a server reports with another value.

    Its report has the options of the engine in sections; those that it does not have are not compared.
    """
    sections = [config, *(section for section in config.values() if isinstance(section, Mapping))]
    for key, wanted in options.items():
        name = _REPORTED_AS.get(key, key)
        reported = next((section[name] for section in sections if name in section), wanted)
        if not _covers(reported, wanted):
            yield Problem(f"vllm_engine_kwargs.{key}", wanted, f"the server has {reported!r}", _CURE)


def unsuited(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each option of a server with which its samples cannot be the policy's."""
    reasons = {"speculative_config": SPECULATION, "watermark_config": WATERMARK, "kv_transfer_config": KEPT_ELSEWHERE}
    for key, reason in reasons.items():
        if option := config.get(key):
            yield Problem(key, option, reason, "Start the server without it.")
    device, quantization = (
        (config.get(section) or {}).get(key)
        for section, key in (("device_config", "device_type"), ("model_config", "quantization"))
    )
    if device == "cpu" and quantization:
        cure = "Start the server on GPUs, or without it."
        yield Problem("quantization", quantization, f"a push to a server on a CPU {IN_PLACE}", cure)


def _covers(reported: object, wanted: object) -> bool:
    """Return whether a reported value is the wanted one; a mapping may have more keys."""
    if isinstance(reported, Mapping) and isinstance(wanted, Mapping):
        return all(key in reported and _covers(reported[key], value) for key, value in wanted.items())
    return reported == wanted or str(reported) == str(wanted)


def _shortened(value: object) -> object:
    return [*value[:8], "..."] if isinstance(value, tuple) else value
