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
"""Seconds until the exception is raised again in a thread that has swallowed it."""


def in_main_thread() -> bool:
    """Return whether math-verify's own time limit works."""
    return threading.current_thread() is threading.main_thread()


def limited(function: Callable[[int | None], T], otherwise: T) -> T:
    """Return the result of `function` if it takes at most `SECONDS`, else `otherwise`.

    `function` gets the limit to pass to math-verify: `SECONDS`, or None where this function enforces it.
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
    """Return the result of `function`; raise `error` in it after `seconds`, repeatedly until it ends.

    The exception may arrive at any bytecode. The limit is therefore ended by a lock or a list of C, never by a
    `threading` object of Python, which could stay locked.
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
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that is set but not yet raised
