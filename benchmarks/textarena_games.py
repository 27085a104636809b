"""Every game of TextArena for one player: the result of `check`, and one episode of random play.

python benchmarks/textarena_games.py [--moves 60] [--seconds 120]: needs grpo-ext[textarena]; writes
benchmarks/results/textarena_games.json. Each game is checked and played in a process of its own that
may take so many seconds.
"""

import argparse
import json
import multiprocessing
import random
import re
import time
from pathlib import Path

import textarena
from textarena.envs.registration import ENV_REGISTRY

from grpo_ext.environments.composition import parse_environments
from grpo_ext.environments.observations import opened, stepped
from grpo_ext.environments.session import Session

RESULTS = Path(__file__).parent / "results" / "textarena_games.json"
MOVE = re.compile(r"\[[^\[\]\n]{1,24}\]")


def played(game: str, moves: int) -> dict:
    """Return the outcome of one game."""
    specs, problems = parse_environments([f"textarena/{game}"])
    return {"refused": reason(problems[0])} if problems else episode(specs[0], moves)


def reason(problem: str) -> str:
    """Return an error in one line, without this machine's folders."""
    said = problem.partition("on this machine (")[2].rpartition("). Name")[0]
    return re.sub(r"[\w.~-]*/\S*/", "", " ".join(said.replace("*", "").split()))[:120]


def episode(spec, moves: int) -> dict:
    """Play random moves, from those in brackets in the transcript, until the game is over."""
    seat, draw = Session(spec.make, (), seed=0), random.Random(0)
    answer = seat.answer(("reset", {}))
    if "failed" in answer:
        return {"failed": answer["failed"][1]}
    said = opened([{"role": "user", "content": ""}], answer, list)
    for move in range(1, moves + 1):
        shown = MOVE.findall(said[-1]["content"]) + [f"[{draw.randrange(10)}]"] * 2
        answer = seat.answer(("step", {"role": "assistant", "content": draw.choice(shown)}))
        if "failed" in answer:
            return {"failed": answer["failed"][1], "moves": move}
        step = stepped(answer)
        if step.done:
            return {"moves": move, "reward": step.reward}
        said = step.observation
    return {"moves": moves, "reward": None}


def contained(game: str, moves: int, seconds: float) -> dict:
    """Play in a separate process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(played(game, moves)))
    start = time.monotonic()
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(seconds) else {"failed": f"took more than {seconds:g} s"}
    except EOFError:
        result = {"failed": "its process ended"}
    process.kill()
    process.join()
    return {**result, "seconds": round(time.monotonic() - start, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    games = {}
    for game in ENV_REGISTRY:
        games[game] = contained(game, arguments.moves, arguments.seconds)
        print(game, games[game], flush=True)
    lines = ",\n".join(f"{json.dumps(game)}: {json.dumps(found)}" for game, found in games.items())
    RESULTS.write_text(f'{{"textarena": "{textarena.__version__}", "games": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
