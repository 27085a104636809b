"""Print pip constraints that pin what grpo-ext[dev] needs to the lowest versions that pyproject.toml declares."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def lowest(requirements: list[str]) -> Iterator[str]:
    """`name==version` for each that has a lower bound, the project's own extras written out."""
    for requirement in requirements:
        if own := re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", requirement):
            for extra in own[1].split(","):
                yield from lowest(PROJECT["optional-dependencies"][extra])
        elif bound := re.match(r"([\w-]+)>=([\w.]+)", requirement):
            yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    print("\n".join(lowest([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])))
