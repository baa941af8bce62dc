"""Callbacks that could free memory run before a request fails (`Cache.on_low_memory`)."""

import pytest

from devalloc import DevallocError, OutOfMemory
from devalloc.cache import POLICIES
from tests.arena.support import MIB, cache


@pytest.mark.proves("torch/order-events")
@pytest.mark.parametrize("policy", POLICIES)
def test_holders_of_memory_are_asked(policy: str) -> None:
    engine, source = cache(policy, limit=20 * MIB)
    held = [engine.malloc(20 * MIB)]
    engine.on_low_memory(lambda: [engine.free(held.pop()) for _ in list(held)])
    assert engine.malloc(20 * MIB)
    assert len(source.asked) == 1
    with pytest.raises(OutOfMemory):
        engine.malloc(20 * MIB)
    engine.audit()


def test_holders_must_not_allocate_and_may_fail() -> None:
    engine, _ = cache()
    engine.on_low_memory(lambda: engine.malloc(MIB))
    for _ in range(2):
        with pytest.raises(DevallocError, match="must not allocate"):
            engine.malloc(30 * MIB)
        assert engine.stats()["allocation.all.current"] == 0


def test_holders_may_do_everything_else() -> None:
    engine, source = cache()
    pool = engine.private_pool()
    route = engine.route(pool, accepts=lambda stream: stream == 3)
    route.__enter__()
    closing = [lambda: route.__exit__(None, None, None), pool.release]

    def end_route() -> None:
        while closing:
            closing.pop(0)()
        engine.empty_cache()

    engine.on_low_memory(end_route)
    address = engine.malloc(30 * MIB, stream=3)
    engine.audit()
    engine.free(address)
    assert engine.empty_cache() == 30 * MIB, "it is not of the pool that is gone"
    assert not source.live
