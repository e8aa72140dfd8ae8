"""What a plan needs besides the device (host memory, disk), and what in it is a guess."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.messages import Message
from memfit.planner.plan import Decision
from memfit.planner.values import Price, Workload

HOST_RESERVE_BYTES = 10**9
"""Left for the rest of the process and its neighbours."""


def fits_host(price: Price, free_bytes: int) -> bool:
    """Whether the computer has the memory that the plan puts there."""
    return price.host_bytes == 0 or price.host_bytes + HOST_RESERVE_BYTES <= free_bytes


def host_note(passed_over: Sequence[Price], chosen: Price, free_bytes: int) -> list[Decision]:
    """That a faster plan wants more host memory than there is."""
    from memfit.planner.explain import gb

    faster = [one for one in passed_over if one.step_seconds < chosen.step_seconds]
    if not faster:
        return []
    least = min(one.host_bytes for one in faster)
    return [
        Decision(
            "note.host",
            Message(
                "a faster plan was passed over: it needs {needs} of the computer's "
                "memory, of which {free} are free",
                needs=gb(least),
                free=gb(free_bytes),
            ),
        )
    ]


def checkpoint_bytes(price: Price) -> int:
    """Weights and optimizer state as a checkpoint holds them."""
    from memfit.memory.components import Component

    parts = price.peak.components
    kept = parts.get(Component.WEIGHTS, 0) + parts.get(Component.OPTIMIZER, 0)
    return kept + price.host_bytes


def disk_note(workload: Workload, price: Price, free_bytes: int | None) -> list[Decision]:
    """That the checkpoints of a run do not go onto the disk."""
    from memfit.planner.explain import gb

    if free_bytes is None:
        return []
    count, each = kept_checkpoints(workload), checkpoint_bytes(price)
    from memfit.memory.components import Component

    model = price.peak.components.get(Component.WEIGHTS, 0)
    needs = count * each + model
    if needs <= free_bytes:
        return []
    said = Message(
        "checkpoints will take {needs} on the disk ({count} of {each} and the "
        "final model), of which {free} are free; lower --save-total-limit or "
        "choose another folder",
        needs=gb(needs),
        count=str(count),
        each=gb(each),
        free=gb(free_bytes),
    )
    return [Decision("note.disk", said)]


def guess_note(operators: Sequence[str]) -> list[Decision]:
    """That the time of some operators is a guess."""
    if not operators:
        return []
    return [
        Decision(
            "note.guess",
            Message(
                "what {operators} compute could not be counted, so their time is a guess "
                "from the sizes of what goes in and comes out",
                operators=", ".join(operators),
            ),
        )
    ]


def kept_checkpoints(workload: Workload) -> int:
    """How many checkpoints are on the disk at once; a new one is written before an old one goes."""
    args = workload.args
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return 0
    epochs = max(1, round(args.num_train_epochs))
    steps = args.max_steps if args.max_steps > 0 else epochs * workload.steps_per_epoch
    every = args.save_steps if strategy == "steps" else workload.steps_per_epoch
    every = round(every * steps) if every < 1 else round(every)
    written = max(1, -(-steps // max(every, 1)))
    limit = args.save_total_limit
    return written if not limit else min(written, limit + 1)
