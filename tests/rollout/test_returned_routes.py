"""Routes in vLLM's answers: of a server, as `/v1/completions` encodes them, and of an engine in this process."""

import base64
import http.server
import io
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState
from trl.generation import vllm_generation

from grpo_ext.rollout.vllm.client import Client
from grpo_ext.rollout.vllm.generation import Generation
from grpo_ext.rollout.vllm.requester import Request, Requester
from grpo_ext.rollout.vllm.server import ServerFacts, mismatches, server_facts

LAYERS, CHOSEN = 3, 2
SETTINGS = {"temperature": 1.0, "logprobs": 0, "generation_kwargs": {}}


def routes(tokens, seed, dtype=np.uint8, most=200):
    return np.random.default_rng(seed).integers(0, most, (tokens, LAYERS, CHOSEN)).astype(dtype)


def encoded(array):
    """As vLLM's `numpy2base64` does."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


@contextmanager
def answering(answer, config=None):
    """A server with vLLM's endpoints; `answer` returns the completions of a prompt with their routes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def _say(self, content, code=200):
            body = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            pages = {
                "/health": "",
                "/v1/models": {"data": [{"id": "m"}]},
                "/metrics": "process_start_time_seconds 1\n",
            }
            pages |= {"/weight_info": {}, "/server_info?config_format=json": {"vllm_config": config}}
            self._say(pages[self.path])

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                return self._say({"tokens": [1]})
            choices = []
            for prompt in asked["prompt"]:
                for ids, found in answer(prompt)[: asked["n"]]:
                    choice = {"prompt_token_ids": prompt, "token_ids": ids, "routed_experts": found}
                    logprobs = [{f"token_id:{token}": -1.0} for token in ids]
                    tokens = [f"token_id:{token}" for token in ids]
                    choice["logprobs"] = {
                        "tokens": tokens, "token_logprobs": [-1.0] * len(ids), "top_logprobs": logprobs,
                    }  # fmt: skip
                    choices.append(choice)
            self._say({"choices": choices})

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 64  # as many threads ask at once

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def asking(url):
    client = Client(url, 30.0)
    client.serving = client.identity()
    return Requester(client, SETTINGS)


def test_the_routes_of_each_completion_come_with_it_whichever_thread_asks():
    def answer(prompt):
        return [([7] * n, encoded(routes(len(prompt) + n - 1, seed=10 * prompt[0] + n))) for n in (1, 3)]

    with answering(answer) as url:
        requests = [Request([[i, 5, 6], [i + 1, 5]], 8, None, 2) for i in range(20)]
        found = asking(url).ask_all(requests)
    asked = [(prompt, n) for request in requests for prompt in request.contexts for n in (1, 3)]
    assert len(found) == len(asked) == 80
    for one, (prompt, n) in zip(found, asked, strict=True):
        assert one.ids == [7] * n
        assert one.routes.dtype == torch.uint8
        assert torch.equal(one.routes, torch.from_numpy(routes(len(prompt) + n - 1, seed=10 * prompt[0] + n)))


def asked(given):
    with answering(lambda prompt: [([7, 8], given)]) as url:
        [one] = asking(url).ask(Request([[3, 4, 5]], 8, None))
        return one


def test_many_experts_and_a_completion_that_a_stop_text_cut():
    found = routes(9, 0, np.uint16, 500)
    assert torch.equal(asked(encoded(found)).routes, torch.from_numpy(found[:4].astype(np.int16)))
    assert asked(None).routes is None


def test_routes_of_the_generated_tokens_only_are_refused_with_the_release_that_has_all():
    with pytest.raises(RuntimeError, match=r"2 routes for 4 tokens; replay_routes needs vLLM 0.31"):
        asked(encoded(routes(2, 0)))


@pytest.mark.parametrize("returns", [True, False, None])
def test_a_server_that_returns_no_routes_does_not_suit_the_run(returns):
    config = {
        "model_config": {
            "model": "m", "served_model_name": "m", "max_model_len": 8, "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs", "max_logprobs": 20,
        },
        "weight_transfer_config": None,
    }  # fmt: skip
    if returns is not None:  # a release before 0.31
        config["aux_output_config"] = {"enable_return_routed_experts": returns}
    with answering(None, config) as url:
        facts = server_facts(url)
    problems = [*mismatches(ServerFacts(routes=True), facts)]
    assert [problem.field for problem in problems] == ([] if returns else ["routes"])
    assert not [*mismatches(ServerFacts(), facts)]


class Params(SimpleNamespace):
    def clone(self):
        return Params(**vars(self))


class Engine:
    """Answers with the prompt's first token, and routes."""

    def generate(self, prompts, sampling_params, use_tqdm):
        logprob = SimpleNamespace(logprob=-1.0, rank=1)
        found = []
        for prompt in (prompt["prompt_token_ids"] for prompt in prompts):
            ids = [prompt[0]] * 2
            completion = {"token_ids": ids, "logprobs": [{ids[0]: logprob}] * 2}
            completion["routed_experts"] = routes(len(prompt) + 1, seed=prompt[0])
            found.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(**completion)]))
        return found


class Stream:
    def integers(self, below):
        return 1


@pytest.mark.parametrize("streams", [None, [Stream(), Stream()]], ids=["batch", "rows"])
def test_an_engine_in_this_process_returns_the_routes_of_its_rows(streams, monkeypatch):
    monkeypatch.setattr(vllm_generation, "SamplingParams", Params, raising=False)
    found = Generation.__new__(Generation)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "logprobs": 0}
    settings |= {"max_completion_length": 4, "structured_outputs_regex": None, "enable_sleep_mode": False}
    settings |= {"generation_kwargs": {}, "tensor_parallel_size": 1, "model": torch.nn.Linear(1, 1), "llm": Engine()}
    settings |= {"accelerator": PartialState(), "mode": "colocate", "with_support": False, "with_routes": True}
    vars(found).update(settings)
    rows = found.sample([[3, 4], [9, 8, 7]], [4, 4], streams)
    for row, (length, seed) in zip(rows, [(3, 3), (4, 9)], strict=True):
        assert torch.equal(row.routes, torch.from_numpy(routes(length, seed)))
