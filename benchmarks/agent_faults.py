"""500 injected faults of agents over HTTP: attempts lost, effects on the others, what is left behind.

40 agents at a time call a scripted policy; half of them fail, each in another way, and are compared with the same
agents without faults. After each generation some send one more request by the key of an attempt that is over.
`python benchmarks/agent_faults.py` writes results/agent_faults.json.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from grpo_ext.child_processes import FOLDER_PREFIX
from grpo_ext.environments.hosts import EnvironmentHost
from support import agent_runs
from support.agents import FAULTS, GO

BATCH, INJECTED = 40, int(os.environ.get("FAULTS", "500"))
OVER = "asks after its end"


def turns(trajectory) -> list:
    return [(turn.context, turn.sampled, turn.logprobs) for turn in trajectory.turns]


def left(hosts: EnvironmentHost) -> dict:
    """Return what this process has open, once only the two fork servers remain."""
    me, end = psutil.Process(), time.monotonic() + 20
    while len(me.children(recursive=True)) > 2 and time.monotonic() < end:
        time.sleep(0.1)
    mine = Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*_{me.pid}_*")
    return {
        "processes": len(me.children(recursive=True)),
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "lines_of_attempts": len(hosts.endpoint._lines),
        "temporary_files": sum(1 for folder in mine for _ in folder.rglob("*")),
        "mib": round(me.memory_info().rss / 2**20),
    }


def late(lines: list, count: int) -> Counter:
    """Return the answers to requests by the keys of attempts that are over."""
    found = Counter()
    for line in lines[-count:]:
        headers = {"Authorization": f"Bearer {line.key}"}
        got = httpx.post(f"{line.url}/v1/chat/completions", headers=headers, json={"messages": GO}, trust_env=False)
        found[f"{got.status_code} {got.json()['error']['message']}"] += 1
    return found


def main() -> None:
    kinds = itertools.cycle(FAULTS)
    injected, lost, told = Counter(), Counter(), {kind: Counter() for kind in FAULTS}
    others = equal = wrongly = unclear = 0
    over = Counter()
    hosts, lines = EnvironmentHost(memory_gib=4.0), []
    open_line = hosts.endpoint.open
    hosts.endpoint.open = lambda *given: lines.append(open_line(*given)) or lines[-1]
    expected, _ = agent_runs.run(hosts, agent_runs.faulty([None] * BATCH))
    agent_runs.run(hosts, agent_runs.faulty([*FAULTS]))
    before, start = left(hosts), time.monotonic()
    while sum(injected.values()) + sum(over.values()) < INJECTED:
        faults = [next(kinds) if place % 2 else None for place in range(BATCH)]
        made, _ = agent_runs.run(hosts, agent_runs.faulty(faults))
        for fault, one, usual in zip(faults, made, expected, strict=True):
            if fault is None:
                others, wrongly = others + 1, wrongly + (one.failure is not None)
                equal += turns(one) == turns(usual)
                continue
            line = one.failure or ""
            injected[fault], lost[fault] = injected[fault] + 1, lost[fault] + one.lost
            unclear += not re.match(FAULTS[fault], line) or "\n" in line
            told[fault][re.sub(r"\d{4,}", "N", re.sub(r'"[^"]*/', '"', line))[-200:]] += 1
        over += late(lines, 2)
    after = left(hosts)
    hosts.close()
    found = {
        "faults": sum(injected.values()) + sum(over.values()),
        "attempts_with_a_fault": sum(injected.values()),
        "lost": sum(lost.values()),
        "without_one_clear_line": unclear,
        "kinds": {kind: {"injected": injected[kind], "lost": lost[kind], "told_as": told[kind]} for kind in FAULTS},
        OVER: over,
        "others": others,
        "others_lost": wrongly,
        "others_equal": equal,
        "before": before,
        "after": after,
        "processes_after_close": len(psutil.Process().children(recursive=True)),
        "seconds": round(time.monotonic() - start, 1),
    }
    if INJECTED >= 500:
        (ROOT / "benchmarks" / "results" / "agent_faults.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
