"""A few sentences in two languages that many tests share."""

from __future__ import annotations

SENTENCES = (
    "服務人員都很親切",
    "服務人員都不親切",
    "房間很乾淨，床也很舒服，下次還會再來",
    "房間很髒，空調太吵，再也不會來了",
    "位置方便，早餐好吃，價格也不貴",
    "位置偏僻，早餐難吃，價格還很貴",
)
