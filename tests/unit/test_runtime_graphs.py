"""Which token bucket a batch is filled up to; the graphs themselves need a GPU."""

from collections import Counter

from memfit.runtime.graphs import TokenBuckets

BUCKETS = TokenBuckets(256)


def test_a_bucket_is_the_next_multiple():
    assert [BUCKETS.fit(tokens) for tokens in (1, 256, 257, 2700)] == [256, 256, 512, 2816]


def test_a_size_seen_for_the_first_time_borrows_the_next_larger_graph():
    seen: Counter[int] = Counter()
    assert BUCKETS.choose(900, {2816, 3072}, seen) == 2816
    assert BUCKETS.choose(900, {2816, 3072}, seen) == 1024  # it came again: worth its own


def test_a_size_beyond_all_graphs_gets_its_own_at_once():
    assert BUCKETS.choose(3000, {2816}, Counter()) == 3072


def test_a_captured_size_is_used():
    assert BUCKETS.choose(2700, {2816, 3072}, Counter()) == 2816


def test_the_largest_batch_there_can_be_is_captured_first():
    buckets = TokenBuckets(256, largest=4000)
    assert buckets.choose(900, set(), Counter()) == 4096
    assert buckets.choose(900, {4096}, Counter({1024: 1})) == 1024
