"""The order of work when rollouts are sampled ahead of training: which weights sample which window, and when.

A window is one generation batch. v_t are the weights after t windows have been trained. With K windows ahead, window s
is sampled by v_max(f, s - K), where f is the first window of the run: window f + K is the last that v_f samples, and
each later one is sampled by weights that are K windows older than those that it begins to train.

At its beginning a window is taken, the weights v_s are published, and window s + K is submitted with them. So K
windows are being sampled while one trains, and they are taken in the order in which they were submitted. For K = 2:

    window s   published   submitted (by)     versions kept while s trains
       0         v_0         0, 1, 2 (v_0)      v_0
       1         v_1         3 (v_1)            v_0, v_1
       2         v_2         4 (v_2)            v_1, v_2
       3         v_3         5 (v_3)            v_2, v_3

No deadlock: a window is submitted before it is taken, with weights that are published before it is submitted, and
publishing waits for no later window. A version is forgotten as soon as no window that is left needs it, so there are
never more than K.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Orders:
    """The actions of one point, in this order.

    Attributes:
        forget: versions that no window needs any more.
        publish: the version to publish, or None.
        submit: windows to sample by that version.
    """

    forget: Sequence[int] = ()
    publish: int | None = None
    submit: Sequence[int] = ()


class Schedule:
    """Orders for each window: `before` it is taken, and `after`.

    Args:
        ahead: K, at least 1.
        windows: number of windows of the whole run, where known: none beyond is submitted.
        first: window that the run begins or resumes with.
        in_flight: windows from `first` on that a checkpoint holds, each with the version that samples it.
        published: versions that a checkpoint holds.
    """

    def __init__(
        self,
        ahead: int,
        windows: int,
        first: int = 0,
        in_flight: Mapping[int, int] | None = None,
        published: Collection[int] = (),
    ) -> None:
        self.ahead, self.windows = ahead, windows
        self._sampled_by = dict(in_flight or {})
        self._submitted = first + len(self._sampled_by)
        self._published = list(published)

    def version(self, window: int) -> int:
        """Return the version that samples a window that was submitted, and not yet taken."""
        return self._sampled_by[window]

    def before(self, window: int) -> Orders:
        """Return what has to happen before a window can be taken: nothing, but for the first of a run."""
        return Orders() if window < self._submitted else self._submit(window)

    def after(self, window: int) -> Orders:
        """Return what follows when a window has been taken."""
        self._sampled_by.pop(window, None)
        needed = set(self._sampled_by.values())
        old = [version for version in self._published if version not in needed]
        self._published = [version for version in self._published if version in needed]
        orders = self._submit(window)
        return Orders(old, orders.publish, orders.submit)

    def _submit(self, window: int) -> Orders:
        last = min(window + self.ahead, self.windows - 1)
        submit = range(self._submitted, last + 1)
        if not submit:
            return Orders()
        self._submitted = last + 1
        self._sampled_by |= dict.fromkeys(submit, window)
        self._published.append(window)
        return Orders((), window, submit)
