"""Write what the site is built from: `python docs/site.py FOLDER` (`make docs`). Needs only Python.

The site has the Markdown files of the repository, a page for each other file that they link to, and a reference of
docstrings (directives of mkdocstrings). Links are paths relative to their file in both places.
"""

import ast
import json
import re
import shutil
import sys
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).parent.parent
STARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/quickstart.ipynb")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
FURTHER_WORD = re.compile(r"^( *```\w+) elsewhere$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".jsonl": "json", ".sbatch": "bash"}
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
REFERENCE = {
    "objective": "losses surrogates ratios kl advantages combinations aggregation",
    "rewards.library": "answers functions lengths minimind trl_names verifiers",
}
"""Packages whose docstrings are on the page of reference, and their modules in order."""


def write_site(target: Path) -> None:
    """Empty the folder `target` and fill it with pages."""
    shutil.rmtree(target, ignore_errors=True)
    waiting = [ROOT / name for name in STARTS] + sorted((ROOT / "docs").glob("*.md"))
    for path in waiting:  # grows in the loop
        place = target / place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            shutil.copy(path, place)
            continue
        text = page(path)
        waiting += [other for other in dict.fromkeys(linked(path, text)) if other not in waiting]
        place.write_text(moved(path, text))
    (target / "assets").mkdir()
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(ROOT / "docs" / name, target / "assets")
    (target / "reference.md").write_text(reference())


def place_of(path: Path) -> Path:
    """Return the path on the site of a file of the repository."""
    place = path.relative_to(ROOT)
    if place == Path("README.md"):
        return Path("index.md")
    if place.parent == Path("docs"):
        return Path(place.name)
    if path.is_dir():
        return place / "index.md"
    return place if path.suffix in (".md", ".png") else place.with_name(f"{place.name}.md")


def page(path: Path) -> str:
    """Return a file of the repository as Markdown."""
    title = path.relative_to(ROOT)
    if path.is_dir():
        names = sorted(
            inside.name for inside in path.iterdir() if inside.is_file() and not inside.name.startswith(".")
        )
        return f"{UNSEARCHED}# {title}/\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = path.read_text()
    if path.suffix == ".md":
        text = FURTHER_WORD.sub(r"\1", text)
        return text + (public_names() if title == Path("docs/api.md") else "")
    if path.suffix == ".ipynb":
        return notebook(text)
    return f"{UNSEARCHED}# {title}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n`````\n"


def linked(path: Path, text: str) -> list[Path]:
    """Return the files and folders of the repository that a page links to."""
    found = (LINK.findall(part) for part in FENCED.split(text)[::2])
    targets = ((path if path.is_dir() else path.parent) / link for links in found for _, link, _ in links)
    return [target.resolve() for target in targets if target.exists()]


def moved(path: Path, text: str) -> str:
    """Return a page with the links of the site; broken links are left for the generator to refuse."""
    here = place_of(path).parent

    def rewritten(found: re.Match[str]) -> str:
        target = ((path if path.is_dir() else path.parent) / found[2]).resolve()
        link = relpath(place_of(target), here) if target.exists() else found[2]
        return f"{found[1]}{link}{found[3]}"

    return "".join(part if i % 2 else LINK.sub(rewritten, part) for i, part in enumerate(FENCED.split(text)))


def notebook(text: str) -> str:
    """Return the cells of a notebook, with their output."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", ()))
        parts += [f"```text\n{printed}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"


def public_names() -> str:
    """Return directives for the docstrings of `grpo_ext.__all__`; the `register` functions share one."""
    body = ast.parse((ROOT / "src/grpo_ext/__init__.py").read_text()).body
    [homes] = (node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "_HOMES")
    by_place: dict[str, list[str]] = {}
    for name, home in ast.literal_eval(homes).items():
        place = re.sub(r".*:\w+\.register$", "registry:Registry.register", home)
        by_place.setdefault(place.replace(":", "."), []).append(name)
    parts = [
        f"::: grpo_ext.{place}\n    options: {{heading: '{', '.join(names)}', toc_label: '{', '.join(names)}'}}"
        for place, names in by_place.items()
    ]
    return "\n\n".join(["\n## Docstrings", *parts]) + "\n"


def reference() -> str:
    """Return the page of docstrings."""
    hidden = "options: {show_root_heading: false}"
    names = (f"{package}.{name}" for package, modules in REFERENCE.items() for name in modules.split())
    parts = [f"## {name}\n\n::: grpo_ext.{name}\n    {hidden}" for name in names]
    return "\n\n".join(["# Losses, rewards and their parts", *parts]) + "\n"


if __name__ == "__main__":
    write_site(Path(sys.argv[1]).resolve())
