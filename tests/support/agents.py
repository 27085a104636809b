"""Scripted agents, sound and with every fault; imported by path in their own processes."""

import os
import signal
import time
from collections.abc import Callable

import httpx

GO = [{"role": "user", "content": "go"}]


async def three_turns(row, client):
    """Ask three times, in one conversation."""
    messages = [{"role": "user", "content": "go"}]
    for _ in range(3):
        made = await client.chat.completions.create(model="policy", messages=messages)
        messages += [made.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
    return float(len(messages))


async def pays(row, client, reward):
    """Ask once; the reward is an option."""
    await client.chat.completions.create(model="policy", messages=GO)
    return reward


async def branches(row, client):
    """Ask twice, take the second turn back, ask a sub-agent, and go on; the reward is the number of letters."""
    messages, said, short = list(row["prompt"]), [], {"model": "policy", "max_tokens": 6}
    for _ in range(2):
        made = await client.chat.completions.create(messages=messages, **short)
        said.append(made.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "on"}]
    for asked in ([{"role": "user", "content": "sub:"}], [*messages[:-3], {"role": "user", "content": "again"}]):
        made = await client.chat.completions.create(messages=asked, **short)
        said.append(made.choices[0].message.content or "")
    return float(len("".join(said)))


async def never(row, client):
    """Fail in each episode."""
    raise RuntimeError("no world")


# Faults.

FAULTS = {
    "is killed": "died: it was killed by SIGKILL",
    "is killed while it waits": "died: it was killed by SIGALRM",
    "is killed in the middle of a stream": "died: it was killed by SIGKILL",
    "exits": "died: it ended with exit code 3",
    "hangs": "timeout: it did not answer within 3 s",
    "raises": "raised: run: .*RuntimeError: no more",
    "asks nothing": "raised: run: it ended without an answer of the model",
    "sends what is no JSON": "raised: run: .*the body is not JSON",
    "sends too much": "raised: run: .*the body has more than 16777216 bytes",
    "has another key": "raised: run: .*this is not the key of this episode",
    "pays no number": "garbage: run: a reward of ",
}
"""Each fault of an agent, and what the episode's failure says of it."""


async def faulty(row, client):
    """Ask twice; before or after the first answer do what the row's column `fault` says."""
    url, fault = f"{client.base_url}chat/completions", row["fault"]
    headers = {"Authorization": f"Bearer {client.api_key}"}
    sent = {"model": "m", "messages": GO}
    if fault == "asks nothing":
        return 1.0
    await client.chat.completions.create(**sent)
    if fault == "has another key":
        await client.with_options(api_key="another").chat.completions.create(**sent)
    if fault == "sends too much":
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 2**24}])
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=None) as plain:
        if fault == "sends what is no JSON":
            raise RuntimeError((await plain.post(url, headers=headers, content="{")).text)
        if fault == "is killed while it waits":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            while True:
                await plain.post(url, headers=headers, json=sent)
        if fault == "is killed in the middle of a stream":
            async with plain.stream("POST", url, headers=headers, json=sent | {"stream": True}) as stream:
                async for _ in stream.aiter_raw():
                    os.kill(os.getpid(), signal.SIGKILL)
    _AT_ONCE.get(fault, lambda: None)()
    await client.chat.completions.create(**sent)
    return "much" if fault == "pays no number" else 1.0


def _raise() -> None:
    raise RuntimeError("no more")


_AT_ONCE: dict[str | None, Callable[[], object]] = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
    "hangs": lambda: time.sleep(3600),
    "raises": _raise,
}


async def environment(row, client):
    """Raise what it has of a secret of the trainer."""
    raise RuntimeError(f"HF_TOKEN is {os.environ.get('HF_TOKEN')}")
