"""The tracker: every storage's birth and death, what it is for and which module it belongs to."""

from __future__ import annotations

import torch
from torch import nn

from memfit.memory.components import Component
from memfit.memory.tracing.tracker import Tracker


def test_a_storage_is_born_once_and_dies_with_its_last_view() -> None:
    with Tracker() as tracker:
        tensor = torch.empty(256)
        view = tensor.view(16, 16).t()
        del tensor
        assert tracker.live_bytes == 1024
        del view
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 1024
    assert [(e.block, e.nbytes, e.birth) for e in tracker.events()] == [
        (0, 1024, True),
        (0, 1024, False),
    ]


def test_an_empty_tensor_takes_no_memory() -> None:
    with Tracker() as tracker:
        tensor = torch.empty(0)
        del tensor
    assert tracker.events() == []


def test_an_operator_in_place_takes_no_memory() -> None:
    with Tracker() as tracker:
        tensor = torch.zeros(10)
        tensor.add_(1).mul_(2)
    assert [e.nbytes for e in tracker.events() if e.birth] == [40]


def test_the_peak_is_where_old_and_new_are_alive_together() -> None:
    with Tracker() as tracker:
        tensor = torch.ones(100)
        tensor = tensor + 1
        tensor = tensor + 1
        assert tracker.live_bytes == 400
    assert tracker.peak_bytes == 800


def test_what_was_there_before_is_followed_when_adopted() -> None:
    layer = nn.Linear(8, 8)
    with Tracker() as tracker:
        tracker.adopt(iter(layer.parameters()), Component.WEIGHTS)
        assert tracker.live_bytes == (64 + 8) * 4
        layer.to(torch.float64)
    births = [(e.nbytes, e.component) for e in tracker.events() if e.birth]
    assert births[:2] == [(256, Component.WEIGHTS), (32, Component.WEIGHTS)]
    assert tracker.live_bytes == 2 * (64 + 8) * 4


def test_gradients_are_told_from_activations_once_they_are_known() -> None:
    layer = nn.Linear(8, 4, bias=False)
    with Tracker() as tracker:
        layer(torch.ones(2, 8)).sum().backward()
        assert layer.weight.grad is not None
        tracker.tag(iter([layer.weight.grad]), Component.GRADIENTS)
    gradients = [e for e in tracker.events() if e.component is Component.GRADIENTS]
    assert [(e.nbytes, e.birth) for e in gradients] == [(8 * 4 * 4, True)]


def test_accounting_names_what_is_born_inside_and_only_there() -> None:
    with Tracker() as tracker:
        with tracker.accounting(Component.OPTIMIZER):
            inside = torch.ones(4)
        outside = torch.ones(8)
        del inside, outside
    births = {e.nbytes: e.component for e in tracker.events() if e.birth}
    assert births == {16: Component.OPTIMIZER, 32: Component.ACTIVATIONS}


def test_a_forgotten_tensor_leaves_the_account() -> None:
    with Tracker() as tracker:
        kept, host = torch.ones(4), torch.ones(100)
        tracker.forget(iter([host]))
        assert tracker.live_bytes == 16
        del kept, host
    assert [e.nbytes for e in tracker.events()] == [16, 16]


def test_a_kernels_own_buffer_is_born_and_dead_at_once() -> None:
    with Tracker() as tracker:
        tensor = torch.ones(4)
        tracker.transient(1000)
        assert tracker.live_bytes == 16
        del tensor
    assert tracker.peak_bytes == 1016


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_every_birth_names_its_module_forward_and_backward() -> None:
    model = nn.Sequential(Block(), Block())
    with Tracker() as tracker:
        tracker.adopt(model.parameters(), Component.WEIGHTS)
        tracker.watch(model)
        start = tracker.position
        loss = model(torch.ones(3, 8)).sum()
        middle = tracker.position
        loss.backward()
        tracker.unwatch()
    forward, backward = tracker.events(start, middle), tracker.events(middle)
    assert [e.module for e in forward if e.birth] == [
        "",
        "0.first",
        "0",
        "0.second",
        "1.first",
        "1",
        "1.second",
        "",
    ]
    order = [e.module for e in backward if e.birth and e.module]
    assert order[0] == "1.second"
    assert order.index("1.first") < order.index("0.second") < order.index("0.first")


def test_the_hooks_that_name_modules_are_taken_off_again() -> None:
    model = Block()
    tracker = Tracker()
    tracker.watch(model)
    tracker.unwatch()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
