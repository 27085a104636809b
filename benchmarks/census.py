"""How many architectures of transformers share prompts: `make bench-census`, within seconds.

Counts the tables of tests/packing/test_architectures.py, whose tests build and compare every architecture. Writes
results/census.json.
"""

import json
import sys
from pathlib import Path

import transformers

HERE = Path(__file__).parent
RESULT = HERE / "results" / "census.json"
sys.path.append(str(HERE.parent / "tests"))


def counted() -> dict[str, dict[str, int]]:
    """Architectures that were tried, and those that share in the loss, in rollouts and in either, by kind."""
    from packing import test_architectures as census

    text = [[census.expected(table, name) == "" for name in census.BUILT] for table in (census.LOSS, census.ROLLOUTS)]
    tables = (census.LOSS, census.SEEING_LOSS), (census.ROLLOUTS, census.SEEING_ROLLOUTS)
    images = [[census.expected_of_text(*both, name) == "" for name in census.SEEING] for both in tables]
    return {
        kind: {
            "tried": len(loss),
            "loss": sum(loss),
            "rollouts": sum(rollouts),
            "either": sum(map(max, loss, rollouts)),
        }
        for kind, (loss, rollouts) in (("causal", text), ("image and text, on text", images))
    }


def main() -> None:
    written = {"transformers": transformers.__version__, "kinds": counted()}
    RESULT.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
