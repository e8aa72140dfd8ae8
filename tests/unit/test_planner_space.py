"""Which candidates there are: what cannot stand together, what the user set, what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planner_fixtures import bert, h200, task

from memfit.config.schema import ALLOWABLE
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import CardPlace, find_card
from memfit.planner import space
from memfit.planner.candidates import Candidate
from memfit.planner.space import PlanRequest, candidates, permission_of, permissions
from memfit.planner.workload import Batches, Workload
from memfit.strategies import (
    ORDER,
    Axis,
    Combination,
    Fidelity,
    FusedLayers,
    Setup,
    Strategy,
    ordered,
)

SMALL = bert(4, 64, 500)


def every(workload: Workload, **options: Any) -> list[Candidate]:
    card = options.pop("card", h200())
    judge = options.pop("judge", lambda _: "")
    return list(candidates(PlanRequest(workload, card, judge, **options)))


def names(found: list[Candidate]) -> set[str]:
    return {strategy.name for one in found for strategy in one.strategies}


def test_no_candidate_has_strategies_that_conflict() -> None:
    for one in every(task(SMALL), allow=frozenset({"optimizer", "lora", "freeze", "truncate"})):
        assert tuple(ordered(one.strategies)) == one.strategies


def test_candidates_are_all_different() -> None:
    found = every(task(SMALL))
    assert len(set(found)) == len(found)
    assert len(found) > 200


def test_exact_candidates_are_exact() -> None:
    assert {one.fidelity for one in every(task(SMALL), exact=True)} == {Fidelity.EXACT}


def test_without_permission_nothing_is_below_rounding() -> None:
    found = every(task(SMALL))
    assert max(one.fidelity for one in found) is Fidelity.ROUNDING
    assert not names(found) & {"lora", "freezing", "frozen_features", "truncation"}


def test_gradients_wait_in_8_bits_or_on_the_host() -> None:
    modes = {
        one.get("gradient_release").mode
        for one in every(task(SMALL))
        if one.get("gradient_release")
    }
    assert modes == {"kept8", "host"}


def test_graphs_come_with_packing_and_the_low_bit_optimizer() -> None:
    for one in every(task(SMALL)):
        if one.get("cuda_graphs"):
            assert one.get("packing")
            assert one.get("lowbit_adamw")
            release = one.get("gradient_release")
            assert release is None or release.mode != "host"
            if release is None:  # kept in `.grad`, the graph's own memory
                assert one.micro_batching == MicroBatching()


def test_old_card_computes_in_float16() -> None:
    found = every(task(SMALL), card=find_card("T4"))
    assert {one.get("lowbit_adamw").dtype for one in found if one.get("lowbit_adamw")} == {
        "float16"
    }


def test_precision_the_user_refused_is_not_used() -> None:
    found = every(task(SMALL, bf16=False, user_set=frozenset({"bf16"})))
    assert not names(found) & {"lowbit_adamw", "half_precision"}


def test_nothing_is_updated_on_the_host_where_bad_steps_are_skipped() -> None:
    assert "optimizer_offload" in names(every(task()))
    assert "optimizer_offload" in names(every(task(), exact=True))
    skipping = dataclasses.replace(task(), skips_bad_steps=True)
    assert "optimizer_offload" not in names(every(skipping))
    assert "optimizer_offload" not in names(every(skipping, exact=True))


def test_what_the_judge_refuses_is_left_out_with_its_reason() -> None:
    workload = task(SMALL)
    refused = lambda ones: "no Triton" if FusedLayers() in ones else ""  # noqa: E731
    asked = PlanRequest(workload, h200(), refused)
    found = list(candidates(asked))
    assert asked.left_out == {"fused_layers": "no Triton"}
    assert "fused_layers" not in names(found)


def test_users_frozen_weights_and_adapters_are_not_doubled() -> None:
    everything = frozenset({"lora", "freeze"})
    frozen = dataclasses.replace(task(SMALL), freeze="2")
    adapted = dataclasses.replace(task(SMALL), lora=8)
    for workload in (frozen, adapted):
        assert not names(every(workload, allow=everything)) & {"lora", "freezing"}


def test_every_permission_is_for_some_strategy_and_every_low_fidelity_needs_one() -> None:
    named = {permission_of(kind) for kind in ORDER if kind.permission}
    assert named == set(ALLOWABLE)
    assert permissions() == ALLOWABLE
    low = [kind for kind in ORDER if kind().fidelity > Fidelity.ROUNDING]
    assert len(low) == 5
    assert all(kind.permission for kind in low)


def test_a_strategy_on_its_own_axis_is_used_beside_everything_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Halved(Strategy):
        name = "halved"
        axis = Axis.OWN

        @property
        def fidelity(self) -> Fidelity:
            return Fidelity.EXACT

        def is_pointless(self, beside: Combination) -> bool:
            return beside.effects.recomputes

        def change(self, setup: Setup) -> None:
            raise NotImplementedError

    before = every(task(SMALL))
    monkeypatch.setattr(space, "ORDER", (*ORDER, Halved))
    found = every(task(SMALL))
    plain = [one for one in found if not one.get("halved")]
    assert plain == before
    with_it = [one for one in found if one.get("halved")]
    allowed = [one for one in before if not one.effects.recomputes]
    assert len(with_it) == len(allowed) > 0


def test_micro_batches_go_down_to_the_longest_row() -> None:
    workload = task(SMALL)
    limits = {one.micro_batching.max_tokens for one in every(workload)}
    assert None in limits
    sizes = sorted(one for one in limits if one is not None)
    assert sizes[0] == workload.longest_tokens
    assert sizes[-1] < workload.worst_tokens


def test_batches_are_cut_as_the_trainer_cuts_them() -> None:
    batches = Batches([10] * 30 + [50, 100], 32)
    whole = batches.cut(MicroBatching(), packed=True)
    assert (whole.micro_batches, whole.tokens, whole.worst_tokens) == (1.0, 450.0, 450)
    assert whole.pairs == 30 * 100 + 2500 + 10000
    padded = batches.cut(MicroBatching(), packed=False)
    assert (padded.tokens, padded.worst_tokens) == (3200.0, 3200)
    halves = batches.cut(MicroBatching(max_tokens=200), packed=True)
    assert halves.micro_batches == 3.0
    assert halves.worst_tokens == 200
    assert batches.padding_share() == pytest.approx(1 - 450 / 3200)


def test_worst_batch_has_the_longest_rows() -> None:
    lengths = list(range(1, 1001))
    batches = Batches(lengths, 10)
    cut = batches.cut(MicroBatching(), packed=True)
    assert cut.worst_tokens == sum(range(991, 1001))
    assert cut.tokens == pytest.approx(5005, rel=0.2)
    assert batches.usual_most_tokens() <= cut.worst_tokens


@pytest.mark.parametrize(
    ("card", "both"),
    [
        (find_card("RTX 3060 12GB", CardPlace(windows=False)), False),
        (find_card("RTX 3060 12GB", CardPlace(windows=True)), True),  # no Triton
        (find_card("GTX 1650"), True),  # no matrix units
        (find_card("P100"), True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_float32_weights_are_priced_where_low_bits_may_be_slower(card: Any, both: bool) -> None:
    found = [one for one in every(task(SMALL), card=card) if not one.get("optimizer_offload")]
    assert any(one.get("lowbit_adamw") for one in found)
    assert any(not one.get("lowbit_adamw") for one in found) == both


def test_the_update_is_not_on_the_host_where_fp16_scales_its_loss() -> None:
    for one in every(task(SMALL), card=find_card("P100")):
        if one.effects.autocast == "float16":
            assert one.get("optimizer_offload") is None
