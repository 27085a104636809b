"""Search in a local corpus by BM25, as a tool."""

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_ext.environments.protocol import environments
from grpo_ext.errors import Problem
from grpo_ext.objective.options import Count


@environments.register("search")
class Search:
    """One tool, `search`.

    Args:
        corpus: file with a text per line, or (.jsonl) an object with `text` and optionally `title`.
        results: number of passages in an answer.
        longest: characters of each that the model reads.
    """

    def __init__(self, corpus: str, results: Count = 3, longest: int = 500) -> None:
        self._texts, self._index = _indexed(corpus)
        self._results, self._longest = min(results, len(self._texts)), longest

    @staticmethod
    def preload(corpus: str, **_: object) -> None:
        """Make the index once for all attempts."""
        _indexed(corpus)

    @staticmethod
    def option_problems(corpus: str, **_: object) -> Iterator[Problem]:
        """Yield the problem of a missing file or package."""
        if not Path(corpus).expanduser().is_file():
            yield Problem("corpus", corpus, "no such file", "Give a path from the working directory.")
        if importlib.util.find_spec("bm25s") is None:
            yield Problem("corpus", corpus, "search needs bm25s, which is not installed", "Install grpo-ext[search].")

    def reset(self, **row: object) -> None:
        """Keep no state."""

    def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: Words that the passages should have.

        Returns:
            The passages that fit best, one under the other.
        """
        import bm25s

        tokens = bm25s.tokenize([query], show_progress=False)
        places, scores = self._index.retrieve(tokens, k=self._results, show_progress=False)
        found = [self._texts[i] for i, score in zip(places[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(text[: self._longest] for text in found) or "nothing was found"


@functools.cache
def _indexed(corpus: str) -> tuple[list[str], Any]:
    import bm25s

    lines = Path(corpus).expanduser().read_text(encoding="utf-8").splitlines()
    texts = [_text(line, corpus) for line in lines if line.strip()]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return texts, index


def _text(line: str, corpus: str) -> str:
    if not corpus.endswith(".jsonl"):
        return line
    row = json.loads(line)
    return f"{row['title']}\n{row['text']}" if row.get("title") else row["text"]
