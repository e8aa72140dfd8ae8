"""Runs many cases: `python -m differential --count 5000 --first 0`."""

from __future__ import annotations

import argparse
import sys
import time

from differential.cases import drawn
from differential.comparing import differences


def main() -> int:
    """The number of cases that differ, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    started, failed = time.perf_counter(), 0
    for seed in range(given.first, given.first + given.count):
        case = drawn(seed)
        began = time.perf_counter()
        found = differences(case)
        if found:
            failed += 1
            print(f"--- seed {seed} ({time.perf_counter() - began:.1f} s)")
            print("\n".join(f"#  {one}" for one in found))
            print(case.script(), flush=True)
    seconds = time.perf_counter() - started
    print(f"{given.count} cases in {seconds:.0f} s, {failed} with differences")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
