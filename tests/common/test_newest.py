from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from toolbus.common.newest import NewestCache, NewestCacheBySize


def test_the_oldest_entry_is_evicted_and_setting_a_key_makes_it_the_newest() -> None:
    cache = NewestCache[str, int](2)
    cache["a"], cache["b"], cache["a"], cache["c"] = 1, 2, 3, 4
    assert cache == {"a": 3, "c": 4}


def test_entries_are_evicted_until_their_sizes_fit() -> None:
    cache = NewestCacheBySize[str, str](10, 5, len)
    cache["a"], cache["b"], cache["c"] = "xx", "xx", "xx"
    assert (list(cache), cache.size) == (["b", "c"], 4)
    cache["b"] = "xxx"
    assert (list(cache), cache.size) == (["c", "b"], 5)
    cache.pop("c")
    cache.pop("unknown", None)
    assert cache.size == 3
    del cache["b"]
    assert cache.size == 0


def test_the_newest_entry_stays_whatever_its_size() -> None:
    cache = NewestCacheBySize[str, str](10, 5, len)
    cache["a"], cache["b"] = "x", "x" * 100
    assert (list(cache), cache.size) == (["b"], 100)


def test_the_limit_of_entries_also_holds_for_a_cache_by_size() -> None:
    cache = NewestCacheBySize[int, str](2, 100, len)
    for number in range(5):
        cache[number] = "x"
    assert (list(cache), cache.size) == ([3, 4], 2)


def test_threads_that_set_and_evict_at_once_leave_a_cache_within_its_limit() -> None:
    cache, before = NewestCache[int, int](4), sys.getswitchinterval()

    def fill(thread: int) -> None:
        for number in range(20_000):
            cache[thread * 1_000_000 + number] = number

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for filled in [threads.submit(fill, thread) for thread in range(4)]:
                filled.result()
    finally:
        sys.setswitchinterval(before)
    assert 0 < len(cache) <= 4
