"""Sentences and tables of reviews that many tests share."""

from __future__ import annotations

from pathlib import Path

SENTENCES = (
    "服務人員都很親切",
    "服務人員都不親切",
    "房間很乾淨，床也很舒服，下次還會再來",
    "房間很髒，空調太吵，再也不會來了",
    "位置方便，早餐好吃，價格也不貴",
    "位置偏僻，早餐難吃，價格還很貴",
)

FEW_REVIEWS = "label,review\n" + "1,親切\n0,不親切\n" * 12


def write_short_reviews(path: Path, rows: int) -> Path:
    """So many, all different; every other one praises."""
    lines = (f"{row % 2},服務人員都{'不很'[row % 2]}親切 {row}\n" for row in range(rows))
    path.write_text("label,review\n" + "".join(lines), encoding="utf-8")
    return path
