"""The report as a browser shows it: headless Chromium, whose console stays empty."""

import contextlib
import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.evaluation.during import DuringTraining
from grpo_ext.report.page import write_report
from grpo_ext.rewards.composition import RewardSpec
from support import tiny, trainers
from support.processes import PATIENCE
from support.run_folders import HOSTILE, run_folder, with_completions, with_evaluation

pytestmark = pytest.mark.slow
CHROMIUM = os.environ.get("GRPO_EXT_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "google-chrome"))), ""
)


@pytest.fixture(autouse=True)
def chromium():
    if not CHROMIUM and not os.environ.get("GRPO_EXT_REQUIRE_CHROMIUM"):
        pytest.skip("no Chromium: `apt-get install chromium`, or name one in GRPO_EXT_CHROMIUM")


def opened(page: Path, view: str = "") -> str:
    """The page's elements after its script has run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    folders = f"--user-data-dir={page.parent / 'profile'}", f"--log-net-log={page.parent / 'requests.json'}"
    done = subprocess.run(
        [CHROMIUM, *options, *folders, f"{page.as_uri()}#{view}"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CONSOLE" not in done.stderr, done.stderr[
        -3000:
    ]  # errors, and what the page's policy has kept from loading
    return done.stdout


def cards(dom: str) -> list[tuple[str, str, dict[str, str]]]:
    """Prompt, completion and facts of each completion on the page."""
    found = []
    for card in re.findall(r'<article class="card">(.*?)</article>', dom, re.DOTALL):
        prompt, completion = (html.unescape(text) for text in re.findall(r"<pre[^>]*>(.*?)</pre>", card, re.DOTALL))
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card, re.DOTALL))
        found.append((prompt, completion, facts))
    return found


def requested(page: Path) -> list[str]:
    """Addresses that the page asked for when it was last opened; those of the browser's own errands have no origin."""
    events = (page.parent / "requests.json").read_text().splitlines()
    return [url for event in events for url in re.findall(r'"initiator":"null".*"url":"([^"]+)"', event)]


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory) -> list[Path]:
    """Folders that a trainer has left: three losses, two rewards each, an evaluation set in the first."""
    folders = []
    for loss in ("dapo", "dr_grpo", "gspo"):
        folder = tmp_path_factory.mktemp("runs") / loss
        settings = {"loss_type": loss, "log_completions": True, "num_completions_to_print": 0, "beta": 0.1}
        trainer = trainers.build(tiny.model(), folder, max_steps=3, **settings)
        if not folders:
            held_out = EvalSet(
                "held_out", rewards=(RewardSpec("vowels", "support.trainers:unit_interval"),), samples=2
            )
            trainer.add_callback(DuringTraining(trainer, [(held_out, tiny.prompts(4).to_list())], workers=0))
        trainer.train()
        folders.append(folder)
    return folders


@pytest.mark.parametrize("runs", [1, 3], ids=["one, with several rewards", "three losses"])
def test_folders_of_real_runs_ask_no_network_and_show_it_all(runs, real_runs, tmp_path):
    page = write_report(real_runs[:runs], tmp_path / "report.html")
    dom = opened(page)
    assert requested(page) == []
    assert len(cards(dom)) == 20
    assert f"{24 * runs} of {24 * runs} match" in dom
    for words in ("held_out", "time/training", "tokens_per_second", "count_a", "groups/mixed"):
        assert words in dom
    if runs == 3:
        assert {facts["run"] for _, _, facts in cards(opened(page, "run=2"))} == {"gspo"}


def test_a_page_that_asks_the_network_is_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<link rel="stylesheet" href="http://127.0.0.1:9/style.css">')
    with contextlib.suppress(AssertionError):  # of the console
        opened(page)
    assert "http://127.0.0.1:9/style.css" in requested(page)


def test_the_browser_of_completions_filters_sorts_and_searches(tmp_path):
    run = with_evaluation(run_folder(tmp_path / "mine"), 4, 0.5)
    for step in (1, 2):
        with_completions(run, step, [(f"{step}+1=", [f"{step}a", f"{step}b", f"{step}c"]), ("9+9=", ["18"])])
    page = write_report([run], tmp_path / "report.html")
    everything = [text for _, text, _ in cards(opened(page))]
    assert everything == ["1a", "1b", "1c", "18", "2a", "2b", "2c", "18"]
    falling = cards(opened(page, "sort=part%3A+accuracy&order=down&step=2"))
    assert [(text, facts["accuracy"], facts["step"]) for _, text, facts in falling] == [
        ("2c", "2", "2"),
        ("2b", "1", "2"),
        ("2a", "0", "2"),
        ("18", "0", "2"),
    ]
    assert [text for _, text, _ in cards(opened(page, "of=reward&least=1.2&search=1%2B1"))] == ["1c"]
    dom = opened(page, "search=nowhere")
    assert cards(dom) == []
    assert "0 of 8 match" in dom


POINTING = """
const box = document.querySelector("[data-curve=reward]"), edge = box.getBoundingClientRect();
const point = (kind, share) => box.dispatchEvent(new PointerEvent(kind, {
  clientX: edge.left + (47.5 + share * 256.6) / 316.8 * edge.width, clientY: edge.top + 20, bubbles: true }));
point("pointerdown", 0.5);
point("pointermove", 1);
document.title = box.nextElementSibling.textContent;
point("pointerup", 1);
if (ZOOMED_OUT) box.dispatchEvent(new MouseEvent("dblclick"));
"""


@pytest.mark.parametrize("zoomed_out", [False, True])
def test_a_curve_says_its_values_and_zooms(zoomed_out, tmp_path):
    page = write_report([run_folder(tmp_path / "mine", steps=2000)], tmp_path / "report.html")
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())  # which lets no script run but the page's own
    script = POINTING.replace("ZOOMED_OUT", str(zoomed_out).lower())
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    dom = opened(page)
    value = re.search(r"<title>step (\d+): ([\d.]+) \(([\d.]+) to ([\d.]+)\)</title>", dom)
    step, mean, low, high = map(float, value.groups())
    assert step > 1980
    assert low < mean < high
    assert mean == pytest.approx(0.1 * (step + 3), abs=0.4)
    # by the page's script; the drawing that it replaces has no colour of its own
    shown = [float(tick) for tick in re.findall(r'text-anchor="middle" fill="currentColor"[^>]*>(\d+)</text>', dom)]
    assert bool(shown) == (not zoomed_out)
    assert all(900 < tick < 2100 for tick in shown)


def test_hostile_completions_do_nothing(tmp_path):
    run = run_folder(tmp_path / "mine", dataset_name="<img src=x onerror=alert(1)>")
    with_completions(run, 1, [(text, [text]) for text in HOSTILE], **{"<b>": "<script>alert(1)</script>"})
    dom = opened(write_report([run], tmp_path / "report.html"))
    assert "<title>mine: report</title>" in dom
    shown = [text for _, text, _ in cards(dom)]
    assert len(shown) == len(HOSTILE)
    assert HOSTILE[:3] == shown[:3]
    assert "<img" not in dom
