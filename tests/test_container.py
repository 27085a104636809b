"""The Dockerfile: its files make the package, its versions are the project's, and Docker builds it."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from support.processes import PATIENCE

ROOT = Path(__file__).parent.parent
KNOWN = {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction; comments left out, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [
        (name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in whole if line.strip())
    ]


def arguments() -> dict[str, str]:
    return dict(rest.partition("=")[::2] for name, rest in instructions() if name == "ARG")


def copied() -> list[str]:
    return [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]


def test_instructions_arguments_versions_and_entry_point():
    names = [name for name, _ in instructions()]
    assert set(names) <= KNOWN
    assert names[:2] == ["ARG", "FROM"]
    rest = " ".join(text for name, text in instructions() if name != "ARG")
    assert all(f"${{{name}}}" in rest for name in arguments())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"TORCH ?= {arguments()['TORCH']}\n" in (ROOT / "Makefile").read_text()
    assert f"\n{arguments()['TORCH']}\n" in (ROOT / "constraints.txt").read_text()
    [entry] = [json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    assert entry[0] in project["scripts"]
    extras = (ROOT / "Dockerfile").read_text().partition('"EXTRAS=[')[2].partition("]")[0].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()


def test_it_runs_as_a_user_without_rights_on_the_cuda_of_its_torch():
    kinds = [name for name, _ in instructions()]
    [user] = [rest for name, rest in instructions() if name == "USER"]
    assert user not in ("root", "0")
    assert kinds.index("USER") > max(i for i, name in enumerate(kinds) if name in ("RUN", "COPY"))
    assert f'useradd --create-home --home-dir "$HOME" {user} ' in " ".join(
        rest for name, rest in instructions() if name == "RUN"
    )
    documents = [(ROOT / name).read_text() for name in ("Dockerfile", "docs/launching.md")]
    bases = {base for text in documents for base in re.findall(r"nvidia/cuda:(\S+)-devel", text)}
    assert arguments()["TORCH"] == "torch==2.13.0", "does its build on PyPI still have this CUDA?"
    assert {base.rsplit(".", 1)[0] for base in bases} == {"13.0"}
    assert all(
        text.count("docker run") == text.count('docker run --rm --user "$(id -u):$(id -g)"') for text in documents
    )


def test_the_copied_files_make_the_package(tmp_path):
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in copied():
        assert Path(source).parts[0] in let_through
        whole = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        whole(ROOT / source, tmp_path / source)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"grpo_ext/recipe/packaged/{path.relative_to(ROOT / 'recipes')}" for path in (ROOT / "recipes").rglob("*.*")
    }
    assert expected <= names
    assert "grpo_ext/train.py" in names
