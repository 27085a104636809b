"""Seeds of rows that vLLM samples: the same on all ranks of an engine; a server gets one request per row."""

import threading
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from trl.generation import vllm_generation

from grpo_ext.config.temporary import temporarily
from grpo_ext.rollout.vllm.generation import Generation
from grpo_ext.rollout.vllm.server import ServerTrouble

RANKS = 2


class Params(SimpleNamespace):
    def clone(self):
        return Params(**vars(self))


def logprob(token):
    return {token: SimpleNamespace(logprob=-1.0, rank=1)}


class Engine:
    """Answers with the seed that it got for each prompt."""

    def generate(self, prompts, sampling_params, use_tqdm):
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        self.seeds = [params.seed for params in each]
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=[params.seed], logprobs=[logprob(params.seed)])],
            )
            for prompt, params in zip(prompts, each, strict=True)
        ]


def made(mode="colocate", **further):
    found = Generation.__new__(Generation)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "logprobs": 0}
    settings |= {"max_completion_length": 4, "structured_outputs_regex": None, "enable_sleep_mode": False}
    settings |= {"generation_kwargs": {}, "tensor_parallel_size": 1, "model": torch.nn.Linear(1, 1), "llm": Engine()}
    state = PartialState()
    settings |= {"accelerator": state, "mode": mode, "with_support": False, "with_routes": False}
    vars(found).update(settings | further)
    return found


@pytest.fixture
def engine_of_two_ranks(monkeypatch):
    """TRL's own code on two ranks, which are threads here, that share one engine."""
    here, meet, shared = threading.local(), threading.Barrier(RANKS, timeout=60), {}
    monkeypatch.setattr(vllm_generation, "SamplingParams", Params, raising=False)

    def gather(into, value, group):
        shared[here.rank] = value
        meet.wait()
        into[:] = [shared[rank] for rank in range(RANKS)]
        meet.wait()

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: here.rank)

    def on_ranks(generate):
        ranks = [made(tensor_parallel_size=RANKS, tp_group=None) for _ in range(RANKS)]
        answers = [None] * RANKS

        def run(rank):
            here.rank = rank
            answers[rank] = generate(ranks[rank], rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [rank.llm.seeds for rank in ranks], answers

    return on_ranks


class Stream:
    """A stream of random numbers whose first seed is known."""

    def __init__(self, seed):
        self.seed = seed

    def integers(self, below):
        return self.seed


def sampled(generation, contexts, seeds):
    return [row.ids for row in generation.sample(contexts, [4] * len(contexts), [Stream(seed) for seed in seeds])]


def test_all_ranks_of_an_engine_give_a_row_the_same_seed(engine_of_two_ranks):
    def generate(rank, number):
        return sampled(rank, [[number, i] for i in range(3)], [10 * number + i for i in range(3)])

    seeds, completions = engine_of_two_ranks(generate)
    assert seeds == [[0, 1, 2, 10, 11, 12]] * 2
    assert completions == [[[0], [1], [2]], [[10], [11], [12]]]  # what each would get from an engine of its own


@pytest.mark.parametrize("left", [[7], []], ids=["one", "none"])
def test_ranks_that_have_fewer_rows_than_others_fill_up(engine_of_two_ranks, left):
    """Of a wave in which the second rank has one attempt left, or none."""

    def generate(rank, number):
        seeds = [[5, 6], left][number]
        return sampled(rank, [[1]] * len(seeds), seeds)

    seeds, completions = engine_of_two_ranks(generate)
    assert seeds[0] == seeds[1]
    assert seeds[0] == [5, 6, *left, *[0] * (2 - len(left))]
    assert completions == [[[5], [6]], [[seed] for seed in left]]


def test_streams_of_rows_go_before_the_seeds_of_the_evaluation_around_them(monkeypatch):
    monkeypatch.setattr(vllm_generation, "SamplingParams", Params, raising=False)
    found = made()
    with temporarily(found, temperature=0.5), found.seeded([1, 2]):
        assert sampled(found, [[3]], [8]) == [[8]]
        assert found.generate([[3], [4]], None, 1)[1] == [[1], [2]]
    assert (found.temperature, found._seeds) == (1.0, None)


class Server:
    """Answers each request with its prompt and seed; loses the first `lost` of them."""

    def __init__(self, lost=0):
        self.lost, self.limits = lost, []

    def generate(self, prompts, max_tokens, generation_kwargs, **settings):
        if self.lost:
            self.lost -= 1
            raise ServerTrouble("gone")
        [prompt], seed = prompts, generation_kwargs["seed"]
        self.limits.append((prompt, max_tokens))
        ids = [*prompt, seed]
        tokens = [[token] for token in ids]
        return {"completion_ids": [ids], "logprobs": [[[-1.0]] * len(ids)], "logprob_token_ids": [tokens]}


@pytest.mark.parametrize("lost", [0, 1])
def test_rows_of_a_server_have_a_request_and_a_seed_each(lost, monkeypatch):
    found = made("server", vllm_client=Server(lost))
    waited = []
    monkeypatch.setattr(found, "reopen", waited.append)
    monkeypatch.setattr(found, "sync_weights", lambda: None)
    made_of = found.sample([[3], [4]], [4, 2], [Stream(7), Stream(8)])
    assert [(row.ids, row.logps) for row in made_of] == [([3, 7], [-1.0] * 2), ([4, 8], [-1.0] * 2)]
    assert sorted(found.vllm_client.limits[-2:]) == [([3], 4), ([4], 2)]  # the second may have been answered before
    assert len(waited) == lost
