"""The registry every axis shares, what a user may name by path, and what importing the package costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import grpo_ext.objective
from grpo_ext.errors import UnknownNameError
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import Loss, find, losses, register
from grpo_ext.objective.ratios import ratios
from grpo_ext.objective.surrogates import surrogates
from grpo_ext.registry import Registry, did_you_mean, import_path
from support.processes import PATIENCE
from support.pure import batch, loss_and_gradient, objective

OBJECTIVE = Path(grpo_ext.objective.__file__).parent
REGISTRIES = [losses, surrogates, ratios, kl_estimators, estimators, combinations, aggregations]


@pytest.fixture
def animals():
    registry = Registry("animal")
    registry.register("tiger", "panthera")(str)
    registry.register("gnu")(int)
    return registry


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module where Python finds it; what it registers is taken back afterwards."""
    before = [(registry, dict(registry._entries)) for registry in REGISTRIES]
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str, name: str = "users_module") -> str:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    sys.modules.pop("users_module", None)
    for registry, entries in before:
        registry._entries.clear()
        registry._entries.update(entries)


def test_it_is_a_mapping_in_order_of_registration(animals):
    assert animals["tiger"] is animals["panthera"] is str
    assert list(animals) == ["tiger", "panthera", "gnu"]
    assert len(animals) == 3
    assert "gnu" in animals
    assert "cow" not in animals
    assert 3 not in animals
    assert dict(animals) == {"tiger": str, "panthera": str, "gnu": int}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tigre", "unknown animal 'tigre'. Did you mean 'tiger'?"),
        ("tier", "unknown animal 'tier'. Did you mean 'tiger'?"),
        ("whale", "unknown animal 'whale'. Known: gnu, panthera, tiger."),
        ("", "unknown animal ''. Known: gnu, panthera, tiger."),
    ],
)
def test_an_unknown_name_is_an_error_with_a_cure(animals, name, message):
    with pytest.raises(UnknownNameError) as error:
        animals[name]
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


def test_several_close_names_are_all_named():
    assert did_you_mean("dapi", ["dapo", "dap", "xyz"]) == "Did you mean 'dap' or 'dapo'?"


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda r: f"{r.kind}s")
def test_every_axis_says_what_it_knows(registry):
    with pytest.raises(UnknownNameError, match=f"unknown {registry.kind} 'zzzzzz'. Known: "):
        registry["zzzzzz"]
    name = next(iter(registry))
    with pytest.raises(UnknownNameError, match="Did you mean .*" + repr(name)):
        registry[name + "_"]


def test_a_name_is_given_once(animals):
    with pytest.raises(ValueError, match=r"animal 'gnu' is already registered: choose another name\."):
        animals.register("gnu")(float)
    assert animals["gnu"] is int
    assert animals.register("gnu")(int) is int  # the same entry again is no conflict


def test_functions_that_differ_conflict_and_a_second_import_of_one_does_not(animals):
    source = "def noise(x):\n    return x + 1\n"
    first, again, other = {}, {}, {}
    exec(compile(source, "noise.py", "exec"), first)
    exec(compile(source, "noise.py", "exec"), again)
    exec(compile(source.replace("1", "2"), "noise.py", "exec"), other)
    animals.register("noise")(first["noise"])
    animals.register("noise")(again["noise"])
    assert animals["noise"] is again["noise"]
    with pytest.raises(ValueError, match="'noise' is already registered"):
        animals.register("noise")(other["noise"])


# Paths


@pytest.mark.parametrize("path", ["users_module:moo", "users_module.moo"])
def test_a_path_leads_to_the_object(animals, module, path):
    module("def moo(): return 'moo'")
    assert animals[path]() == "moo"


def test_paths_are_looked_up_from_the_working_directory_too(animals, tmp_path, monkeypatch):
    (tmp_path / "in_cwd_only.py").write_text("def moo(): return 'moo'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert animals["in_cwd_only:moo"]() == "moo"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:moo", r"cannot import 'no_such_module' for 'no_such_module:moo': ModuleNotFoundError"),
        ("users_module:mo", r"'users_module' has no 'mo'\. Did you mean 'moo'\?"),
        ("users_module:zzz", r"'users_module' has no 'zzz'\. Known: [a-z]"),
        ("users_module:", r"'users_module:' is not of the form 'package\.module:name'"),
        (":moo", r"':moo' is not of the form"),
        (".moo", r"'\.moo' is not of the form"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ended(animals, module, path, message):
    module("def moo(): return 'moo'")
    with pytest.raises(UnknownNameError, match=message):
        animals[path]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import no_such_dependency", "No module named 'no_such_dependency'"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_a_users_module_raises_is_named(module, text, cause):
    module(text)
    with pytest.raises(UnknownNameError, match=f"cannot import 'users_module' for 'users_module:x': .*{cause}"):
        import_path("users_module:x")


# A user's own loss

SURROGATE = '''
from grpo_ext.objective.surrogates import surrogates
from grpo_ext.objective.losses import register

@surrogates.register("doubled")
def doubled(advantages, per_token_logps, *, factor: float = 2.0):
    """-factor A l."""
    return -factor * advantages * per_token_logps

@register("tripled", aggregation="seq-mean-token-sum", advantage="loo", paper="mine")
def tripled(advantages, per_token_logps):
    return -3 * advantages * per_token_logps

def plain(advantages, per_token_logps):
    return -advantages * per_token_logps

number = 3
'''


@pytest.mark.parametrize(
    ("name", "factor", "settings"),
    [("doubled", 2.0, {}), ("doubled", 5.0, {"loss_kwargs": {"factor": 5.0}}), ("plain", 1.0, {})],
)
def test_a_surrogate_named_by_path_becomes_a_loss(module, name, factor, settings):
    module(SURROGATE)
    mine, inputs = objective(f"users_module:{name}", **settings), batch()
    _, gradient = loss_and_gradient(mine, inputs)
    active = inputs["mask"].double()
    expected = -factor * inputs["advantages"][:, None] * active / active.sum()  # a row's default is the token mean
    assert (gradient - expected).abs().max() < 1e-12
    assert mine.row.function.__name__ == name
    assert name in mine.describe()


@pytest.mark.parametrize("name", ["users_module:tripled", "tripled"])
def test_a_decorated_loss_brings_its_row_along(module, name):
    module(SURROGATE)
    row = find("users_module:tripled")
    assert find(name) is row
    assert (row.aggregation, row.advantage, row.paper) == ("seq-mean-token-sum", "loo", "mine")
    assert row.function.__name__ == "tripled"


def test_a_script_that_is_imported_again_by_its_path_registers_its_loss_twice_without_complaint(module):
    name = module(SURROGATE)
    exec(compile(SURROGATE, f"{name}.py", "exec"), {"__name__": "__main__"})
    assert find("users_module:tripled").advantage == "loo"
    with pytest.raises(ValueError, match="loss_type 'tripled' is already registered"):
        register("tripled")(lambda advantages: advantages)
    with pytest.raises(ValueError, match="loss_type 'grpo' is already registered"):
        register("grpo")(lambda advantages: advantages)


def test_a_path_to_something_else_is_no_loss(module):
    module(SURROGATE)
    with pytest.raises(UnknownNameError, match="loss_type 'users_module:number' is a int, not a surrogate function"):
        find("users_module:number")


def test_a_path_may_lead_to_a_row():
    assert isinstance(losses["grpo"], Loss)
    assert find("grpo") == find("deepseek_math") == losses["grpo"].whole()


# What importing costs


def imported(statement: str, *packages: str) -> set[str]:
    """Which of these packages a fresh interpreter has loaded after `statement`."""
    report = f"{statement}\nimport sys\nprint(*({packages} & sys.modules.keys()))"
    report = report.replace(str(packages), str(set(packages)))
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", report], capture_output=True, text=True, timeout=PATIENCE
    )
    assert out.returncode == 0, out.stderr
    return set(out.stdout.split())


def test_the_pure_modules_import_torch_and_nothing_of_trl():
    pure = ["registry", "errors", *(f"objective.{path.stem}" for path in OBJECTIVE.glob("[!_]*.py"))]
    assert len(pure) > 8
    statement = "import " + ", ".join(f"grpo_ext.{name}" for name in pure)
    assert imported(statement, "torch", "trl", "transformers", "accelerate", "datasets") == {"torch"}


def test_a_list_that_nobody_reads_through_is_not_told():
    many = [f"setting_{i}" for i in range(200)]
    assert did_you_mean("x", many) == "None of the 200 known names is like it."
    assert did_you_mean("setting_7", many).startswith("Did you mean 'setting_7'")
