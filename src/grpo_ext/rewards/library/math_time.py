"""Time limits on math-verify in every thread; its own work in the main thread only, by an alarm signal."""

import _thread
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SECONDS = 5
_AGAIN_SECONDS = 1.0
"""Until the exception is raised again in a thread that has swallowed it."""


def in_main_thread() -> bool:
    """Whether math-verify's own time limit works."""
    return threading.current_thread() is threading.main_thread()


def limited(function: Callable[[int | None], T], otherwise: T) -> T:
    """What `function` returns within `SECONDS`, else `otherwise`.

    `function` gets the limit that it is to hand to math-verify: `SECONDS`, or None where the limit is set from here.
    """
    from math_verify.errors import TimeoutException

    try:
        if in_main_thread():
            return function(SECONDS)
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)  # it warns of the missing limit
        return raising(TimeoutException, SECONDS, lambda: function(None))
    except TimeoutException:
        return otherwise


def raising(error: type[BaseException], seconds: float, function: Callable[[], T]) -> T:
    """What `function` returns; once `seconds` have passed `error` is raised in it, and again while it goes on.

    The exception may arrive at any bytecode, so whatever ends the limit is a lock or a list of C, never a `threading`
    object of Python, which would stay locked.
    """
    thread = ctypes.c_ulong(_thread.get_ident())
    running, guard, over = _thread.allocate_lock(), _thread.allocate_lock(), list[bool]()
    running.acquire()

    def ring() -> None:
        wait = seconds
        while not running.acquire(timeout=wait):
            with guard:
                if over:
                    return
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))
            wait = _AGAIN_SECONDS

    try:
        _thread.start_new_thread(ring, ())
        return function()
    finally:
        while not over:
            try:
                with guard:
                    over.append(True)
            except error:
                continue
        running.release()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # what has been set and not yet been raised
