"""The order of work when rollouts are sampled ahead of training: which weights sample which generation, and when.

v_t are the weights after t generations have been trained. With K generations ahead, generation s is sampled by
v_max(f, s - K), where f is the first generation of the run: generation f + K is the last that v_f samples, and each
later one is sampled by weights that are K generations older than those that it begins to train.

At its beginning a generation is taken, the weights v_s are published, and generation s + K is submitted with them. So
K generations are being sampled while one trains, and they are taken in the order in which they were submitted. For
K = 2:

    generation s   published   submitted (by)     versions kept while s trains
       0         v_0         0, 1, 2 (v_0)      v_0
       1         v_1         3 (v_1)            v_0, v_1
       2         v_2         4 (v_2)            v_1, v_2
       3         v_3         5 (v_3)            v_2, v_3

No deadlock: a generation is submitted before it is taken, with weights that are published before it is submitted, and
publishing waits for no later generation. A version is forgotten as soon as no generation that is left needs it, so
there are never more than K.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Orders:
    """The actions of one point, in this order.

    Attributes:
        forget: versions that no generation needs any more.
        publish: the version to publish, or None.
        submit: generations to sample by that version.
    """

    forget: Sequence[int] = ()
    publish: int | None = None
    submit: Sequence[int] = ()


class Schedule:
    """Orders for each generation: `before` it is taken, and `after`.

    Args:
        ahead: K, at least 1.
        generations: number of generations of the whole run, where known: none beyond is submitted.
        first: generation that the run begins or resumes with.
        in_flight: generations from `first` on that a checkpoint holds, each with the version that samples it.
        published: versions that a checkpoint holds.
    """

    def __init__(
        self,
        ahead: int,
        generations: int,
        first: int = 0,
        in_flight: Mapping[int, int] | None = None,
        published: Collection[int] = (),
    ) -> None:
        self.ahead, self.generations = ahead, generations
        self._sampled_by = dict(in_flight or {})
        self._submitted = first + len(self._sampled_by)
        self._published = list(published)

    def version(self, generation: int) -> int:
        """Return the version that samples a generation that was submitted, and not yet taken."""
        return self._sampled_by[generation]

    def before(self, generation: int) -> Orders:
        """Return what has to happen before a generation can be taken: nothing, but for the first of a run."""
        return Orders() if generation < self._submitted else self._submit(generation)

    def after(self, generation: int) -> Orders:
        """Return what follows when a generation has been taken."""
        self._sampled_by.pop(generation, None)
        needed = set(self._sampled_by.values())
        old = [version for version in self._published if version not in needed]
        self._published = [version for version in self._published if version in needed]
        orders = self._submit(generation)
        return Orders(old, orders.publish, orders.submit)

    def _submit(self, generation: int) -> Orders:
        last = min(generation + self.ahead, self.generations - 1)
        submit = range(self._submitted, last + 1)
        if not submit:
            return Orders()
        self._submitted = last + 1
        self._sampled_by |= dict.fromkeys(submit, generation)
        self._published.append(generation)
        return Orders((), generation, submit)
