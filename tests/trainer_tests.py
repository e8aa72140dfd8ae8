"""transformers' own Trainer tests on BudgetTrainer: fails where one is lost that docs do not list.

python tests/trainer_tests.py FOLDER [-k EXPRESSION], with a folder that has the tests and a script
`run PYTHON`, which prints a line `file::class::test` for every test that only the Trainer passes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_DIFFERENCES = Path(__file__).parents[1] / "docs" / "differences.md"
_LOST = re.compile(r"^\w+::\w+::(\w+)$")
_LISTED = re.compile(r"`(test_\w+)`")


def main() -> int:
    """Run them; 1 where a test is lost that is no difference on purpose."""
    folder, *more = sys.argv[1:]
    listed = set(_LISTED.findall(_DIFFERENCES.read_text(encoding="utf-8")))
    command = [str(Path(folder).resolve() / "run"), sys.executable, *more]
    lost: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if found := _LOST.match(line.strip()):
                lost.append(found[1])
    unlisted = sorted(set(lost) - listed)
    if running.returncode not in (0, 1) or (running.returncode and not lost):
        print(f"the tests did not run: {command[0]} ended with {running.returncode}")
        return 2
    print(f"{len(lost)} lost, {len(lost) - len(unlisted)} of them on purpose ({_DIFFERENCES.name})")
    for name in unlisted:
        print(f"not on purpose: {name}")
    return int(bool(unlisted))


if __name__ == "__main__":
    sys.exit(main())
