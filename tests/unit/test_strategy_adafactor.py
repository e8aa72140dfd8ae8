"""Adafactor: a state of almost nothing, another update rule, and the user's word first."""

from __future__ import annotations

import pytest
from strategy_fixtures import build, learning, losses, rows_of, setup_of, trained
from transformers.optimization import Adafactor

from memfit.errors import ConfigError
from memfit.strategies import Fidelity, SmallStateOptimizer


def test_its_state_is_a_small_part_of_adamws_and_the_loss_falls(tmp_path):
    def state_bytes(*strategies: SmallStateOptimizer) -> int:
        setup = setup_of(build(), tmp_path, max_steps=10, learning_rate=2e-3)
        trainer = trained(setup, strategies, rows_of(16))
        assert losses(trainer)[-1] < losses(trainer)[0]
        states = trainer.optimizer.optimizer.state.values()
        assert len(states) == len(learning(trainer.model))
        tensors = [one for state in states for one in state.values() if hasattr(one, "nbytes")]
        return sum(one.nbytes for one in tensors)

    parameters = build().num_parameters()
    adamw, small = state_bytes(), state_bytes(SmallStateOptimizer())
    assert adamw == pytest.approx(8 * parameters, rel=0.01)
    # Sums over rows and columns of matrices of 32 to 60; vectors keep their second moment.
    assert small < 0.15 * adamw


def test_it_learns_at_the_arguments_rate_and_schedule(tmp_path):
    setup = setup_of(build(), tmp_path, max_steps=4, learning_rate=2e-3)
    optimizer = trained(setup, [SmallStateOptimizer()], rows_of(8)).optimizer.optimizer
    assert isinstance(optimizer, Adafactor)
    for group in optimizer.param_groups:
        assert (group["scale_parameter"], group["relative_step"]) == (False, False)
        assert group["initial_lr"] == 2e-3
        assert group["beta1"] is None
    assert SmallStateOptimizer().fidelity is Fidelity.OPTIMIZER


def test_an_optimizer_the_user_chose_stands():
    strategy = SmallStateOptimizer()
    assert strategy.unavailable(setup_of(build())) == ""
    assert strategy.unavailable(setup_of(build(), optim="sgd")) == "you chose optim='sgd'"
    already = setup_of(build(), optim="adafactor")
    assert strategy.unavailable(already) == "optim='adafactor' is set already"
    named = setup_of(build())
    named.user_set = frozenset({"optim"})
    assert strategy.unavailable(named) == f"you chose optim={named.args.optim.value!r}"
    with pytest.raises(ConfigError, match="you chose optim='sgd'"):
        strategy.apply(setup_of(build(), optim="sgd"))


def test_settings_of_another_optimizer_are_not_handed_to_it():
    setup = setup_of(build(), optim_args="betas=0.9")
    assert "is meant for another optimizer" in SmallStateOptimizer().unavailable(setup)


def test_a_strategy_with_its_own_optimizer_comes_first():
    setup = setup_of(build())
    setup.make_optimizer = lambda groups, _args: Adafactor(groups)
    reason = SmallStateOptimizer().unavailable(setup)
    assert reason == "another strategy brings its own optimizer"


def test_undo_gives_the_optimizer_back():
    setup = setup_of(build())
    before = setup.args.optim
    SmallStateOptimizer().apply(setup)
    assert setup.args.optim == "adafactor"
    setup.restore()
    assert setup.args.optim == before


def test_an_unknown_rule_is_named():
    with pytest.raises(ConfigError, match="Did you mean 'adafactor'"):
        SmallStateOptimizer("adafacter")  # type: ignore[arg-type]
