"""Run `grpo-ext migrate` over all real GRPO files of TRL, Open-R1 and unsloth's notebooks, at two dates each.

    python benchmarks/migrate.py FOLDER [--write]

FOLDER holds clones (bare or not) of the repositories below, named `owner+name` or `name`. Files are read from git,
whole; none is kept here, only repository, commit and path. `--write` rewrites benchmarks/results/migrate.json.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from grpo_ext.commands.migrate import migrated, refusals
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.foreign.recognise import exchange
from grpo_ext.recipe.foreign.writing import recipe_text

EARLIER = "2026-01-20T00:00:00Z"
SHELL, YAML = (".sh", ".bash", ".slurm"), (".yaml", ".yml")
REPOSITORIES = {
    "huggingface/open-r1": (YAML, r"(?ms)^num_train_epochs:.*^reward_funcs:"),
    "huggingface/trl": (
        (*SHELL, *YAML, ".py", ".ipynb", ".md"),
        r"\bGRPO(Config|Trainer)\(|\btrl grpo\b|/grpo\w*\.py",
    ),
    "unslothai/notebooks": ((".ipynb",), r"GRPOTrainer\("),
}
"""Repository -> endings of its files, and what marks one of GRPO."""
BLOCK = re.compile(r"^[ >]*```(bash|shell|yaml)\n(.*?)^[ >]*```", re.M | re.S)
COMMAND = re.compile(r"^(?:(?:accelerate launch|trl grpo|python) (?:.*\\\n)+.*)$", re.M)
ELSEWHERE = re.compile(r"no such (file|folder)|cannot import")
"""What check says about data, models and modules that are on another machine."""
OUTCOMES = ("exchange", "refused", "recipe", "check passes", "decisions open")


def git(clone: Path, *words: str) -> str:
    """Return what git prints."""
    done = subprocess.run(["git", f"--git-dir={clone}", *words], capture_output=True, check=True)
    return done.stdout.decode("utf-8", errors="replace")


def find_clone(folder: Path, repository: str) -> Path:
    """Return the git directory of a repository."""
    owner, name = repository.split("/")
    places = [folder / place / end for place in (f"{owner}+{name}", name) for end in ("repo", ".git", "")]
    return next(place for place in places if (place / "HEAD").is_file())


def files_of(clone: Path, commit: str, repository: str) -> Iterator[tuple[str, str]]:
    """Return path and text of each GRPO file; of documents the blocks that configure a run."""
    endings, mark = REPOSITORIES[repository]
    for path in git(clone, "ls-tree", "-r", "--name-only", "-z", commit).split("\0"):
        if (
            not path.endswith(endings)
            or ("tests/" in path and path.endswith(".py"))
            or path.startswith("trl/trainer/")
        ):
            continue
        text = git(clone, "show", f"{commit}:{path}")
        if not re.search(mark, text):
            continue
        if not path.endswith(".md"):
            yield path, text
        blocks = [(kind, block) for kind, block in BLOCK.findall(text) if path.endswith(".md")]
        blocks += [("bash", block) for block in COMMAND.findall(text) if path.endswith(".py")]
        for number, (kind, block) in enumerate(blocks, 1):
            if configures(kind, block):
                yield f"{path}#{number}.{'yaml' if kind == 'yaml' else 'sh'}", block


def configures(kind: str, block: str) -> bool:
    """Return whether a block of a document starts or configures a whole GRPO run."""
    if kind == "yaml":
        return bool(re.search("(?m)^num_generations:", block))
    return bool(re.search(r"trl grpo|grpo\w*\.py", block)) and "--model_name_or_path" in block


def tried(path: Path, title: str) -> dict:
    """Migrate one file."""
    if path.suffix in (".py", ".ipynb"):
        try:
            exchange(path)
        except ConfigError as error:
            return {"outcome": "refused", "why": str(error.problems[0])}
        return {"outcome": "exchange"}
    try:
        _, draft = migrated(path)
    except ConfigError as error:
        return {"outcome": "refused", "why": str(error.problems[0]).replace(str(path), title)}
    text = recipe_text(draft, title, "recipe.yaml")
    problems = [problem for problem in refusals(text) if not ELSEWHERE.search(str(problem))]
    return {
        "outcome": "recipe",
        "check passes": not problems,
        "decisions open": bool(draft.decisions),
        "keys": len(draft.given),
        "converted": len(draft.converted),
        "left out": len(draft.left),
        "asked": len(draft.given) - len(draft.converted) - len(draft.left),
        "unknown": sorted(key for key, why in draft.left.items() if why == "unknown key"),
        "decisions": draft.decisions,
        "check": [str(problem) for problem in problems],
    }


def main(folder: Path, write: bool) -> None:
    """Try all files, and print the table."""
    rows, listed = [], []
    for repository in REPOSITORIES:
        clone = find_clone(folder, repository)
        for commit in (git(clone, "log", "-1", f"--before={EARLIER}", "--format=%H"), git(clone, "rev-parse", "HEAD")):
            commit = commit.strip()
            found = []
            with tempfile.TemporaryDirectory() as place:
                for path, text in files_of(clone, commit, repository):
                    copy = Path(place) / f"file{Path(path).suffix}"
                    copy.write_text(text)
                    found.append({"path": path, **tried(copy, path)})
            counts = Counter(result["outcome"] for result in found)
            counts |= {name: sum(result.get(name, False) for result in found) for name in OUTCOMES[3:]}
            sums = {
                name: sum(result.get(name, 0) for result in found)
                for name in ("keys", "converted", "left out", "asked")
            }
            date = git(clone, "log", "-1", "--format=%cs", commit).strip()
            rows.append({"repository": repository, "commit": commit, "date": date, "files": len(found)})
            rows[-1] |= {name: counts[name] for name in OUTCOMES} | sums
            print(" | ".join(str(value)[:24] for value in rows[-1].values()), flush=True)
            listed += [{"repository": repository, "commit": commit, **result} for result in found]
    if write:
        kept = ("repository", "commit", "path", "outcome", "check passes", "keys", "converted", "why", "unknown")
        lines = [json.dumps({key: entry[key] for key in kept if entry.get(key)}) for entry in listed]
        parts = ",\n".join(map(json.dumps, rows)), ",\n".join(lines)
        text = f'{{"projects": [\n{parts[0]}\n],\n"files": [\n{parts[1]}\n]}}\n'
        (Path(__file__).parent / "results" / "migrate.json").write_text(text)
    Path(tempfile.gettempdir(), "migrate_files.json").write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--write" in sys.argv[2:])
