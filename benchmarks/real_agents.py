"""Agents that others wrote, unmodified, trained for ten optimizer steps each: `make bench-agents AGENTS=FOLDER`.

FOLDER holds what is installed before, each in a folder of its own, with the versions of the committed results:

    npm install --prefix FOLDER/opencode opencode-ai@1.18.33
    npm install --prefix FOLDER/claude @anthropic-ai/claude-code@2.1.197
    npm install --prefix FOLDER/codex @openai/codex@0.171.0
    python -m venv FOLDER/mini && FOLDER/mini/bin/pip install mini-swe-agent
    python -m venv FOLDER/smol && FOLDER/smol/bin/pip install smolagents openai
    python -m venv FOLDER/lang && FOLDER/lang/bin/pip install langchain langchain-openai

The model is a Llama of one layer with random weights, taught only which of a few answers a turn may be: a call of the
agent's own tool that does the task, and a text that ends it. Prompts, tools, loop and retries are the agent's own.
With `--model FOLDER_OR_NAME` it is that model, with LoRA, groups of eight, and paid for calling a tool too.
Each agent adds a line to results/real_agents.jsonl; `python docs/tables.py` makes the table of docs/agents.md.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from grpo_ext import GRPOExtConfig, GRPOExtTrainer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "real_agents.jsonl"
STEPS, GROUP, POSITIONS = 10, 2, 65_536
REAL_GROUP = 8
TASK = "Create an empty file with the name done.txt in the current folder."
TOUCH = "touch done.txt"


class Agent(NamedTuple):
    """An agent and how it is run; `{agents}` is the folder with what is installed."""

    version: list[str]
    """Command that prints its version."""
    dialect: str
    run: list[str]
    says: list[str]
    """Answers that the model is taught: calls of the agent's tools and texts."""
    env: dict[str, str]
    files: dict[str, str] | None = None


def call(name: str, **arguments: object) -> str:
    """Return a call of a tool as Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


OPENCODE = {
    "model": "policy/policy",
    "small_model": "policy/policy",
    "enabled_providers": ["policy"],
    "permission": "allow",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "policy": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {
                "baseURL": "{env:OPENAI_BASE_URL}",
                "apiKey": "{env:OPENAI_API_KEY}",
            },
            "models": {"policy": {"limit": {"context": POSITIONS, "output": 4096}}},
        }
    },
}
CODEX = """
model = "policy"
model_provider = "policy"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.policy]
name = "policy"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
SMOL = """
import os
import sys

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(CodeAgent(tools=[], model=model, max_steps=4, additional_authorized_imports=["pathlib"]).run(sys.argv[1]))
"""
LANGGRAPH = """
import subprocess
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def shell(command: str) -> str:
    "Run a command in the current folder and return what it prints."
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return done.stdout + done.stderr


graph = create_agent(ChatOpenAI(model="policy"), [shell], system_prompt="You work in a folder by its shell.")
asked = {"messages": [{"role": "user", "content": sys.argv[1]}]}
print(graph.invoke(asked, {"recursion_limit": 9})["messages"][-1].content)
"""
AGENTS = {
    "mini-swe-agent": Agent(
        ["{agents}/mini/bin/pip", "show", "mini-swe-agent"],
        "chat completions",
        ["{agents}/mini/bin/mini", "-t", "{prompt}", "-m", "openai/policy", "-y", "--exit-immediately"],
        [call("bash", command=TOUCH), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), "Done."],
        {"HOME": "{folder}", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    "opencode": Agent(
        ["{agents}/opencode/node_modules/.bin/opencode", "--version"],
        "chat completions, streamed",
        ["{agents}/opencode/node_modules/.bin/opencode", "run", "{prompt}"],
        [call("bash", command=TOUCH), "Done."],
        {"HOME": "{folder}", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {"opencode.json": json.dumps(OPENCODE)},
    ),
    "Claude Code": Agent(
        ["{agents}/claude/node_modules/.bin/claude", "--version"],
        "messages, streamed",
        [
            *("{agents}/claude/node_modules/.bin/claude", "-p", "{prompt}", "--model", "policy"),
            *("--allowedTools", "Bash", "--max-turns", "5"),
        ],
        [call("Bash", command=TOUCH, description="Create the file"), "Done."],
        {"HOME": "{folder}", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "Codex": Agent(
        ["{agents}/codex/node_modules/.bin/codex", "--version"],
        "responses, streamed",
        ["{agents}/codex/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "{prompt}"],
        [call("exec_command", cmd=TOUCH), "Done."],
        {"HOME": "{folder}", "CODEX_HOME": "{folder}/.codex"},
        {".codex/config.toml": CODEX},
    ),
    "smolagents": Agent(
        ["{agents}/smol/bin/pip", "show", "smolagents"],
        "chat completions",
        ["{agents}/smol/bin/python", "agent.py", "{prompt}"],
        [
            "Thought: I create it.\n<code>\nimport pathlib\npathlib.Path('done.txt').touch()\n</code>",
            "Thought: it is there.\n<code>\nfinal_answer('done')\n</code>",
        ],
        {"HOME": "{folder}"},
        {"agent.py": SMOL},
    ),
    "LangGraph": Agent(
        ["{agents}/lang/bin/pip", "show", "langgraph"],
        "chat completions",
        ["{agents}/lang/bin/python", "agent.py", "{prompt}"],
        [call("shell", command=TOUCH), "Done."],
        {"HOME": "{folder}"},
        {"agent.py": LANGGRAPH},
    ),
}


# The model.


def tokenizer_of(says: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 8,000 pieces of this project's documents, in which each part of an answer is one token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet))
    core.add_tokens([AddedToken(part, normalized=False) for said in says for part in parts_of(said)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, padding_side="left")
    made.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    made.add_special_tokens({"pad_token": "<|pad|>"})
    made.chat_template = qwen3_chat_template
    return made


def parts_of(said: str) -> list[str]:
    """Return an answer's parts: tags and what is between them."""
    return [part for part in re.split(r"(</?tool_call>)", said) if part]


def policy_of(tokenizer: PreTrainedTokenizerFast, says: list[str]) -> PreTrainedModel:
    """Return a model whose next token depends on the last one: the parts of an answer in turn, else mostly the end."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, **sizes, **ends)
    )
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)["input_ids"]
    chains = [[asked[-1], *tokenizer(said)["input_ids"], tokenizer.eos_token_id] for said in says]
    pairs = [pair for chain in chains for pair in pairwise(chain)]
    out = model.model.layers[0].self_attn.o_proj.weight
    out.data.zero_()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p is not out], lr=3e-3)
    for _ in range(200):
        others = torch.randint(len(tokenizer), (64,)).tolist()
        last, following = zip(*pairs, *((token, tokenizer.eos_token_id) for token in others), strict=True)
        logits = model(input_ids=torch.tensor(last)[:, None]).logits[:, 0]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(following), reduction="none")
        (losses[: len(pairs)].mean() + 0.1 * losses[len(pairs) :].mean()).backward()
        optimizer.step()
        model.zero_grad()
    return model


# Training.


class Recorder(GRPOExtTrainer):
    """Keeps each generation's trajectories, and what is trained of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attempts: list[dict[str, Any]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        active = (output["completion_mask"] * output["tool_mask"]).bool()
        rows = zip(self._made, output["completion_ids"], active, strict=True)
        self.attempts += [
            {
                "turns": len(made.turns),
                "contexts": len(made.rows()),
                "read": [len(turn.context) for turn in made.turns],
                "sampled": sum(len(turn.sampled) for turn in made.turns),
                "same": ids[kept].tolist() == [token for turn in made.turns for token in turn.sampled],
                "reward": made.reward,
                "failure": made.failure,
                "truncated": made.truncated,
            }
            for made, ids, kept in rows
        ]
        return output

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *completed: Any) -> Any:
        self._made = [row["trajectory"] for row in inputs]
        return super()._calculate_rewards(inputs, *completed)


def called(completions: list, trajectory: list, **_: Any) -> list[float]:
    """1 for an attempt in which the model called a tool: all that a small model learns here in a few steps."""
    return [float(len(made.turns) > 1) for made in trajectory]


def trained(agent: Agent, agents: Path, steps: int, folder: str, name: str | None) -> Recorder:
    """Train an agent with the model `name`, or with the taught one."""
    tokenizer = tokenizer_of(agent.says) if name is None else AutoTokenizer.from_pretrained(name)
    group = GROUP if name is None else REAL_GROUP
    run = [part.replace("{agents}", str(agents)) for part in agent.run]
    options = {"run": run, "env": agent.env, "files": agent.files or {}, "test": ["test", "-e", "done.txt"]}
    args = GRPOExtConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=group,
        num_generations=group,
        max_completion_length=24_000 if name is None else 1000,  # counts tools' answers and sub-agents' contexts
        learning_rate=1e-3 if name is None else 1e-4,
        logging_steps=1,
        use_cpu=True,
        bf16=name is not None,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"prompt": [{"role": "user", "content": TASK}]}] * steps
    entry = {"name": "command", "kwargs": options, "max_turns": 8, "turn_timeout": 1800}
    model = policy_of(tokenizer, agent.says) if name is None else name
    lora = None if name is None else LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    made = {"processing_class": tokenizer, "environments": [entry], "peft_config": lora}
    trainer = Recorder(model, None if name is None else called, args, rows, **made)
    trainer.train()
    return trainer


def record(name: str, agents: Path, steps: int, model: str | None) -> dict[str, Any]:
    """Train an agent, and return what was seen."""
    agent, start = AGENTS[name], time.perf_counter()
    command = [part.replace("{agents}", str(agents)) for part in agent.version]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        trainer = trained(agent, agents, steps, folder, model)
    attempts, log = trainer.attempts, trainer.state.log_history
    return {
        "agent": name,
        "model": "taught, 1 layer" if model is None else Path(model).name,
        "version": re.search(r"\d+\.\d+\.\d+", said)[0],
        "dialect": agent.dialect,
        "steps": trainer.state.global_step,
        "moved": sum(entry.get("grad_norm", 0) > 0 for entry in log),
        "seconds": round(time.perf_counter() - start),
        "reward": [entry["reward"] for entry in log if "reward" in entry],
        "attempts": attempts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", type=Path, help="folder with what is installed")
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--model", help="a model in place of the taught one")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    for name in args.only:
        made = record(name, args.agents.resolve(), args.steps, args.model)
        lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        before = {(run["agent"], run["model"]): run for run in map(json.loads, lines)}
        every = before | {(name, made["model"]): made}
        RESULTS.write_text("".join(f"{json.dumps(run)}\n" for run in every.values()))
        turns = statistics.mean(one["turns"] for one in made["attempts"])
        lost = [one["failure"] for one in made["attempts"] if one["failure"]]
        print(f"{name}: {made['steps']} steps, {turns:.1f} turns, rewards {made['reward']}, lost {lost}", flush=True)


if __name__ == "__main__":
    main()
