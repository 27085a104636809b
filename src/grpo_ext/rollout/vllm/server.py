"""What a running vLLM server is, against what a recipe needs."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

PROBE = "The answer is 42. <think> x^2 ≠ ½ </think> 答案"
"""Text whose tokens tell two tokenizers apart."""

SECONDS = (5.0, 60.0)
"""To connect, and to answer: vLLM gathers what it is asked for, which takes long on a busy machine."""


class ServerUnreachable(ConnectionError):
    """No server answers there."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    model: str
    max_model_len: int
    dtype: str
    logprobs_mode: str
    weight_transfer: str | None
    probe_ids: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """What a recipe needs of its server; None where anything will do.

    `length` is the number of tokens of prompt and completion together, `transfer` the engine.
    """

    model: str | None = None
    length: int | None = None
    dtype: str | None = None
    logprobs_mode: str | None = None
    transfer: str | None = None
    probe_ids: tuple[int, ...] | None = None


def _json(response: requests.Response) -> Any:
    if response.status_code != 200:
        raise ServerUnreachable(f"{response.url} answered {response.status_code}: {response.text[:300]}")
    return response.json()


def server_facts(url: str) -> ServerFacts:
    """Ask the server at `url`.

    Raises:
        ServerUnreachable: nothing answers, or its development endpoints are off.
    """
    try:
        info = requests.get(f"{url}/server_info", params={"config_format": "json"}, timeout=SECONDS)
        if info.status_code == 404:
            raise ServerUnreachable(
                f"the server at {url} has no development endpoints. Start it by grpo-ext serve, or with "
                "VLLM_SERVER_DEV_MODE=1."
            )
        config = _json(info)["vllm_config"]
        model = config["model_config"]
        body = {"model": model["served_model_name"], "prompt": PROBE, "add_special_tokens": False}
        ids = _json(requests.post(f"{url}/tokenize", json=body, timeout=SECONDS))["tokens"]
    except requests.RequestException as error:
        raise ServerUnreachable(f"no vLLM server answers at {url}") from error
    return ServerFacts(
        model=model["model"],
        max_model_len=int(model["max_model_len"]),
        dtype=str(model["dtype"]).removeprefix("torch."),
        logprobs_mode=model["logprobs_mode"],
        weight_transfer=(config["weight_transfer_config"] or {}).get("backend"),
        probe_ids=tuple(ids),
    )


def _same_model(a: str, b: str) -> bool:
    return a == b or Path(a).expanduser().resolve() == Path(b).expanduser().resolve()


_RULES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "model": ("model", _same_model),
    "length": ("max_model_len", lambda want, have: have >= want),
    "dtype": ("dtype", lambda want, have: want == have),
    "logprobs_mode": ("logprobs_mode", lambda want, have: want == have),
    "transfer": ("weight_transfer", lambda want, have: want == have),
    "probe_ids": ("probe_ids", lambda want, have: tuple(want) == tuple(have)),
}
_CURES = {
    "model": "model: the server has {have}, the recipe trains {want}.",
    "length": "length: the server takes {have} tokens, prompt and completion may have {want}.",
    "dtype": "dtype: the server computes in {have}, the recipe asks for {want}.",
    "logprobs_mode": "log-probabilities: the server returns {have}, the correction of the sampler needs {want}.",
    "transfer": "weight transfer: the server receives by {have}, the trainer sends by {want}.",
    "probe_ids": "vocabulary: the two tokenizers read a probe text differently ({have} and {want}).",
}


def _short(value: Any) -> str:
    return f"{', '.join(map(str, value[:8]))}, ..." if isinstance(value, tuple) else str(value)


def mismatches(want: Wanted, have: ServerFacts) -> Iterator[str]:
    """One sentence for each thing that the server is not as the recipe needs it."""
    for field in dataclasses.fields(want):
        wanted = getattr(want, field.name)
        name, fits = _RULES[field.name]
        if wanted is not None and not fits(wanted, getattr(have, name)):
            yield _CURES[field.name].format(have=_short(getattr(have, name)), want=_short(wanted))
