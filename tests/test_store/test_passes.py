"""Passes over shards: results in order, a few ahead, and an end at the first error."""

import threading

import pytest

from bigscl.store.threads import in_order


def test_results_come_in_order_whatever_finishes_first():
    second_done = threading.Event()

    def work(item):
        if item == 0:
            assert second_done.wait(20), "item 1 was not worked on at the same time as item 0"
        if item == 1:
            second_done.set()
        return item * item

    assert list(in_order(work, range(20), threads=2)) == [n * n for n in range(20)]


def test_no_more_than_a_few_results_exist_ahead_of_the_caller():
    started = []

    def work(item):
        started.append(item)
        return item

    results = in_order(work, range(100), threads=3)
    for taken, _ in enumerate(results):
        assert len(started) <= taken + 2 * 3


def test_the_first_error_ends_the_pass_in_its_place():
    started, seen = [], []

    def work(item):
        started.append(item)
        if item >= 7:
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match="item 7"):
        seen.extend(in_order(work, range(1000), threads=2))
    assert seen == list(range(7))
    assert len(started) < 20


def test_a_caller_that_stops_early_leaves_no_thread_behind():
    results = in_order(lambda item: item, range(1000), threads=2)
    assert next(results) == 0
    results.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("pass")]
