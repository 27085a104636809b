"""The policy is scored over the tokens that the sampler kept: exact expectations on a model that can be enumerated."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers import TopPLogitsWarper as TopP

from grpo_ext.packing import lm_head
from grpo_ext.packing.lm_head import LabelledLogProbs
from grpo_ext.packing.micro_batches import active_mask, regroup
from grpo_ext.packing.sampling_support import SUPPORTS, SamplingSupport, encoded
from grpo_ext.rollout.support_log import SupportLog
from support import tiny
from support.float64 import float64_throughout
from support.trainers import build

VOCABULARY, LENGTH, TEMPERATURE = 5, 3, 0.8
WARPERS = {
    "top_p": [TopP(0.6)],
    "top_k": [TopKLogitsWarper(2)],
    "min_p": [MinPLogitsWarper(0.3)],
    "all": [TopKLogitsWarper(4), TopP(0.8), MinPLogitsWarper(0.2)],
}


def small(seed):
    return tiny.model(seed, torch.float64, vocab_size=VOCABULARY, tie_word_embeddings=True)


def logits_of(model, ids):
    return model(input_ids=ids).logits[:, -LENGTH - 1 : -1] / TEMPERATURE


def enumerated(sampler, name):
    """All completions that the sampler may write: ids, their probability, and the sets that they were drawn from."""
    ids = torch.tensor([[3, 4, 2, *row] for row in itertools.product(range(VOCABULARY), repeat=LENGTH)])
    processors = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), *WARPERS[name]])
    with torch.no_grad():
        logits = logits_of(sampler, ids) * TEMPERATURE
    log, steps = SupportLog(len(ids)), []
    for t in range(LENGTH):
        scores = processors(ids[:, : 3 + t], logits[:, t])
        log.add(scores)
        steps.append(scores.log_softmax(dim=-1).gather(1, ids[:, 3 + t, None])[:, 0])
    drawn = torch.stack(steps, dim=1)
    active = drawn.sum(dim=1).exp() > 0
    sets = log.sets([[0] * LENGTH] * len(ids))
    return ids[active], drawn[active], [row for row, kept in zip(sets, active, strict=True) if kept]


def directly(model, ids, sets):
    """log pi_S by the model's own logits, without any code of scoring."""
    logits = logits_of(model, ids)
    left_out = SamplingSupport.of(sets, LENGTH, ids.device).left_out(slice(None), VOCABULARY).view(logits.shape)
    return logits.masked_fill(left_out, -torch.inf).log_softmax(dim=-1).gather(2, ids[:, -LENGTH:, None])[..., 0]


@pytest.fixture
def score(tmp_path):
    """The trainer's own scoring of a model in float64."""

    def scorer(model, sharing):
        trainer = build(model, tmp_path, temperature=TEMPERATURE, shared_prefix=sharing)

        def scored(ids, sets, **options):
            further = {} if sets is None else {SUPPORTS: sets}
            return trainer._scorer.tokens(model, ids, torch.ones_like(ids), LENGTH, **options, **further)

        return scored

    with float64_throughout():
        yield scorer


@pytest.mark.cases(5)
@pytest.mark.parametrize("sharing", ["true", "false"])
@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)], ids=["the policy itself", "another sampler"])
@pytest.mark.parametrize("name", WARPERS)
def test_the_corrected_gradient_is_the_true_one_in_expectation(name, seeds, sharing, score):
    """Also where the sampler is another model: sum_y mu(y) (pi_S / mu)(y) R(y) grad log pi_S(y) is grad E_pi_S[R]."""
    sampler, policy = (small(seed) for seed in seeds)
    ids, drawn, sets = enumerated(sampler, name)
    reward = torch.randn(len(ids), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    parameters = list(policy.parameters())
    true = torch.autograd.grad((directly(policy, ids, sets).sum(dim=1).exp() * reward).sum(), parameters)
    logps = score(policy, sharing)(ids, sets)[0]
    weight = drawn.sum(dim=1).exp() * (logps - drawn).sum(dim=1).exp().detach()
    found = torch.autograd.grad((weight[:, None] * logps * reward[:, None]).sum(), parameters)
    flat, expected = (torch.cat([g.flatten() for g in grads]) for grads in (found, true))
    assert (flat - expected).abs().max() < 1e-12
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)], ids=["the policy itself", "another sampler"])
@pytest.mark.parametrize("name", WARPERS)
def test_the_mean_ratio_is_one_where_the_whole_vocabulary_reads_the_kept_mass(name, seeds, score):
    sampler, policy = (small(seed) for seed in seeds)
    ids, drawn, sets = enumerated(sampler, name)
    scored, probability = score(policy, "false"), drawn.sum(dim=1).exp()
    with torch.no_grad():
        kept, whole = (scored(ids, given)[0] for given in (sets, None))
        first = ids[:, 3].unique()
        mass = logits_of(policy, ids)[0, 0].softmax(dim=-1)[first].sum()
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    for ratio, expected in ((kept - drawn, 1.0), (whole - drawn, mass)):
        assert (probability * ratio[:, 0].exp()).sum().item() == pytest.approx(float(expected), abs=1e-12)
    assert (probability * (kept - drawn).sum(dim=1).exp()).sum().item() == pytest.approx(1, abs=1e-12)
    assert mass < 0.95


def test_scores_do_not_depend_on_the_split_of_a_batch(score):
    ids, _, sets = enumerated(small(1), "top_p")
    policy = small(2)
    entropies = {}
    for sharing in ("true", "false"):
        scored = score(policy, sharing)
        whole, entropies[sharing], _ = scored(ids, sets, compute_entropy=True)
        torch.testing.assert_close(whole, directly(policy, ids, sets), atol=1e-12, rtol=0)
        for size in (1, 2, 5):
            torch.testing.assert_close(scored(ids, sets, batch_size=size)[0], whole, atol=1e-12, rtol=0)
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        mixed = scored(ids[order], [sets[i] for i in order])[0]
        torch.testing.assert_close(mixed, whole[order], atol=1e-12, rtol=0)
    torch.testing.assert_close(*entropies.values(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.5}], ids=["plain", "softcap", "scale"])
@pytest.mark.parametrize("chunk", [2**28, 160], ids=["one chunk", "many"])
def test_the_lm_head_over_a_set_has_the_values_and_gradients_of_a_masked_softmax(chunk, options, monkeypatch):
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(lm_head, "CPU_BLOCK", 15)  # two rows
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 7))
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    kept = torch.rand(6, 7) < 0.5
    labels = torch.arange(6)
    kept[torch.arange(6), labels] = True
    sets = [encoded(kept.sum(1), kept.nonzero()[:, 1])]
    softcap, scale = options.get("softcap"), options.get("scale", 1.0)
    found = LabelledLogProbs.apply(
        *(hidden, weight, bias, labels, 0.7, 32768, softcap, scale, ("log_probs", "entropy")),
        SamplingSupport.of(sets, 6, hidden.device),
    )[:2]
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / 0.7).masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(dim=-1)
    expected = log_p[torch.arange(6), labels], entropy
    for value, direct in zip(found, expected, strict=True):
        torch.testing.assert_close(value, direct, atol=1e-12, rtol=0)
        grads = (torch.autograd.grad(x.sum(), (hidden, weight, bias), retain_graph=True) for x in (value, direct))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_the_smaller_of_a_set_and_its_complement_is_stored():
    scores = torch.zeros(2, 10)
    scores[0, [1, 2, 3]] = scores[1, :8] = -torch.inf
    log = SupportLog(2)
    log.add(scores)
    sets = log.sets([[0], [0]])
    assert [row.tolist() for row in sets] == [[1, -3, 1, 2, 3], [1, 2, 8, 9]]
    left_out = SamplingSupport.of(sets, 2, scores.device).left_out(slice(None), 10)
    assert torch.equal(left_out[[0, 2]], scores == -torch.inf)
    assert not left_out[[1, 3]].any()  # padding keeps everything


def test_sets_stay_with_their_rows_when_groups_are_put_together():
    lengths, prompts = [3, 1, 2, 3], [7, 8, 7, 8]
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    batch = {
        "prompt_ids": torch.tensor(prompts)[:, None],
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.tensor(lengths)[:, None].expand(4, 3),
        "completion_mask": mask.long(),
        "advantages": torch.ones(4),
        SUPPORTS: [encoded(torch.ones(n), torch.full((n,), row)) for row, n in enumerate(lengths)],
    }
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    for part in regroup(halves, 2):
        assert [int(sets[0]) for sets in part[SUPPORTS]] == active_mask(part).sum(dim=1).tolist()
        assert [int(sets[0]) for sets in part[SUPPORTS]] == part["completion_ids"][:, 0].tolist()
