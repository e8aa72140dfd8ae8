"""The tables whole runs train on: reviews as given or made up, and other tasks made of them."""

from __future__ import annotations

import csv
import random
from pathlib import Path

PRAISE = "好棒佳优赞净舒适亲切满意喜欢美味方便"
BLAME = "差烂脏吵贵臭冷慢坏旧破骗难吃失望投诉"
TOPICS = ("room", "food", "staff", "price")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FIRST_CHARACTER = 0x4E00
MADE_CHARACTERS = 20_000


def read_reviews(table: Path) -> list[tuple[int, str]]:
    """Labels and texts of a CSV with the columns `label` and `review`, the classes mixed."""
    with table.open(encoding="utf-8", newline="") as file:
        found = [(int(row["label"]), row["review"]) for row in csv.DictReader(file)]
    reviews = [one for one in found if one[1]]
    random.Random(0).shuffle(reviews)
    return reviews


def make_reviews(rows: int, characters: int = MADE_CHARACTERS) -> list[tuple[int, str]]:
    """Texts as long as hotel reviews are (median 88 characters), of praise or of blame."""
    draw = random.Random(0)
    common = [chr(FIRST_CHARACTER + draw.randrange(characters)) for _ in range(500)]
    reviews = []
    for row in range(rows):
        length = max(4, min(1500, round(88 * draw.lognormvariate(0, 0.9))))
        telling = (BLAME, PRAISE)[row % 2]
        text = "".join(
            draw.choice(telling if draw.random() < 0.2 else common) for _ in range(length)
        )
        reviews.append((row % 2, text))
    return reviews


def make_vocabulary(characters: int = MADE_CHARACTERS) -> list[str]:
    """A token a character: of the made-up texts, and of Latin letters and digits."""
    latin = "abcdefghijklmnopqrstuvwxyz0123456789.,!?，。！？"
    made = (chr(FIRST_CHARACTER + number) for number in range(characters))
    return list(dict.fromkeys([*SPECIAL, *latin, *PRAISE, *BLAME, *made]))


def write_tables(reviews: list[tuple[int, str]], folder: Path) -> dict[str, Path]:
    """One CSV a task; all tell of the same texts."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    rows: dict[str, list[dict[str, object]]] = {
        "single": [],
        "multi": [],
        "regression": [],
        "pairs": [],
    }
    for label, text in reviews:
        other_label, other = draw.choice(reviews)
        topics = [name for name in TOPICS if draw.random() < 0.3] or [TOPICS[label]]
        score = round(1 + 3 * label + draw.random(), 2)
        rows["single"].append({"label": label, "review": text})
        rows["multi"].append({"topics": "|".join(topics), "review": text})
        rows["regression"].append({"score": score, "review": text})
        same = int(label == other_label)
        rows["pairs"].append({"same": same, "review": text, "other": other})
    tables = {}
    for task, lines in rows.items():
        tables[task] = folder / f"{task}.csv"
        with tables[task].open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    return tables
