"""How fast 1, 2 and 4 cards train, as the planner predicts it: simulated, nothing is measured.

    python benchmarks/ranks_simulated.py --out benchmarks/results/ranks_simulated.json

Each card has 32 rows of a step, so that more cards learn from more rows at once. Bus and NCCL
figures are those of planner/exchange_cost.py, where their sources stand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp

MODELS = {"BERT-Base": (12, 768), "BERT-Large": (24, 1024)}
CARDS = ("T4", "RTX 3060 12GB", "RTX 4090")
RANKS = (1, 2, 4)
ROWS, LONGEST, BATCH = 6988, 128, 32
SLOW_LINK = 4e9
"""Bytes a second, about what two RTX 3090 reached: NVIDIA/nccl#2366."""


def lengths() -> tuple[int, ...]:
    """Like hotel reviews: a mean of 85 tokens, a fifth of the rows cut at 128."""
    draw = random.Random(1)
    drawn = (round(draw.lognormvariate(4.4, 0.55)) for _ in range(ROWS))
    return tuple(min(max(8, one), LONGEST) for one in drawn)


def simulated(model: str, card_name: str, ranks: int, *, slow: bool = False) -> dict[str, Any]:
    """The fastest plan inside the whole card, for one of so many; `slow` is their link."""
    from transformers import BertConfig, TrainingArguments

    from memfit.memory.cards import find_card
    from memfit.planner.exchange_cost import BUS_SHARE, link_bytes_per_second
    from memfit.planner.search import make_plan
    from memfit.planner.this_machine import task_for
    from memfit.planner.workload import Workload
    from memfit.units import Budget

    layers, width = MODELS[model]
    config = BertConfig(
        vocab_size=21128, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, intermediate_size=4 * width,
    )  # fmt: skip
    args = TrainingArguments(
        "unused", per_device_train_batch_size=BATCH, report_to="none", use_cpu=True
    )
    card = find_card(card_name)
    if slow:
        card = dataclasses.replace(card, bus_bytes_per_second=SLOW_LINK / BUS_SHARE)
    workload = Workload(config=config, lengths=lengths(), args=args, ranks=ranks)
    planning = make_plan(task_for(workload, Budget(), card))
    price = planning.chosen.price
    assert price is not None
    cost = planning.pricer.exchange(price.candidate)
    return {
        "model": model,
        "card": card_name,
        "ranks": ranks,
        "step_seconds": price.step_seconds,
        "exchange_seconds": cost.seconds,
        "waited_seconds": cost.waited_seconds,
        "rows_per_second": workload.effective_rows / price.step_seconds,
        "device_bytes": price.device_bytes,
        "nccl_bytes": cost.nccl_bytes,
        "sent_bytes": cost.sent_bytes if ranks > 1 else 0,
        "link_bytes_per_second": link_bytes_per_second(card),
        "strategies": [repr(one) for one in planning.chosen.strategies],
    }


def main() -> int:
    """Writes a row for each model, card and number of cards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = []
    for model in MODELS:
        for card in CARDS:
            for ranks in RANKS:
                row = simulated(model, card, ranks)
                if ranks > 1:
                    slow = simulated(model, card, ranks, slow=True)
                    row["slow_link_rows_per_second"] = slow["rows_per_second"]
                rows.append(row)
                print(model, card, ranks, f"{row['rows_per_second']:.0f} rows a second")
    found = {"simulated": True, "machine": stamp(), "rows": rows}
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
