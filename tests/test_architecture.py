"""docs/architecture.md: every path and name that it mentions exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text()
SOURCE = ROOT / "src/grpo_ext"


def test_every_path_exists():
    paths = re.findall(r"\b[a-z_]+(?:/[a-z_]+)*(?:/|\.py)(?=[`\s,:;)]|$)", PAGE, flags=re.MULTILINE)
    assert len(paths) > 60
    missing = {path for path in paths if not any((folder / path).exists() for folder in (SOURCE, ROOT))}
    assert not missing


def test_every_function_is_in_the_file_before_it():
    named = re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", PAGE)
    assert len(named) > 2
    for path, name in named:
        assert re.search(rf"\b(def|class) {name}\b", (SOURCE / path).read_text()), f"{name} is not in {path}"
