"""Random trainings by the stock Trainer and by BudgetTrainer, which must not differ.

    cases.py       what a training may be asked for, drawn from a seed
    models.py      tiny models of every family and head
    data.py        rows and collators
    training.py    one training, and all that can be seen of it
    comparing.py   what differs between two of them
    explained.py   differences that are meant, each with its reason

`python -m differential --count 5000` in the folder above runs many; a case that differs prints
itself as a script.
"""

from differential.cases import Case, drawn
from differential.comparing import check, differences

__all__ = ["Case", "check", "differences", "drawn"]
