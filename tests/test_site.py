"""The documentation as a site: every document is in the navigation, and no page needs the network."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_ext
from grpo_ext.objective.losses import losses
from support.processes import PATIENCE

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """What the generator gets."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site.py")
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    folder = tmp_path_factory.mktemp("site") / "pages"
    written.write_site(folder)
    return folder


def test_every_document_is_in_the_navigation(pages):
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*: (\S+\.md)$", text, re.MULTILINE)
    assert 15 < len(listed) <= 25
    assert [name for name in listed if not (pages / name).is_file()] == []
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(listed)


def test_links_lead_to_the_pages_of_their_files(pages):
    assert "](losses.md#which-one)" in (pages / "index.md").read_text()
    assert "](src/grpo_ext/objective/losses.py.md)" in (pages / "losses.md").read_text()
    assert "](benchmarks/real_curves.png)" in (pages / "index.md").read_text()
    assert "`````python\n" in (pages / "src/grpo_ext/objective/losses.py.md").read_text()
    assert "](custom_loss.py.md)" in (pages / "examples/index.md").read_text()
    assert "![" not in (pages / "examples/quickstart.ipynb.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build by `make docs`, in an environment with the generator only; a warning is an error."""
    folder = tmp_path_factory.mktemp("docs")
    command = ["make", "docs", f"PYTHON={sys.executable}", f"DOCS={folder}/venv", f"SITE={folder}/site"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder / "site"


def test_messages_quoted_in_troubleshooting_are_those_of_the_code():
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [part for row in rows for code in re.findall(r"`([^`]+ [^`]+)`", row) for part in code.split(" ... ")]
    assert len(quoted) > 12
    source = " ".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r"\"\s+f?\"", "", re.sub(r"\{[^{}]*\}", "N", source))
    assert [part for part in quoted if part not in source] == []


FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")


@pytest.mark.slow
def test_no_page_fetches_from_the_network(site):
    assert FETCHED.search('<script src="https://unpkg.com/iframe-worker/shim"></script>')
    documents = list(site.rglob("*.html"))
    assert len(documents) > 40
    assert [found[0] for page in documents for found in [FETCHED.search(page.read_text())] if found] == []
    styles = [
        path for path in site.rglob("*.css") if re.search(r"(url\(|@import) *[\"']?(https?:)?//", path.read_text())
    ]
    assert styles == []


@pytest.mark.slow
def test_formulas_are_mathematics_on_the_site(site):
    page = (site / "losses.html").read_text()
    assert page.count("<math ") > len(losses)
    assert "$<code>" not in page


@pytest.mark.slow
def test_the_reference_holds_every_public_name_and_is_searched(site):
    names = [name for name in grpo_ext.__all__ if name != "__version__"]
    headings = " ".join(re.findall(r"<h3[^>]*>(.*?)</h3>", (site / "api.html").read_text(), re.DOTALL))
    assert [name for name in names if name not in headings] == []
    reference = (site / "reference.html").read_text()
    assert "-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)" in reference
    assert "ConfigError" in re.search(r"Raises:.*?</table>", (site / "api.html").read_text(), re.DOTALL)[0]
    searched = (site / "search" / "search_index.js").read_text()
    assert all(word in searched for word in ("tutorial_csv.html", "sandbox", "register_loss"))
    assert "objective/losses.py.html" not in searched  # sources are read, not found
