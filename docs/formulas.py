r"""Formulas of the table of losses as mathematics: TeX for GitHub, MathML for the site (a hook of mkdocs.yml).

The source is the plain text that `grpo-ext losses` prints. GitHub renders TeX between $` and `$, and browsers render
MathML without a script, so no page fetches anything.
"""

import re
from html import unescape
from typing import Any

FUNCTIONS = ("min", "max", "log", "exp", "sum", "prod")
GREEK = {"eps": "varepsilon", "lam": "lambda"} | {name: name for name in ("beta", "delta", "phi", "pi", "tau")}
UPRIGHT = ("clip", "stopgrad", "sigmoid", "mean", "BetaPDF", "KL", "cap")
"""Names that a formula writes upright; any other word of two letters or more, and "a", is prose."""
SYMBOLS = {">=": r"\ge ", ">": "> ", "*": r"\cdot "}
TOKEN = re.compile(
    r"\((?P<over>\d)/(?P<under>\w+)\)"
    r"|\^\((?P<power>[^()]*)\)"
    r"|(?P<name>[A-Za-z]+(?:-[a-z]{2,})*)(?:_(?P<below>\w+|\{[^}]*\}))?"
    r"|(?P<comma>, )|(?P<other>>=|.)"
)
TIDY = (
    (r"\^(\\\w+)", r"^{\1}"),
    (r"\}\\  \\ \\text\{", " "),  # two words of prose are one text
    (r"\\ (?=[,)]|$)|(?<=quad )\\ ", ""),
    (r" +", " "),
)
MATH = re.compile(r"\$<code>(.*?)</code>\$", re.DOTALL)


def mathematics(formula: str) -> str:
    """Return a formula of the table of losses for a Markdown page: the formula, then its definitions."""
    return ", ".join(f"$`{part}`$" for part in tex(formula).split(r",\quad "))


def tex(formula: str) -> str:
    """Return a formula of the table of losses as TeX."""
    parts: list[str] = []
    depth = bars = 0
    for found in TOKEN.finditer(formula):
        other = found["other"] or ""
        depth += (other == "(") - (other == ")")
        if other == "|":
            bars += 1
            other = r"\lvert " if bars % 2 else r"\rvert "
        if found["over"]:
            parts.append(rf"\frac{{{found['over']}}}{{{tex(found['under'])}}}")
        elif found["power"]:
            parts.append(f"^{{{tex(found['power'])}}}")
        elif found["name"]:
            parts.append(_word(found["name"], found["below"]))
        elif found["comma"]:
            parts.append(", " if depth else r",\quad ")
        else:
            parts.append(SYMBOLS.get(other, other))
    joined = "".join(parts)
    for before, after in TIDY:
        joined = re.sub(before, after, joined)
    return joined.strip()


def _word(name: str, below: str | None) -> str:
    """Return a name with its index, or a word of prose between spaces."""
    if name in GREEK or name in FUNCTIONS:
        shown = f"\\{GREEK.get(name, name)} "
    elif name in UPRIGHT:
        shown = rf"\operatorname{{{name}}}"
    elif len(name) > 1 or name == "a":
        return rf"\ \text{{{name}}}\ "
    else:
        shown = name
    return f"{shown.strip()}_{{{_index(below)}}} " if below else shown


def _index(below: str) -> str:
    """Return an index: `it` is two of them, a word is upright."""
    if below.startswith("{"):
        return tex(below[1:-1])
    return ",".join(below) if len(below) < 3 else rf"\text{{{below}}}"


def on_page_content(html: str, **_: Any) -> str:
    """Return a page of the site with its formulas as MathML; a hook of mkdocs."""
    from latex2mathml.converter import convert  # an environment of the site has it, see requirements.txt

    return MATH.sub(lambda found: convert(unescape(found[1])), html)
