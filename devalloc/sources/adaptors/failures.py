"""Adaptors for running out of memory: wait, call a callback that frees, or simulate a failure.

They treat `OutOfMemory` only; every other error passes through.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection

from devalloc.common.arguments import require_callable
from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size, quote, require_count, require_fraction
from devalloc.sources.adaptors.adaptor import Adaptor
from devalloc.sources.source import Source, require_request

_MAX_SECONDS = 1e9
"""Well below the longest wait of a lock."""


class RetryAdaptor(Adaptor):
    """Waits for another thread to free memory before it fails (as Paddle's retry allocator).

    A request that failed is tried again after every free that passes through this adaptor, until
    ``seconds`` have gone by. Waiting threads hold no lock. Do not allocate while holding a lock
    that the freeing threads need.

    Parameters
    ----------
    inner : Source
    seconds : float
        How long one request may wait, up to 1e9.
    clock : callable
        Gives the time in seconds, never decreasing.

    Raises
    ------
    InvalidArgument
        For ``seconds`` that are not a number from 0 to 1e9, or a ``clock`` that cannot be called.
    OutOfMemory
        From `allocate`, when the time is over; its cause is the source's last failure.
    """

    def __init__(
        self, inner: Source, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        require_fraction("seconds", seconds, _MAX_SECONDS)
        require_callable("clock is a function that gives seconds", clock)
        self.seconds = seconds
        self._clock = clock
        self._frees = 0
        self._freed = threading.Condition()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        deadline: float | None = None
        attempts = 0
        while True:
            # Read before trying, so that a free between the failure and the wait is not missed.
            before = self._frees
            try:
                return super().allocate(nbytes, stream)
            except OutOfMemory as error:
                attempts += 1
                if deadline is None:
                    deadline = self._clock() + self.seconds
                if not self._wait_for_free(before, deadline):
                    raise OutOfMemory(
                        f"allocate of {format_size(nbytes)} failed {attempts} times in "
                        f"{self.seconds:g} s, with no free in time to help: {error}"
                    ) from error

    def _wait_for_free(self, before: int, deadline: float) -> bool:
        left = deadline - self._clock()
        with self._freed:
            return left > 0 and self._freed.wait_for(lambda: self._frees != before, left)

    def free(self, address: int, nbytes: int, stream: int | None = None) -> None:
        super().free(address, nbytes, stream)
        with self._freed:
            self._frees += 1
            self._freed.notify_all()


class FailureCallbackAdaptor(Adaptor):
    """Calls a callback that may free memory, and tries again while it returns true (as RMM's).

    Parameters
    ----------
    inner : Source
    callback : callable
        Called with the number of requested bytes. If it returns true, the request is tried again;
        if false, the source's error is raised. It may allocate and free; what it raises reaches
        the caller. It runs on the allocating thread, on several at once if several fail. In the
        source of an arena it runs under the lock of its cache, where it can allocate nothing from
        that arena; use `devalloc.cache.Cache.on_low_memory` there.

    Raises
    ------
    InvalidArgument
        For a ``callback`` that cannot be called.
    """

    def __init__(self, inner: Source, callback: Callable[[int], bool]) -> None:
        super().__init__(inner)
        require_callable("callback is a function of a number of bytes", callback)
        self.callback = callback

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        while True:
            try:
                return super().allocate(nbytes, stream)
            except OutOfMemory:
                if not self.callback(nbytes):
                    raise


class FaultAdaptor(Adaptor):
    """Fails some allocations on purpose, the same ones in every run; for tests.

    Parameters
    ----------
    inner : Source
    probability : float
        Probability that a call fails, from 0 to 1, for each call independently.
    seed : int
        0 or more. Two adaptors with the same seed and probability fail the same calls.
    calls : collection of int
        Numbers of calls that always fail; the first call is number 1.

    Raises
    ------
    InvalidArgument
        For options that are not such numbers.
    """

    def __init__(
        self, inner: Source, probability: float = 0.0, seed: int = 0, calls: Collection[int] = ()
    ) -> None:
        super().__init__(inner)
        require_fraction("probability", probability, 1.0)
        require_count("seed", seed, 0)
        if not isinstance(calls, Collection):
            raise InvalidArgument(f"calls must be a collection of ints, not {quote(calls)}")
        for call in calls:
            require_count("each of calls", call, 1)
        self.probability = probability
        self.seed = seed
        self.calls = frozenset(calls)
        self.attempts = 0
        """Calls of `allocate` so far, failed ones included, impossible requests not."""
        self.injected = 0
        """Failures so far."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        require_request("FaultAdaptor", nbytes)
        with self._lock:
            self.attempts += 1
            number = self.attempts
            drawn = self._random.random() < self.probability
            fails = drawn or number in self.calls
            if fails:
                self.injected += 1
        if fails:
            raise OutOfMemory(
                f"allocate of {format_size(nbytes)} failed: injected at call {number} "
                f"(seed {self.seed}, probability {self.probability:g})"
            )
        return super().allocate(nbytes, stream)
