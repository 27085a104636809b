"""Attention over packed groups: every implementation gives the values and gradients of the whole matrix of scores.

torch's flash kernel for CUDA has no CPU form. Here one stands in that keeps to its contract (sequences by bounds, a
log-sum-exp of [heads, tokens], a backward from any output and log-sum-exp), so that what is built on it is tested;
whether the kernel of a GPU keeps to it is what `flash_is_exact` asks on that GPU.
"""

import logging
from itertools import pairwise

import pytest
import torch

from grpo_ext.packing import flash as prefix_flash
from grpo_ext.packing.attention import attention
from grpo_ext.packing.flash import EXAMPLE, FlashAttention, flash_is_exact
from grpo_ext.packing.kernels import Run, Segments, by_sdpa
from grpo_ext.packing.merged import MergedAttention, calls_of

TWO_PROMPTS = Segments(
    (Run(0, 1, 5), Run(5, 1, 3), Run(8, 2, 4, (0, 5)), Run(16, 1, 6, (0, 5)), Run(22, 2, 2, (5, 8)), Run(26, 2, 3))
)
LAYOUTS = {
    "one prompt": Segments((Run(0, 1, 5), Run(5, 2, 3, (0, 5)), Run(11, 1, 4, (0, 5)))),
    "two prompts and a row of its own": TWO_PROMPTS,
    "nothing shared": Segments((Run(0, 2, 4), Run(8, 1, 1))),
    "a tree": Segments(
        (
            Run(0, 1, 4),
            Run(4, 2, 2, (0, 4)),
            Run(8, 1, 3, (0, 4)),
            Run(11, 2, 2, (8, 11)),
            Run(15, 1, 3, (8, 11)),
            Run(18, 1, 2, (15, 18)),
            Run(20, 1, 1, (0, 4)),
            Run(21, 1, 3),
            Run(24, 1, 2, (21, 24)),
        )
    ),
}


def merged(query, key, value, segments, scale, window=None, softcap=None, sinks=None):
    assert softcap is None
    return MergedAttention.apply(query, key, value, calls_of(segments, window), scale, sinks)


IMPLEMENTATIONS = {"cpu": merged, "cuda": FlashAttention.apply, "sdpa": by_sdpa}


def path(segments, i):
    """The tokens that token i follows, and itself, from the definition."""
    for run in segments.runs:
        if run.start <= i < run.stop:
            own = [*range(i - (i - run.start) % run.length, i + 1)]
            return own if run.prefix is None else path(segments, run.prefix[1] - 1) + own
    raise AssertionError(i)


def dense(query, key, value, segments, scale, window=None, softcap=None, sinks=None, chunk=None):
    tokens, repeats = query.shape[2], query.shape[1] // key.shape[1]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i in range(tokens):
        own = path(segments, i)
        seen[i, own[-(window or 0) :] if chunk is None else own[(len(own) - 1) // chunk * chunk :]] = True
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, tokens, 1)], dim=-1)
    return (scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2)


def results(function, key_heads, segments, *, sinks=False, **options):
    g = torch.Generator().manual_seed(0)
    tokens = segments.runs[-1].stop
    leaves = [torch.randn(1, h, tokens, 8, generator=g, dtype=torch.float64) for h in (4, key_heads, key_heads)]
    leaves += [torch.randn(4, generator=g, dtype=torch.float64)] if sinks else []
    weight = torch.randn(1, tokens, 4, 8, generator=g, dtype=torch.float64)
    for x in leaves:
        x.requires_grad_()
    further = options | {"sinks": leaves[3] if sinks else None}
    out = function(*leaves[:3], segments, 0.3, **{name: x for name, x in further.items() if x is not None})
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.fixture
def flash_kernel():
    """torch's CUDA kernel by its contract, on a CPU."""

    def sequences(bounds_q, bounds_k, longest_q, longest_k):
        for bounds, longest in ((bounds_q, longest_q), (bounds_k, longest_k)):
            assert (bounds.dtype, bounds[0], bounds.diff().max()) == (torch.int32, 0, longest)
        spans = ([slice(a, b) for a, b in pairwise(x)] for x in (bounds_q.tolist(), bounds_k.tolist()))
        return list(zip(*spans, strict=True))

    def scores(q, k, causal, scale):
        found = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
        return found.masked_fill(torch.ones(found.shape[1:]).triu(1).bool(), -torch.inf) if causal else found

    def forward(q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, debug, *, scale, **_):
        assert (dropout, debug, bounds_q[-1], bounds_k[-1]) == (0.0, False, len(q), len(k))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for asking, answering in sequences(bounds_q, bounds_k, longest_q, longest_k):
            s = scores(q[asking], k[answering], causal, scale)
            repeated = v[answering].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            out[asking] = torch.einsum("hij,jhd->ihd", s.softmax(-1), repeated)
            lse[:, asking] = s.logsumexp(-1)
        return out, lse, torch.zeros(2, dtype=torch.uint64), q.new_empty(0), q.new_empty(0)

    def backward(
        grad, q, k, v, out, lse, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, state, _, *, scale, **__
    ):
        assert (dropout, state.dtype, lse.is_contiguous(), grad.stride(-1)) == (0.0, torch.uint64, True, 1)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        repeats = q.shape[1] // k.shape[1]
        for asking, answering in sequences(bounds_q, bounds_k, longest_q, longest_k):
            p = (scores(q[asking], k[answering], causal, scale) - lse[:, asking, None]).exp()
            keys, values = (x[answering].repeat_interleave(repeats, dim=1) for x in (k, v))
            share = (grad[asking] * out[asking]).sum(-1).T[..., None]
            ds = p * (torch.einsum("ihd,jhd->hij", grad[asking], values) - share) * scale
            dq[asking] = torch.einsum("hij,jhd->ihd", ds, keys)
            dk[answering] = torch.einsum("hij,ihd->jhd", ds, q[asking]).unflatten(1, (-1, repeats)).sum(2)
            dv[answering] = torch.einsum("hij,ihd->jhd", p, grad[asking]).unflatten(1, (-1, repeats)).sum(2)
        return dq, dk, dv

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    flash_is_exact.cache_clear()
    yield
    library._destroy()
    flash_is_exact.cache_clear()


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_and_gradients(name, layout, key_heads, flash_kernel):
    expected = results(dense, key_heads, LAYOUTS[layout])
    for ours, theirs in zip(results(IMPLEMENTATIONS[name], key_heads, LAYOUTS[layout]), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


PLAIN, SINKS = {}, {"sinks": True}
CAPPED = {"softcap": 0.7}  # torch's kernel for a CPU cannot


@pytest.mark.parametrize(
    ("name", "further"),
    [("cpu", PLAIN), ("cpu", SINKS), ("sdpa", PLAIN), ("sdpa", SINKS), ("sdpa", CAPPED), ("sdpa", CAPPED | SINKS)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 7])
def test_windows_capped_scores_and_sinks(name, window, further, monkeypatch):
    """A window counts back along a token's path, past its siblings; blocks of queries are as short as they can be."""
    monkeypatch.setattr("grpo_ext.packing.kernels.BLOCK", 2)
    calls_of.cache_clear()
    for segments in LAYOUTS.values():
        expected = results(dense, 2, segments, window=window, **further)
        found = results(IMPLEMENTATIONS[name], 2, segments, window=window, **further)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-12
    calls_of.cache_clear()


@pytest.mark.parametrize("further", [PLAIN, SINKS, CAPPED], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 100])
def test_a_chunk_begins_at_a_multiple_of_its_size_along_the_path(chunk, further):
    for segments in LAYOUTS.values():
        expected = results(dense, 2, segments, chunk=chunk, **further)
        for ours, theirs in zip(results(by_sdpa, 2, segments, chunk=chunk, **further), expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-12


def test_a_window_over_more_tokens_than_the_kernel_takes_at_a_time():
    segments = Segments((Run(0, 1, 700), Run(700, 2, 60, (0, 700)), Run(820, 1, 300, (0, 700))))
    for window in (150, 640):
        expected = results(dense, 2, segments, window=window, sinks=True)
        for ours, theirs in zip(results(merged, 2, segments, window=window, sinks=True), expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-12


def test_a_window_bounds_what_is_computed():
    """A prompt of 4,096 tokens and eight completions over a window of 256."""
    segments = Segments((Run(0, 1, 4096), Run(4096, 8, 128, (0, 4096))))
    inner, outer = calls_of(segments, 256)
    scores = [call.asking[1] * call.asking[2] * call.answering[2] for call in (*inner, *outer)]
    assert sum(scores) < 2.1 * 256 * segments.runs[-1].stop


def test_the_attention_that_transformers_calls():
    def ours(query, key, value, segments, scale):
        return attention(torch.nn.Identity(), query, key, value, None, scale, grpo_ext_segments=segments)[0]

    segments = TWO_PROMPTS
    for found, expected in zip(results(ours, 2, segments), results(dense, 2, segments), strict=True):
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_flash_kernel_is_used_where_it_is_exact(flash_kernel, dtype):
    assert flash_is_exact(torch.device("cpu"), dtype, 64)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_a_flash_kernel_is_not_used_where_it_is_off(flash_kernel, fault, monkeypatch, caplog):
    function = getattr(prefix_flash, f"flash_{fault}")

    def off(*arguments):
        first, *others = function(*arguments)
        return first * 1.03, *others

    monkeypatch.setattr(prefix_flash, f"flash_{fault}", off)
    with caplog.at_level(logging.INFO, "grpo_ext.packing.flash"):
        assert not flash_is_exact(torch.device("cpu"), torch.bfloat16, 64)
    assert "SDPA instead of flash attention on cpu in torch.bfloat16: it is off by 0.03" in caplog.text


def test_a_device_without_a_flash_kernel_says_so(caplog):
    flash_is_exact.cache_clear()
    with caplog.at_level(logging.INFO, "grpo_ext.packing.flash"):
        assert not flash_is_exact(torch.device("cpu"), torch.float32, 16)
    assert "SDPA instead of flash attention on cpu in torch.float32: " in caplog.text


def test_the_flash_kernel_takes_what_it_is_given():
    """Its own shape functions, of the torch that is installed."""
    query, key, value = (
        torch.empty(1, heads, 509, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    out = FlashAttention.apply(query, key, value, EXAMPLE, 0.1)
    assert (out.shape, out.dtype) == ((1, 509, 4, 64), torch.bfloat16)
    out.sum().backward()
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]
