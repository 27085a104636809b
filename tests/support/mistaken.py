"""A folder as a new user has it: models, data and files, most of them unfit for GRPO in one way each."""

import json
import shutil
from pathlib import Path

from transformers import Qwen2Config, T5Config

from support import tiny


def lay_out(folder: Path) -> None:
    """Write all of it; the names say what is wrong."""
    _models(folder)
    _data(folder)
    (folder / "notes.txt").write_text("no data")


def _models(folder: Path) -> None:
    model = Path(tiny.save(folder / "model", max_position_embeddings=1024))
    untied = {file.name for file in model.iterdir() if "token" in file.name or "template" in file.name}
    for name in ("base", "no-tokenizer", "quantized", "small-embedding"):
        shutil.copytree(model, folder / name)
    base = tiny.tokenizer()
    base.chat_template = None
    (folder / "base" / "chat_template.jinja").unlink(missing_ok=True)
    base.save_pretrained(folder / "base")
    strict = tiny.tokenizer()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    strict.chat_template = refusal + tiny.TEMPLATE
    shutil.copytree(model, folder / "no-system")
    strict.save_pretrained(folder / "no-system")
    for name in untied:
        (folder / "no-tokenizer" / name).unlink()
    _configure(folder / "quantized", quantization_config={"quant_method": "gptq", "bits": 4})
    _configure(folder / "small-embedding", vocab_size=10)
    (folder / "empty-folder").mkdir()
    _bare(folder / "t5", T5Config(architectures=["T5ForConditionalGeneration"]).to_dict())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bare = Qwen2Config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, vocab_size=64, **sizes)
    _bare(folder / "qwen-no-tokenizer", bare.to_dict())
    own = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    _bare(folder / "own-code", {"model_type": "own", "architectures": ["OwnModel"], "auto_map": own})


def _configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _bare(folder: Path, config: dict) -> None:
    """A configuration beside an empty file of weights, which nobody opens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()


def _data(folder: Path) -> None:
    rows = [{"question": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(16)]
    write(folder / "questions.jsonl", rows)
    write(folder / "splits" / "train.jsonl", rows)
    write(folder / "splits" / "validation.jsonl", rows[:8])
    write(folder / "few.jsonl", rows[:1])
    write(folder / "odd.jsonl", [{"text": row["question"], "label": row["answer"]} for row in rows])
    write(folder / "counted.jsonl", [{"question": row["question"], "answer": int(row["answer"])} for row in rows])
    write(folder / "texts.jsonl", [{"prompt": row["question"], "answer": row["answer"]} for row in rows])
    write(folder / "null-answers.jsonl", [{**row, "answer": None} for row in rows])
    write(folder / "null-prompt.jsonl", [{**rows[0], "question": None}, *rows])
    write(folder / "styled.jsonl", [{**row, "style": "boxed"} for row in rows])
    write(folder / "plural.jsonl", [{**row, "prompts": 1} for row in rows])
    write(folder / "long.jsonl", [{**row, "question": "7 + " * 240 + row["question"]} for row in rows])
    (folder / "broken.jsonl").write_text('{"question": "1 + 1"}\n{"question": \n')
    (folder / "empty.jsonl").write_text("")
    (folder / "header.csv").write_text("question,answer\n1, 2,3\n")
    (folder / "latin.csv").write_bytes("question,answer\nCaf\xe9?,1\n".encode("latin-1"))


def write(file: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
