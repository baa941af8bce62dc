"""Adaptors for when there is no memory: wait for some, ask somebody to free some, or pretend.

`OutOfMemory` is the failure they treat; every other error passes through.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection

from devalloc.errors import InvalidArgument, OutOfMemory
from devalloc.sizes import format_size
from devalloc.sources.adaptors.base import Adaptor
from devalloc.sources.base import Source


class RetryAdaptor(Adaptor):
    """Waits for a free by another thread before it gives up (after Paddle's retry allocator).

    A request that fails is tried again after every free that passes through this adaptor, until
    ``seconds`` have gone by. Threads that wait hold no lock. Do not use it below a lock that the
    freeing threads need.

    Parameters
    ----------
    inner : Source
    seconds : float
        How long one request may wait.
    clock : callable
        Seconds, never decreasing.

    Raises
    ------
    OutOfMemory
        From `allocate`, after the time; its cause is the last failure of the source.
    """

    def __init__(
        self, inner: Source, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        if not seconds >= 0:
            raise InvalidArgument(f"a time to wait is 0 seconds or more, not {seconds}")
        self.seconds = seconds
        self._clock = clock
        self._frees = 0
        self._freed = threading.Condition()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
        deadline: float | None = None
        attempts = 0
        while True:
            # Before trying, so that a free between the failure and the wait is not missed.
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
    """Calls somebody who may free memory, and tries again while that helps (after RMM).

    Parameters
    ----------
    inner : Source
    callback : callable
        Gets the number of bytes that were not there. True: try again; false: give up, and the
        source's error is raised. It may allocate and free; what it raises reaches the caller. It
        is called by the allocating thread, by several at a time if several fail.
    """

    def __init__(self, inner: Source, callback: Callable[[int], bool]) -> None:
        super().__init__(inner)
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
        Of failure, for each call by itself; 0 to 1.
    seed : int
        Two adaptors with one seed fail the same calls.
    calls : collection of int
        These calls fail in any case; the first call is number 1.
    """

    def __init__(
        self, inner: Source, probability: float = 0.0, seed: int = 0, calls: Collection[int] = ()
    ) -> None:
        super().__init__(inner)
        if not 0 <= probability <= 1:
            raise InvalidArgument(f"a probability lies between 0 and 1, not at {probability}")
        self.probability = probability
        self.seed = seed
        self.calls = frozenset(calls)
        self.attempts = 0
        """Calls of `allocate` so far, failed ones included."""
        self.injected = 0
        """Failures so far."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()

    def allocate(self, nbytes: int, stream: int | None = None) -> int:
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
