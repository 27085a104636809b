"""The divergence from a teacher over the whole vocabulary, a block of positions at a time.

TRL's fused LM head is called with the outputs of a model's body and the head's weights. Those of the teacher are kept;
for the policy the divergence takes the place of log-probabilities, and passes through TRL's forward as they do.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from grpo_ext.objective.divergence import logit_gradient, pointwise
from grpo_ext.packing.lm_head import Form, add_product, blocks, chunks, head_function, head_of, log_softmax, within


class TeacherHead(NamedTuple):
    """A teacher's outputs at the labelled positions, and its LM head."""

    hidden: Float[Tensor, "positions hidden"]
    weight: Float[Tensor, "vocabulary hidden"]
    bias: Float[Tensor, " vocabulary"] | None
    softcap: float | None
    scale: float


class VocabularyDivergence(torch.autograd.Function):
    """sum_v f_v (`objective.divergence`) of softmax(cap(scale x W^T) / T) from the teacher's, chunk by chunk."""

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any,
        hidden: Float[Tensor, "positions hidden"],
        weight: Float[Tensor, "vocabulary hidden"],
        bias: Float[Tensor, " vocabulary"] | None,
        form: Form,
        teacher: TeacherHead,
        divergence: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Float[Tensor, " positions"]:
        ctx.form, ctx.teacher, ctx.divergence = form, teacher, divergence
        ctx.save_for_backward(hidden, weight, bias)
        values = torch.empty(len(hidden), dtype=form.exact, device=hidden.device)
        for rows, logits, of_teacher in _logits(hidden, weight, bias, form, teacher):
            for part in blocks(rows, logits):
                log_p, _ = log_softmax(logits, rows, part, form)
                log_q, _ = log_softmax(of_teacher, rows, part, _form_of(teacher, form))
                values[part] = divergence(log_p, log_q)[0].sum(dim=1)
        return values

    @staticmethod
    def backward(ctx: Any, grad_found: Tensor) -> Any:  # noqa: D102
        hidden, weight, bias = ctx.saved_tensors
        form = ctx.form
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=form.exact) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=form.exact) if ctx.needs_input_grad[2] else None
        for rows, logits, of_teacher in _logits(hidden, weight, bias, form, ctx.teacher):
            for part in blocks(rows, logits):
                log_p, slope = log_softmax(logits, rows, part, form)
                log_q, _ = log_softmax(of_teacher, rows, part, _form_of(ctx.teacher, form))
                grad = logit_gradient(log_p, ctx.divergence(log_p, log_q)[1]).mul_(grad_found[part, None])
                grad = (grad if slope is None else grad * slope).mul_(form.scale / form.temperature)
                if d_bias is not None:
                    d_bias += grad.sum(dim=0)
                logits[within(part, rows)] = grad
            d_hidden[rows] = (logits @ head_of(weight, bias, form.dtype)[0]).to(hidden.dtype)
            if d_weight is not None:
                add_product(d_weight, logits, hidden[rows].to(form.dtype))
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, form: Form, teacher: TeacherHead
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the logits of the policy and of the teacher, for a chunk of positions at a time."""
    own, others = head_of(weight, bias, form.dtype), head_of(teacher.weight, teacher.bias, form.dtype)
    for rows in chunks(hidden, weight, form.dtype):
        logits = nn.functional.linear(hidden[rows].to(form.dtype), *own)
        yield rows, logits, nn.functional.linear(teacher.hidden[rows].to(form.dtype), *others)


def _form_of(teacher: TeacherHead, form: Form) -> Form:
    return form._replace(softcap=teacher.softcap, scale=teacher.scale)


class _Call(NamedTuple):
    """The arguments of TRL's LM head."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    temperature: float
    chunk_size: int
    softcap: float | None = None
    scale: float = 1.0
    outputs: tuple[str, ...] = ()


def teacher_head(
    score: Callable[[], object],
    labelled: Bool[Tensor, "rows width"],
    counted: Bool[Tensor, "rows width"],
    *,
    stays: bool,
) -> TeacherHead:
    """Return what TRL's LM head is called with in a teacher's forward, at the `counted` ones of `labelled` tokens.

    `stays`: whether the head's weights are the teacher's also afterwards.
    """
    kept = list[TeacherHead]()

    def apply(*args: Any) -> tuple[Tensor, None, None, None, None]:
        call = _Call(*args)
        hidden = call.hidden.detach()[_places(call.hidden, labelled, counted)]
        weight, bias = (x if x is None or stays else x.detach().clone() for x in (call.weight, call.bias))
        kept.append(TeacherHead(hidden, cast(Tensor, weight), bias, call.softcap, call.scale))
        return call.hidden.new_zeros(len(call.hidden)), None, None, None, None

    with torch.no_grad(), head_function(apply):
        score()
    return kept[0]


def divergence_from(
    score: Callable[[], Tensor],
    labelled: Bool[Tensor, "rows width"],
    counted: Bool[Tensor, "rows width"],
    teacher: TeacherHead,
    *,
    beta: float,
    clip: float | None,
) -> Tensor:
    """Return `score()`, a forward by TRL, with the divergence from the teacher in place of log-probabilities."""

    def apply(*args: Any) -> tuple[Tensor, Tensor, None, None, None]:
        call = _Call(*args)
        places = _places(call.hidden, labelled, counted)
        form = Form.of(call.hidden, call.temperature, call.softcap, call.scale)
        divergence = partial(pointwise, beta=beta, clip=clip)
        values = VocabularyDivergence.apply(call.hidden[places], call.weight, call.bias, form, teacher, divergence)
        every = values.new_zeros(len(call.hidden)).index_copy(0, places, values)
        return every, every.detach(), None, None, None

    with head_function(apply):
        return score()


def _places(hidden: Tensor, labelled: Tensor, counted: Tensor) -> Tensor:
    """Return the numbers of the counted tokens' predictions among the positions that TRL's LM head computes.

    It computes those of labelled tokens only, or, without a kernel that selects them, all predictions of each row.
    """
    among, wanted = labelled[:, 1:].flatten(), counted[:, 1:].flatten()
    return (wanted[among] if len(hidden) == among.sum() else wanted).nonzero()[:, 0]
