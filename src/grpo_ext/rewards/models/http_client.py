"""POST of many JSON bodies: bounded concurrency, a time limit, retries; answers in order, failures as values."""

import asyncio
import base64
import functools
import json
import random
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import httpx

LARGEST_RESPONSE = 2**25
"""Most bytes of an answer: a judge's has thousands, the scores of 16 long completions by token some millions."""
_RETRIED = (408, 425, 429)  # and 5xx
_CURES = {
    401: "Check the key in api_key_env.",
    403: "Check the key in api_key_env.",
    404: "url is the whole endpoint, such as http://host:8000/score, and model a name that it serves.",
    405: "url is the whole endpoint, such as http://host:8000/score.",
}
_EXCERPT = 1000
_jitter = random.Random()  # its own: it neither uses nor changes the generators that the run has seeded


class RemoteRewardError(RuntimeError):
    """A request to a reward server that failed for good: url, status, answer."""


@dataclass(eq=False)
class _AttemptFailed(Exception):
    """One attempt of a request failed.

    Args:
        reason: why.
        again: whether the same request may succeed later.
        hopeless: whether every other request would fail too.
        retry_after: seconds that the server asks to wait.
    """

    reason: str
    again: bool = False
    hopeless: bool = False
    retry_after: float = 0.0


@dataclass(frozen=True)
class HttpClient:
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
            raise ValueError(
                f"url={self._masked(self.url)!r} is not an address. Give the whole endpoint: http://host:8000/score."
            )
        if parts.username is not None and self.api_key:
            raise ValueError("url has a user in it and api_key_env is set: only one would be sent. Remove one.")
        for name, least in (("max_concurrency", 1), ("retries", 0), ("backoff", 0)):
            if not (value := getattr(self, name)) >= least:
                raise ValueError(f"{name}={value} is too small. Set {name} >= {least}.")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: no server answers so fast. Set timeout > 0, in seconds.")

    def error(self, reason: str) -> RemoteRewardError:
        """Return an error with the url, without a user, a password or a query."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return RemoteRewardError(f"POST {parts.scheme}://{host}{parts.path}: {self._masked(reason)}")

    def excerpt(self, text: str) -> str:
        """Return the beginning of a server's answer, without the key."""
        text = self._masked(text)
        return repr(text[:200] + ("..." if len(text) > 200 else "")) if text else "nothing"

    def _masked(self, text: str) -> str:
        """Return a text without the key, and without the user, the password and the query of the url in any form."""
        parts = urlsplit(self.url)
        user = parts.netloc.rpartition("@")[0]
        basic = base64.b64encode(unquote(user).encode()).decode() if user else ""
        query = [part.partition("=")[2] or part for part in re.split("[&;]", parts.query)]
        hidden = {self.api_key or "", user, *user.split(":", 1), basic, parts.query, *query, parts.fragment}
        forms = {form for secret in hidden for form in (secret, unquote(secret)) if len(form) > 3}
        for secret in sorted(forms, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    async def gather(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the JSON answer to each body, or the `RemoteRewardError` that it ended with.

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
            requests = _Requests(self, http)
            tasks = [group.create_task(requests.answer(json.dumps(body))) for body in bodies]
        return [task.result() for task in tasks]


class _Requests:
    """The requests of one `gather`."""

    def __init__(self, client: HttpClient, http: "httpx.AsyncClient") -> None:
        self.client, self.http = client, http
        self.slots = asyncio.Semaphore(client.max_concurrency)
        self.given_up: RemoteRewardError | None = None

    async def answer(self, body: str) -> Any:
        """Return the answer, or the error after the last attempt."""
        client = self.client
        for attempt in range(client.retries + 1):
            async with self.slots:
                if self.given_up:
                    return self.given_up
                try:
                    return await self._attempt(body)
                except _AttemptFailed as error:
                    failure = error
            if attempt == client.retries or not failure.again or failure.retry_after > client.timeout:
                break
            pause = min(client.backoff * 2**attempt, client.timeout) * _jitter.uniform(0.5, 1.5)
            await asyncio.sleep(max(pause, failure.retry_after))
        attempts = f" ({attempt + 1} attempts)" if attempt else ""
        final = client.error(f"{failure.reason}{attempts}")
        if failure.hopeless:
            self.given_up = final
        return final

    async def _attempt(self, body: str) -> Any:
        import httpx

        client, content = self.client, bytearray()
        try:
            async with asyncio.timeout(client.timeout), self.http.stream("POST", client.url, content=body) as response:
                async for chunk in response.aiter_raw():  # raw: an encoded body may be a thousand times as large
                    content += chunk
                    if len(content) > LARGEST_RESPONSE:
                        break
        except TimeoutError:
            raise _AttemptFailed(f"no answer within {client.timeout} s", again=True) from None
        except httpx.ConnectError as error:
            raise _AttemptFailed(f"cannot connect: {error}", again=True, hopeless=True) from None
        except httpx.RequestError as error:
            again = isinstance(error, httpx.TransportError)
            raise _AttemptFailed(f"{type(error).__name__}: {error}", again=again) from None
        return self._read(response, bytes(content))

    def _read(self, response: "httpx.Response", content: bytes) -> Any:
        status, excerpt = response.status_code, self.client.excerpt(content[:_EXCERPT].decode(errors="replace"))
        if len(content) > LARGEST_RESPONSE:
            raise _AttemptFailed(f"answered {status} with more than {LARGEST_RESPONSE >> 20} MiB: {excerpt}")
        if status == 200:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise _AttemptFailed(f"answered 200 in Content-Encoding {encoding!r}, which was not accepted")
            try:
                return json.loads(content)
            except (ValueError, RecursionError):
                raise _AttemptFailed(f"answered 200 with a body that is not JSON: {excerpt}") from None
        after = _retry_after(response.headers.get("Retry-After"))
        wait = f", try again after {after:.0f} s" if after > self.client.timeout else ""
        cure = f" {_CURES[status]}" if status in _CURES else ""
        again, hopeless = status >= 500 or status in _RETRIED, status in _CURES
        raise _AttemptFailed(f"answered {status}{wait}: {excerpt}.{cure}", again, hopeless, after)


def _retry_after(header: str | None) -> float:
    """Return the seconds that a Retry-After header, a number or a date, asks to wait; 0 if it cannot be read."""
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


@functools.cache  # creating one takes a quarter of a second
def _tls() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()
