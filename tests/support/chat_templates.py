"""Every chat template of TRL: a tokenizer with its control tokens, and what a model writes in its format."""

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import supports_tool_calling

from grpo_ext.environments.compatibility import reader_of

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
PARTS_ONLY = {f"{name}{training}" for name in ("idefics3", "llava_next", "smolvlm") for training in ("", "_training")}
"""Templates that render content parts, and leave out text."""
_BAR = "\uff5c"
"""DeepSeek's."""
_CONTROLS = re.compile(rf"<[^<>{{}}\s']*[|{_BAR}][^<>{{}}\s']*>|</?s>|<(?:start|end)_of_\w+>|\[/?INST\]|<image>")
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}},
    },
}
AT = {"at": "x"}


class Format(NamedTuple):
    """How a family of models writes a turn."""

    call: str | None = None
    end: str | None = None
    """Ends a turn of text; None: what the template puts after an answer."""
    call_ends: tuple[str, ...] = ()
    """End a turn that calls; none: `end`."""
    think: str = "<think>\n{}\n</think>\n\n"
    say: str = "{}"


_XML = "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>"
_JSON = f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(AT)}}}\n</tool_call>'
_HARMONY = "<|channel|>{}<|message|>{{}}<|end|><|start|>assistant"
_LFM = "<|tool_call_start|>[look(at='x')]<|tool_call_end|>"
_GEMMA = Format(
    '<|tool_call>call:look{at:<|"|>x<|"|>}<tool_call|>',
    "<turn|>",
    ("<|tool_response>", "<turn|>"),
    "<|channel>thought\n{}\n<channel|>",
)
FORMATS = {
    "deepseekv3": Format(
        f"<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>look\n```json\n{json.dumps(AT)}\n```"
        "<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", _BAR)
    ),
    "diffusion_gemma": _GEMMA,
    "gemma4": _GEMMA,
    "glm4moe": Format(
        "\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "<|user|>",
        ("<|observation|>",),
        "\n<think>{}</think>\n",
    ),
    "gptoss": Format(
        " to=functions.look<|channel|>commentary json<|message|>" + json.dumps(AT),
        "<|return|>",
        ("<|call|>",),
        _HARMONY.format("analysis"),
        _HARMONY.format("commentary"),
    ),
    "lfm2_2_5": Format(_LFM),
    "lfm2_v2": Format(_LFM),
    "llama3_": Format(f'{{"name": "look", "parameters": {json.dumps(AT)}}}'),
    "muse_glimmer": Format(
        ' to=look<|message|><atem:function_calls>\n<atem:invoke name="look">\n'
        '<atem:parameter name="at">x</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        think=" to=self<|message|>{}<|eot|><|start|>assistant",
    ),
    "nemotron": Format(_XML),
    "qwen3_5": Format(_XML),
    "qwen3_6": Format(_XML),
    "qwen3_8": Format(_XML),
    "qwen": Format(_JSON),
}


def base(name: str) -> str:
    return name.removesuffix("_training")


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Bytes, the template's control tokens (special) and its tags (one token each, not special)."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    controls = sorted(set(_CONTROLS.findall(template)) | {"<bos>", "<eos>"})
    core.add_special_tokens([AddedToken(control, normalized=False, special=True) for control in controls])
    core.add_tokens([AddedToken(tag, normalized=False) for tag in sorted(set(_TAGS.findall(template)))])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = template
    return made


def speaks_of_tools(name: str) -> bool:
    return name not in PARTS_ONLY and supports_tool_calling(tokenizer(name))


def format_named(name: str) -> Format:
    return next((form for prefix, form in FORMATS.items() if name.startswith(prefix)), Format())


def format_of(name: str) -> Format:
    """The family's format, with the template's own end of an answer where none is set."""
    found = format_named(name)
    if found.end is None:
        made, messages = tokenizer(name), [("user", "Q"), ("assistant", "ANSWER"), ("user", "Q")]
        text = made.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
        found = found._replace(end=_CONTROLS.search(text, text.index("ANSWER"))[0])
    return found


@cache
def reader(name: str):
    """The tokenizer that reads calls; None where TRL knows no format. A training template is read as its base."""
    try:
        found = reader_of(tokenizer(base(name)))
    except ValueError:
        return None
    return found


def sampled(name: str, *texts: str) -> list[int]:
    """Ids of texts whose control tokens are real; the letters of a tuple are each their own."""
    made = tokenizer(name)
    ids: list[int] = []
    for text in texts:
        for piece in text if isinstance(text, tuple) else [text]:
            ids += made(piece, add_special_tokens=False)["input_ids"]
    return ids
