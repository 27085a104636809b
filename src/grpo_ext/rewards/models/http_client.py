"""POST of many JSON bodies: bounded concurrency, a time limit, retries; answers in order, failures as values."""

import asyncio
import functools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

LARGEST = 2**25
"""Most bytes of an answer: a judge's has thousands, the scores of 16 long completions by token some millions."""
_TRY_AGAIN = (408, 425, 429)  # and 5xx
_CURES = {
    401: "Check the key in api_key_env.",
    403: "Check the key in api_key_env.",
    404: "url is the whole endpoint, such as http://host:8000/score, and model a name that it serves.",
    405: "url is the whole endpoint, such as http://host:8000/score.",
}
_EXCERPT = 1000
_jitter = random.Random()  # its own, so that the run's seeds decide nothing here and lose nothing


class RemoteRewardError(RuntimeError):
    """A request to a reward server that failed for good: url, status, what it answered."""


@dataclass(frozen=True)
class _Attempt:
    answer: Any = None
    error: str | None = None
    again: bool = False  # the same request may succeed
    hopeless: bool = False  # no other request would
    retry_after: float = 0.0


@dataclass(frozen=True)
class Client:
    """Options of `remote` that concern the connection.

    Raises:
        ValueError: an option is out of range.
    """

    url: str
    api_key: str | None = None
    max_concurrency: int = 8
    retries: int = 3
    backoff: float = 0.5
    timeout: float = 30.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={self.url!r} is no address. Give the whole endpoint: http://host:8000/score.")
        if parts.username is not None and self.api_key:
            raise ValueError("url has a user in it and api_key_env is set: only one would be sent. Remove one.")
        for name, least in (("max_concurrency", 1), ("retries", 0), ("backoff", 0)):
            if not (value := getattr(self, name)) >= least:
                raise ValueError(f"{name}={value}: too few to work with. Set {name} >= {least}.")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: no server answers in that. Set timeout > 0, in seconds.")

    def error(self, what: str) -> RemoteRewardError:
        """Error that names the url, without a user, a password or a query that may be in it."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return RemoteRewardError(f"POST {parts.scheme}://{parts.hostname}{port}{parts.path}: {what}")

    def excerpt(self, text: str) -> str:
        """The beginning of a server's answer, without the key."""
        text = text.replace(self.api_key, "***") if self.api_key else text
        return repr(text[:200] + ("..." if len(text) > 200 else "")) if text else "nothing"

    async def gather(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """JSON answer to each body, or the `RemoteRewardError` that it ended with.

        Once a connection or a key has been refused for good, requests that have not been sent are given up too.
        """
        if not bodies:
            return []
        import httpx

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=self.max_concurrency)
        async with (
            httpx.AsyncClient(headers=headers, limits=limits, timeout=None, verify=_tls()) as http,
            asyncio.TaskGroup() as group,
        ):
            calls = _Calls(self, http)
            tasks = [group.create_task(calls.request(json.dumps(body))) for body in bodies]
        return [task.result() for task in tasks]


class _Calls:
    """The requests of one `gather`."""

    def __init__(self, client: Client, http: Any) -> None:
        self.client = client
        self.http = http
        self.slots = asyncio.Semaphore(client.max_concurrency)
        self.given_up: RemoteRewardError | None = None

    async def request(self, body: str) -> Any:
        last = self.client.retries
        for number in range(last + 1):
            async with self.slots:
                if self.given_up:
                    return self.given_up
                attempt = await self._attempt(body)
            if attempt.error is None:
                return attempt.answer
            if number == last or not attempt.again or attempt.retry_after > self.client.timeout:
                break
            pause = min(self.client.backoff * 2**number, self.client.timeout) * _jitter.uniform(0.5, 1.5)
            await asyncio.sleep(max(pause, attempt.retry_after))
        tries = f" ({number + 1} attempts)" if number else ""
        failure = self.client.error(f"{attempt.error}{tries}")
        if attempt.hopeless:
            self.given_up = failure
        return failure

    async def _attempt(self, body: str) -> _Attempt:
        import httpx

        try:
            async with (
                asyncio.timeout(self.client.timeout),
                self.http.stream("POST", self.client.url, content=body) as response,
            ):
                content = await _content(response)
        except TimeoutError:
            return _Attempt(error=f"no answer within {self.client.timeout} s", again=True)
        except httpx.ConnectError as error:
            return _Attempt(error=f"cannot connect: {error}", again=True, hopeless=True)
        except httpx.RequestError as error:
            again = isinstance(error, httpx.TransportError)
            return _Attempt(error=f"{type(error).__name__}: {error}", again=again)
        return self._read(response, content)

    def _read(self, response: Any, content: bytes) -> _Attempt:
        status, excerpt = response.status_code, self.client.excerpt(content[:_EXCERPT].decode(errors="replace"))
        if len(content) > LARGEST:
            return _Attempt(error=f"answered {status} with more than {LARGEST >> 20} MiB: {excerpt}")
        encoding = response.headers.get("Content-Encoding", "identity")
        if status == 200 and encoding != "identity":
            return _Attempt(error=f"answered 200 in Content-Encoding {encoding!r}, which was not accepted")
        if status == 200:
            try:
                return _Attempt(answer=json.loads(content))
            except (ValueError, RecursionError):
                return _Attempt(error=f"answered 200 with what is not JSON: {excerpt}")
        after = _retry_after(response.headers.get("Retry-After"))
        wait = f", try again after {after:.0f} s" if after > self.client.timeout else ""
        cure = f" {_CURES[status]}" if status in _CURES else ""
        return _Attempt(
            error=f"answered {status}{wait}: {excerpt}.{cure}",
            again=status >= 500 or status in _TRY_AGAIN,
            hopeless=status in _CURES,
            retry_after=after,
        )


async def _content(response: Any) -> bytes:
    """The body as it is sent, as far as it is read: an encoded one may be a thousand times as large."""
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > LARGEST:
            break
    return bytes(content)


def _retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header, a number or a date, asks to wait; 0 without a readable one."""
    if header is None:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0


@functools.cache  # a quarter of a second each
def _tls() -> Any:
    import httpx

    return httpx.create_ssl_context()
