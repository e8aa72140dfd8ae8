"""Plans for one rank of several: its rows, what ranks hold and send, what they cannot do."""

from __future__ import annotations

import copy
import dataclasses
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, TrainingArguments

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.engine.ranks import Ranks
from memfit.memory.cards import find_card
from memfit.memory.components import Component
from memfit.planner import trace as traced_steps
from memfit.planner.explain import explain
from memfit.planner.plan import Plan
from memfit.planner.price import Pricer
from memfit.planner.rank_cost import link_bytes_per_second, rank_cost
from memfit.planner.search import Search, plan_for
from memfit.planner.task import Task
from memfit.strategies import (
    Checkpointing,
    CudaGraphs,
    FullySharded,
    GradientRelease,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    Strategy,
)
from memfit.units import MIB, Budget
from small_training import collate, model_of, texts
from traced_plans import Candidate, price_memory, pricer_of, unavailable_reason

T4, CARD = find_card("T4"), find_card("RTX 3060 12GB")
LOW, KEPT8 = LowBitAdamW(), GradientRelease("kept8")


@cache
def workload(ranks: int, layers: int = 3, width: int = 128, **arguments: Any) -> Task:
    args = TrainingArguments(
        "unused", per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none",
        use_cpu=True, **arguments,
    )  # fmt: skip
    draw = random.Random(1)
    config = BertConfig(
        vocab_size=500, hidden_size=width, num_attention_heads=4, intermediate_size=4 * width,
        num_hidden_layers=layers, max_position_embeddings=64,
    )  # fmt: skip
    lengths = tuple(draw.randint(8, 64) for _ in range(200))
    return Task(config=config, lengths=lengths, args=args, ranks=ranks)


def candidate(*strategies: Strategy, most_tokens: int | None = None) -> Candidate:
    return Candidate(strategies, MicroBatching(max_tokens=most_tokens))


def test_a_rank_has_its_own_batch_and_all_together_fewer_steps() -> None:
    alone, four = workload(1), workload(4)
    assert (four.rank_rows, four.effective_rows) == (8, 32)
    assert (alone.steps_per_epoch, four.steps_per_epoch) == (25, 7)
    # DDP sums gradients in buckets that lie beside them.
    (one, _, trace), (each, _, _) = (
        price_memory(task, candidate(), None) for task in (alone, four)
    )
    assert each.device_bytes - one.device_bytes == 4 * trace.trainable_parameters


def test_nccl_is_counted_on_every_card_and_gloo_is_not() -> None:
    def context(task: Task) -> int:
        full, _, _ = price_memory(task, candidate(LOW), CARD)
        return full.components[Component.CONTEXT]

    alone = context(workload(1))
    assert context(workload(2)) == alone + 544 * MIB
    assert context(workload(4)) == alone + 688 * MIB
    by_host = copy.copy(workload(4).args)
    by_host.ddp_backend = "gloo"
    assert context(dataclasses.replace(workload(4), args=by_host)) == alone


def test_what_ranks_cannot_do_is_left_out_with_its_reason() -> None:
    def reason(ranks: int, *strategies: Strategy) -> str:
        return unavailable_reason(strategies, workload(ranks), CARD)

    for refused in (
        (OptimizerOffload(),),
        (Packing(), LOW, CudaGraphs()),
        (LOW, KEPT8),
    ):
        assert not reason(1, *refused)
        assert "several processes" in reason(2, *refused)
    assert not reason(2, Packing(), LOW)


def test_a_step_waits_for_what_backward_does_not_hide() -> None:
    """325 M gradients of 2 bytes on a ring of 4: 1.5 times 0.65 GB at 9.9 GB/s."""

    def cost(step_seconds: float, **how: Any) -> tuple[float, float]:
        given = {"micro_batches": 1.0, "divided": False, **how}
        found = rank_cost(dataclasses.replace(workload(4), card=T4), 650e6, step_seconds, **given)
        return round(found.seconds, 4), round(found.waited_seconds, 4)

    assert cost(0.3) == (0.0982, 0.0)
    assert cost(0.09) == (0.0982, 0.0382)
    assert cost(0.3, micro_batches=4.0) == (0.0982, 0.0482)


def test_weights_are_divided_where_nothing_fits_otherwise() -> None:
    given = workload(2, layers=8, width=256)

    def asked(budget_bytes: int) -> Task:
        budget = Budget(bytes=budget_bytes)
        return dataclasses.replace(given, budget=budget, budget_bytes=budget_bytes, exact=True)

    pricer = Pricer(asked(1))
    search = Search(asked(1), pricer)
    search.run()
    least = {name: row.smallest().device_bytes for name, row in search.rows.items()}
    assert least["sharded, fp32"] < 0.8 * least["fp32"]

    def plan(budget_bytes: int) -> Plan:
        return plan_for(asked(budget_bytes), fresh=True, pricer=pricer).chosen

    assert FullySharded() not in plan(10 * least["fp32"]).strategies
    tight = plan(int(0.97 * least["fp32"]))
    assert FullySharded() in tight.strategies
    said = {one.about: one.sentence() for one in tight.decisions}
    assert "each of 2 ranks keeps a part of every weight" in said["fully_sharded"]
    assert "of gradients and gather" in said["ranks"]


def test_one_rank_is_not_told_of_strategies_for_several() -> None:
    alone = dataclasses.replace(workload(1), exact=True)
    table = Search(alone, Pricer(alone)).table
    assert not any(FullySharded() in one.strategies for one in table.recipes)
    assert "fully_sharded" not in table.left_out


@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_weights_are_whole_one_layer_at_a_time(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = workload(ranks, layers=8)
    used = candidate(Checkpointing(), FullySharded(), most_tokens=128)
    composed, _, trace = price_memory(task, used, None)
    whole = 4 * trace.trainable_parameters
    layer = 4 * (4 * 128 * 128 + 2 * 128 * 512)
    parts = composed.components
    assert parts[Component.OPTIMIZER] == pytest.approx(2 * whole / ranks, rel=0.01)
    assert parts[Component.WEIGHTS] == pytest.approx(whole / ranks + 4 * layer, rel=0.02)
    assert max(trace.traced_layers) < 8
    monkeypatch.setattr(traced_steps, "plan_runs", lambda *_: None)
    full, _, trace = price_memory(dataclasses.replace(task), used, None)
    assert trace.traced_layers == (8,)
    assert composed.device_bytes == full.device_bytes


def test_divided_weights_are_gathered_twice_in_every_micro_batch() -> None:
    """Beside the computation on cards; gloo gathers while nothing is computed."""
    on_card = dataclasses.replace(workload(4), card=T4)
    found = rank_cost(on_card, 4e9, 1.0, micro_batches=2.0, divided=True)
    assert (found.sent_bytes, found.gathered_bytes) == (8e9, 16e9)
    assert found.seconds == pytest.approx(0.75 * 24e9 / link_bytes_per_second(T4))
    assert found.waited_seconds == pytest.approx(found.seconds - 1.0)
    hidden = rank_cost(on_card, 4e9, 10.0, micro_batches=2.0, divided=True)
    assert hidden.waited_seconds == pytest.approx(2.0)
    on_cpu = rank_cost(workload(4), 4e6, 3.0, micro_batches=1.0, divided=True)
    assert on_cpu.waited_seconds == on_cpu.seconds == pytest.approx(0.75 * 12e6 / 1e9)


def test_cards_reach_each_other_by_nvlink_or_through_the_host() -> None:
    rates = {name: link_bytes_per_second(find_card(name)) for name in ("T4", "RTX 4090", "H100")}
    assert rates["T4"] == pytest.approx(9.93e9, rel=0.01)
    assert rates["RTX 4090"] == 10e9
    assert rates["H100"] == pytest.approx(337e9, rel=0.01)
    assert link_bytes_per_second(find_card("A100 PCIe 80GB")) == 10e9


def test_a_trainer_plans_for_the_rank_with_the_least_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least_bytes = 50_000_000

    monkeypatch.setattr(Ranks, "gathered", lambda _, value: [value, least_bytes])
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = BudgetTrainer(
        model_of(), args, train_dataset=texts(), data_collator=collate, budget="1GB"
    )
    assert trainer.plan is not None
    assert trainer.plan.digest.budget_bytes == least_bytes


def test_the_plan_says_that_its_figures_are_of_one_card() -> None:
    several, alone = (dataclasses.replace(workload(ranks), card=CARD) for ranks in (2, 1))
    pricer = pricer_of(several, CARD)
    price = pricer.price((LOW,), MicroBatching())
    said = {one.about: one.sentence() for one in explain(price, several, pricer, {})}
    assert "one of 2 cards, each with 8 of a step's 16 rows" in said["ranks"]
    assert "NCCL holds 0.57 GB" in said["ranks"]
    assert "ranks" not in {one.about for one in explain(price, alone, pricer, {})}
