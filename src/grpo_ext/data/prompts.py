"""Check a few prompts as the model reads them, before it is trained on them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset
from datasets.features.features import require_decoding
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response
from trl.rewards import think_format_reward

from grpo_ext.data.chat_template import prompt_ids, rendered, splits_reasoning, template_opens
from grpo_ext.data.images import image_columns, with_images
from grpo_ext.data.rows import Row
from grpo_ext.errors import ABSENT, DataError, Problem
from grpo_ext.rewards.columns import as_begun, opened
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.protocol import rewards
from grpo_ext.safe_reading import parse_json

SEEN, PICTURES_SEEN = 64, 4
"""Number of prompts that are checked, and of those with images, which are opened."""
_COPIED, _TAIL = 24, 6
"""Characters of a solution, and of what follows the last text, that are in no text by accident."""
_MARKS = re.compile(r"mark\d+q7c1f")
"""Stand in for texts: a template may trim or escape a text, but not a mark."""
_PRINTED = re.compile(r"""['"]type['"]: ['"]text['"]""")
_READ = ("prompt", "solution", "image", "images")
_CONTROL = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{2,}[|\uff5c]>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_(?:turn|image)>")
"""How chat templates write control tokens; `<|x|>` may be a norm."""
_NEVER = 2.0


class _Fault(NamedTuple):
    """A fault of a prompt; `fatal` and `least`: shares of such prompts for a problem, and for a warning."""

    reason: str
    cure: str
    fatal: float = 0.0
    least: float = 0.0


class PromptCheck(NamedTuple):
    """Checks of prompts as the chat template renders them; call it with rows and the name of the data.

    Args:
        tokenizer: the policy's.
        options: `chat_template_kwargs`.
        played: whether environments may still change the messages.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    played: bool = False

    def __call__(self, rows: Dataset | Sequence[Row], source: str) -> tuple[list[Problem], list[Problem]]:
        """Return why the model cannot be trained on the first rows, and what is probably not meant."""
        if isinstance(rows, Dataset):
            rows = rows.select_columns([n for n, f in rows.features.items() if n in _READ or not require_decoding(f)])
        count = min(len(rows), PICTURES_SEEN if image_columns(rows) else SEEN)
        by_cure: dict[str, list[tuple[int, _Fault]]] = {}
        for index in range(count):
            for fault in self._faults(rows, index):
                by_cure.setdefault(fault.cure, []).append((index, fault))
        problems, notes = list[Problem](), list[Problem]()
        for bad in by_cure.values():
            index, (reason, cure, fatal, least) = bad[0]
            among = f" (so in {len(bad)} of the first {count} rows)" if len(bad) > 1 else ""
            problem = Problem(f"{source}, row {index} (from 0)", ABSENT, f"{reason}{among}", cure)
            (problems if len(bad) >= fatal * count else notes if len(bad) >= least * count else []).append(problem)
        return problems, notes

    def _faults(self, rows: Any, index: int) -> Iterator[_Fault]:
        try:
            row = rows[index]
            prompt = with_images(row)
        except DataError as error:
            yield _Fault(error.problems[0].reason, error.problems[0].cure)
            return
        if isinstance(prompt, str):
            yield from self._unseen_tools(row, prompt)
            yield from self._foreign([prompt], "")
            yield from self._around(prompt_ids(prompt, self.tokenizer, self.options), [prompt], row)
        elif self.tokenizer.chat_template is not None:  # else a processor may have one
            yield from self._of_messages(prompt, row)

    def _of_messages(self, prompt: list[Row], row: Row) -> Iterator[_Fault]:
        if prompt[-1]["role"] == "assistant" and not self.played:
            said = f"{prompt[-1]['content']!r:.60}"
            cure = "Leave that message out; the answer has a column of its own."
            yield _Fault(f"the prompt ends with the assistant's turn ({said}), so it holds the answer", cure)
        try:
            skeleton, texts, wrong = self._skeleton(prompt)
        except Exception as error:  # a template may raise anything of its own, for example for a system message
            roles = " and ".join(message["role"] for message in prompt)
            reason = f"the chat template fails on a prompt of {roles} messages ({error or type(error).__name__})"
            yield _Fault(reason, "Leave out system_prompt, or name a model whose template renders them.")
            return
        if wrong:
            cure = "Write it as text, or name a model whose template has it; images: the type 'image'."
            yield _Fault(f"the chat template {wrong}", cure)
            return
        yield from self._unseen_tools(row, " ".join([skeleton, *texts]))
        yield from self._rendered_before(skeleton, texts)
        yield from self._foreign(texts, skeleton)
        yield from self._around(self.tokenizer(skeleton, add_special_tokens=False)["input_ids"], texts, row)

    def _around(self, ids: list[int], texts: list[str], row: Row) -> Iterator[_Fault]:
        """Yield a beginning that is there twice, and a solution in the prompt's texts."""
        bos, name = self.tokenizer.bos_token_id, self.tokenizer.bos_token
        if bos is not None and ids[:2] == [bos, bos]:
            yield _Fault(f"the prompt begins with {name!r} twice", f"Remove {name!r} from the text.")
        answer = row.get("solution")
        if isinstance(answer, str) and len(answer) >= _COPIED and any(answer in text for text in texts):
            cure = "Remove it there, unless it is one of several choices."
            yield _Fault(f"its solution ({answer!r:.60}) occurs in the prompt", cure, _NEVER, 0.5)

    def _unseen_tools(self, row: Row, prompt: str) -> Iterator[_Fault]:
        """Yield tools of the row that the model would not read of; environments bring their own."""
        for column in () if self.played else sorted(row.keys() - {*_READ}):
            if unseen := [name for name in _names_of_tools(row[column], column) if name not in prompt]:
                reason = f"its column {column!r} has {str(unseen[:3])[1:-1]}, which the prompt does not name"
                cure = "Only prompt reaches the model: write the tools into it, or rename the column ('row_tools')."
                yield _Fault(reason, cure, 0.0 if column == "tools" else _NEVER)

    def _foreign(self, texts: list[str], skeleton: str) -> Iterator[_Fault]:
        """Yield a text with control tokens of another model's chat template."""
        own = {*self.tokenizer.get_vocab(), *self.tokenizer.all_special_tokens} if not skeleton else ()
        for text in texts:
            if foreign := [t for t in dict.fromkeys(_CONTROL.findall(text)) if t not in skeleton and t not in own]:
                shown = ", ".join(map(repr, foreign[:3]))
                reason = f"a text ({text!r:.60}) holds {shown}: control tokens of another model's chat template"
                cure = "Give messages with roles and plain texts, to which the model's template adds its own tokens."
                yield _Fault(reason, cure, _NEVER)
                return

    def _skeleton(self, messages: list[Row]) -> tuple[str, list[str], str]:
        """Return what a template writes around the texts, the texts, and what it does wrong.

        A processor's template may take texts only as content parts, as TRL gives them.
        """
        skeletons, errors = list[tuple[str, list[str], str]](), list[Exception]()
        for in_parts in (False, True):
            marked, texts = _marked(messages, in_parts)
            try:
                skeleton = rendered(marked, self.tokenizer, self.options)
                skeletons.append((skeleton, texts, next(self._wrong(marked, texts, skeleton), "")))
            except Exception as error:
                errors.append(error)
        if not skeletons:
            raise errors[0]
        return next((one for one in skeletons if not one[2]), skeletons[0])

    def _wrong(self, marked: list[Row], texts: list[str], skeleton: str) -> Iterator[str]:
        for message in marked:
            calls = [call.get("function", call).get("name", "") for call in message.get("tool_calls", ())]
            yield from (f"leaves out the call of {name!r}" for name in calls if name not in skeleton)
            for mark in () if calls else _MARKS.findall(str(message["content"])):  # it may omit text beside a call
                if mark not in skeleton:
                    yield f"leaves out the {message['role']}'s text {texts[int(mark[4:-5])]!r:.60}"
        if _PRINTED.search(skeleton):
            yield "prints content parts as Python writes lists"
        parts = [part for message in marked if isinstance(message["content"], list) for part in message["content"]]
        for kind in {part.get("type") for part in parts} - {"text"}:
            without = [
                {**m, "content": [part for part in m["content"] if part.get("type") != kind]}
                if isinstance(m["content"], list)
                else m
                for m in marked
            ]
            if kind != "image" or rendered(without, self.tokenizer, self.options) == skeleton:  # TRL passes no others
                yield f"leaves out content parts of type {kind!r}"

    def _rendered_before(self, skeleton: str, texts: list[str]) -> Iterator[_Fault]:
        """Yield a text that holds what the template writes: a control token, or all that follows the last text."""
        tail = _MARKS.split(skeleton)[-1].strip()
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = [token.content for token in added if token.special]
        written = [token for token in (*special, *self.tokenizer.all_special_tokens) if token in skeleton]
        for part in [*written, *([tail] if len(tail) >= _TAIL else [])]:
            for text in texts:
                if part in text:
                    reason = f"a text ({text!r:.60}) holds {part!r}, which the chat template writes itself"
                    yield _Fault(reason, "Give the text as it is before a template; images have a column.", 1.0)
                    return


def _names_of_tools(tools: Any, column: str) -> list[str]:
    """Return the names of functions that a cell describes; of another column than `tools`, those with parameters."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.lstrip().startswith("[") else None
        except ValueError:
            return []
    listed = [tool for tool in (tools if isinstance(tools, list) else ()) if isinstance(tool, dict)]
    described = (tool.get("function") or tool for tool in listed)
    named = [one for one in described if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return [one["name"] for one in named if column == "tools" or "parameters" in one]


def _marked(messages: list[Row], in_parts: bool) -> tuple[list[Row], list[str]]:
    """Return messages with marks in place of their texts, and the texts."""
    texts = list[str]()

    def mark(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        texts.append(text)
        return f"mark{len(texts) - 1}q7c1f"

    def marked(content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": mark(part["text"])} if "text" in part else part for part in content]
        return [{"type": "text", "text": mark(content)}] if in_parts and content else mark(content)

    return [{**message, "content": marked(message["content"])} for message in messages], texts


_LAYOUT = "<think>\n0\n</think>\n<answer>\n\\boxed{0}\n```python\n0\n```\n</answer>"
"""A completion in all layouts."""
_LAYOUTS = ("format", "tags", "code_format", "think_format_reward")


def unseen_layout(
    spec: RewardSpec, rows: object, tokenizer: PreTrainedTokenizerBase | None, options: Mapping[str, Any]
) -> Iterator[tuple[Problem, bool]]:
    """Yield why a reward does not see a completion in its own layout as such, and whether it scores that 0.

    The completion is tokenized, and decoded as in training; it begins behind the tag that its prompt leaves open.
    """
    if tokenizer is None or not isinstance(rows, Dataset) or "prompt" not in rows.column_names or spec.is_model:
        return
    if spec.callable not in [think_format_reward, *(rewards[name] for name in _LAYOUTS)]:
        return
    prompt = rows.select_columns(["prompt"])[0]["prompt"]
    template = template_opens(tokenizer, options)
    tag = (opened(prompt) if isinstance(prompt, str) else template).strip()
    written = _LAYOUT.partition(tag)[2].lstrip() if tag else _LAYOUT
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    message = {"role": "assistant", "content": text}
    if isinstance(prompt, list) and splits_reasoning(tokenizer):
        message = parse_response(tokenizer, ids, prefix=prompt_ids(prompt, tokenizer, options), tools=[])
    (seen,) = as_begun(spec, {"prompts": [prompt], "completions": [[message]]}, template)["completions"]
    whole = [{"role": "assistant", "content": _LAYOUT}]
    value, best = (spec.callable(completions=[each], **spec.kwargs)[0] for each in (seen, whole))
    if value >= best or tokenizer.unk_token_id in ids:  # a toy's tokenizer knows no tags
        return
    reason, cure = f"the prompt leaves {tag} open, and a function does not see that", "Name the reward as text."
    if lost := [word for word in re.findall(r"</?\w+>", written) if word not in text]:
        reason = f"the tokenizer drops {', '.join(lost)} from completions as special tokens"
        cure = "Make them AddedToken(..., special=False) in the tokenizer, or reward another layout."
    elif message["content"] != text:
        reason, cure = "the tokenizer's response_template reads the reasoning apart", "Reward another layout."
    yield Problem("reward", spec.name, f"its own layout scores {value:g}, not {best:g}: {reason}", cure), not value
