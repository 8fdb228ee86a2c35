"""Unwinding on the signals that ask a process to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Signals:
    """Whether a signal to stop unwinds the block; it is ignored otherwise."""

    unwind: bool = True


@contextlib.contextmanager
def stoppable() -> Iterator[Signals]:
    """Let SIGTERM and SIGHUP unwind the block as Ctrl-C does. Only once: a second one must not stop the cleaning up."""
    signals = Signals()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if signals.unwind:
            signals.unwind = False
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere signals are the caller's business
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: handler for number in STOP if (handler := signal.getsignal(number)) in usual}
    try:
        for number in before:
            signal.signal(number, stop)
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
