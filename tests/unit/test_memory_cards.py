"""Cards by name, their contexts and the matrix libraries' workspaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.errors import ConfigError
from memfit.memory import nvml
from memfit.memory.cards import CardPlace, facts, find_card, match_card, this_card
from memfit.memory.cuda_context import (
    context_range,
    handle_workspace_bytes,
    lt_workspace_bytes,
    measured_context_bytes,
    predicted_context_bytes,
    run_context_bytes,
    threads_per_multiprocessor,
    workspace_bytes,
)
from memfit.units import GIB, KIB, MIB

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "memory_h200.json"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without GPU")


@pytest.mark.parametrize(
    ("loose", "card"),
    [
        ("RTX 3050 4GB", "GeForce RTX 3050 Laptop 4GB"),
        ("rtx3060", "GeForce RTX 3060 12GB"),
        ("3060 laptop", "GeForce RTX 3060 Laptop 6GB"),
        ("GTX1080Ti", "GeForce GTX 1080 Ti 11GB"),
        ("RTX 2060 6 GB", "GeForce RTX 2060 6GB"),
        ("t4", "T4 16GB"),
        ("L4", "L4 24GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("Tesla V100-PCIE-16GB", "Tesla V100 16GB"),
        ("H100 PCIe", "H100 PCIe 80GB"),
        ("h100", "H100 80GB"),
        ("NVIDIA H200", "H200 141GB"),
        ("NVIDIA GeForce RTX 2050", "GeForce RTX 2050 4GB"),
        ("RTX 3050 6GB", "GeForce RTX 3050 6GB"),
        ("RTX 3080 Ti Laptop", "GeForce RTX 3080 Ti Laptop 16GB"),
        ("RTX4090D", "GeForce RTX 4090 D 24GB"),
        ("RTX 5090 laptop", "GeForce RTX 5090 Laptop 24GB"),
        ("GTX 1650 Super", "GeForce GTX 1650 Super 4GB"),
        ("RTX 6000 Ada", "RTX 6000 Ada 48GB"),
        ("H20", "H20 96GB"),
        ("NVIDIA H800", "H800 80GB"),
    ],
)
def test_a_card_is_found_by_the_name_people_use(loose: str, card: str) -> None:
    assert find_card(loose).name == card


def test_a_name_that_fits_two_cards_asks_which() -> None:
    with pytest.raises(ConfigError, match="may be A100 40GB or A100 80GB; write which one"):
        find_card("A100")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("RTX 4095 24GB", "GeForce RTX 4090 24GB, "),
        ("RTX 3060 Super", "GeForce RTX 3060 12GB, GeForce RTX 3060 Ti 8GB, "),
        ("V100 64GB", "Tesla V100 16GB, Tesla V100 32GB, Tesla V100S 32GB"),
    ],
)
def test_an_unknown_name_suggests_the_three_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"is known; the nearest are {nearest}") as failure:
        find_card(name)
    assert str(failure.value).count("GB, ") == 2


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("RX 7900", "AMD"), ("RX7900XTX", "AMD"), ("Radeon", "AMD"), ("MI300X", "AMD"),
        ("M2 Pro", "Apple"), ("Apple M4", "Apple"), ("Arc A770", "Intel"),
        ("Ascend 910B", "Huawei"),
    ],
)  # fmt: skip
def test_a_device_of_another_maker_is_not_planned_for(name: str, maker: str) -> None:
    with pytest.raises(ConfigError, match=f"is a device of {maker}; .* plans for NVIDIA cards"):
        find_card(name)


def test_a_name_is_looked_up_without_torch() -> None:
    code = "import sys, memfit.memory.cards as c; c.find_card('T4'); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["", "NVIDIA", "banana"])
def test_a_name_without_a_card_in_it_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no card"):
        find_card(name)


@pytest.mark.parametrize(
    ("driver_name", "gib", "card"),
    [
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 5.79, "GeForce RTX 3060 Laptop 6GB"),
        ("NVIDIA GeForce RTX 3060", 11.75, "GeForce RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.7, "GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40GB"),
        ("Tesla T4", 14.7, "T4 16GB"),
    ],
)
def test_a_device_is_matched_by_the_drivers_name_and_its_memory(
    driver_name: str, gib: float, card: str
) -> None:
    found = match_card(driver_name, round(gib * GIB))
    assert found is not None
    assert found.name == card


def test_a_device_the_table_lacks_or_with_other_memory_is_not_matched() -> None:
    assert match_card("NVIDIA GeForce RTX 3060", 8 * GIB) is None
    assert match_card("Some Card 9000", 8 * GIB) is None


def test_every_card_is_sane() -> None:
    for name in facts()["cards"]:
        card = find_card(name)
        assert card.name == name
        box_gib = int(name.rsplit(" ", 1)[1].removesuffix("GB"))
        # A box counts in GiB, save the largest cards, which count in GB.
        assert 0.9 * box_gib < card.total_bytes / GIB < box_gib
        assert 380 * MIB < card.context_bytes < 1.1 * GIB
        assert card.context_low_bytes <= card.context_bytes < card.total_bytes / 5
        assert card.usable_bytes > 0.97 * card.total_bytes  # a display would be said
        assert card.half_flops >= card.fp32_flops
        assert card.has_bf16 == (card.capability[0] >= 8)


def test_speeds_are_a_data_sheets_until_somebody_measured() -> None:
    for name in facts()["cards"]:
        card = find_card(name)
        if card.reached is not None:
            assert card.reached.half_flops < card.half_flops
            assert card.reached.memory_bytes_per_second < card.memory_bytes_per_second
    assert find_card("T4").reached is None


def test_tf32_is_half_the_half_precision_rate_from_ampere_on() -> None:
    assert find_card("A100 80GB").tf32_flops == 156e12
    assert find_card("RTX 3090").tf32_flops == pytest.approx(35.6e12, rel=0.01)
    assert find_card("T4").tf32_flops == find_card("T4").fp32_flops


def test_the_bus_follows_from_the_generation_and_the_lanes() -> None:
    full = find_card("RTX 3090").bus_bytes_per_second
    assert full == pytest.approx(31.5e9, rel=0.01)  # PCIe 4.0 x16
    assert find_card("RTX 3050 4GB").bus_bytes_per_second == full / 2  # eight lanes
    assert find_card("T4").bus_bytes_per_second == pytest.approx(full / 2, rel=0.01)  # 3.0 x16
    assert find_card("H200").bus_bytes_per_second == pytest.approx(2 * full, rel=0.01)  # 5.0 x16


def test_newer_cards_of_a_generation_are_never_slower_by_name() -> None:
    for slower, faster in (
        ("RTX 3060 12GB", "RTX 3090 24GB"),
        ("RTX 4070 Laptop", "RTX 4070 12GB"),
        ("RTX 5080 Laptop", "RTX 5080 16GB"),
        ("GTX 1650 4GB", "GTX 1660 Ti 6GB"),
    ):
        less, more = find_card(slower), find_card(faster)
        assert less.fp32_flops < more.fp32_flops
        assert less.memory_bytes_per_second < more.memory_bytes_per_second


def test_only_measured_contexts_claim_to_be_measured() -> None:
    assert [name for name in facts()["cards"] if find_card(name).measured] == ["H200 141GB"]


def test_the_predicted_context_of_the_measured_card_is_close_to_its_measurement() -> None:
    h200 = find_card("H200")
    predicted = predicted_context_bytes(h200.capability, h200.multiprocessors)
    assert predicted == pytest.approx(h200.context_bytes, rel=0.01)


def test_the_contexts_of_runs_with_small_workspaces_streams_and_graphs_are_as_measured() -> None:
    h200 = find_card("H200")
    small = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
    runs = json.loads(RESULTS.with_name("plan_h200.json").read_text(encoding="utf-8"))["runs"]
    for run in (one for one in runs if one["chosen"]):
        used = " ".join(run["strategies"])
        predicted = run_context_bytes(
            h200.context_bytes, h200.capability, small if "SmallWorkspace" in used else {},
            streams="Graphs" in used or "Offload" in used,
            graphed_kernels=6_000 if "Graphs" in used else 0,
        )  # fmt: skip
        # On the safe side: what is not there is not missed.
        assert 0 <= predicted / run["measured"]["context_bytes"] - 1 < 0.05, run["pair"]


def test_the_contexts_measured_in_every_run_are_within_three_percent_of_the_tables() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    contexts = [run["measured"]["context_bytes"] for run in runs if "measured" in run]
    assert len(contexts) >= 70
    for context_bytes in contexts:
        assert context_bytes == pytest.approx(find_card("H200").context_bytes, rel=0.03)


def test_empty_contexts_that_people_reported_follow_the_rule() -> None:
    """An H200 grows from 527 MiB, empty, to 765; other cards by threads, and a smaller cuBLAS."""
    rows = facts()["cards"]
    told = {name: row["context_mib"] for name, row in rows.items() if "context_mib" in row}
    assert len(told) == 3
    for name, empty_mib in told.items():
        capability = tuple(rows[name]["capability"])
        ruled, most = context_range(capability, rows[name]["sm"])
        cublas = 4 * handle_workspace_bytes(capability, {})
        threads = rows[name]["sm"] * threads_per_multiprocessor(capability)
        first_kernel = 92 * MIB * threads / (132 * 2048)
        assert empty_mib * MIB + first_kernel + cublas == pytest.approx(ruled, rel=0.06), name
        assert most >= 1.2 * ruled


def test_an_unmeasured_context_is_planned_for_at_its_upper_end() -> None:
    small, large = find_card("GTX 1650"), find_card("RTX 4090")
    assert small.context_low_bytes == predicted_context_bytes((7, 5), 14) < 100 * MIB
    assert small.context_bytes == 400_000_000  # what people report of small cards
    assert large.context_bytes == round(1.25 * large.context_low_bytes) > 600 * MIB
    assert small.margin_bytes == small.context_bytes - small.context_low_bytes + round(
        0.02 * small.total_bytes
    )
    assert find_card("H200").margin_bytes == 0


def test_every_figure_names_a_source_that_is_listed() -> None:
    known = facts()
    general = (*known["general"].values(), *known["generations"].values())
    used = {key for one in general for key in one["from"]}
    for row in known["cards"].values():
        used |= {row[name] for name in ("gib_from", "context_from") if name in row}
    assert set(known["sources"]) == used


def test_a_card_elsewhere_leaves_its_system_and_its_display_their_part() -> None:
    plain = find_card("RTX 3060 12GB", CardPlace(windows=False))
    windows = find_card("RTX 3060 12GB", CardPlace(windows=True))
    display = find_card("RTX 3060 12GB", CardPlace(windows=False, display=True))
    said = find_card("RTX 3060 12GB", CardPlace(windows=True, reserved_bytes=700 * 10**6))
    assert plain.reserved_bytes == 0
    assert windows.reserved_bytes == round(0.19 * windows.total_bytes)
    assert display.reserved_bytes == 600 * 10**6
    assert said.reserved_bytes == 700 * 10**6
    assert (plain.has_triton, windows.has_triton, said.has_triton) == (True, False, False)
    assert said.usable_bytes == said.total_bytes - said.reserved_bytes - said.unknown_bytes


def test_cards_without_tensor_cores_are_known() -> None:
    without = {name for name in facts()["cards"] if not find_card(name).matrix_units}
    assert {"GeForce GTX 1650 4GB", "GeForce GTX 1660 Ti 6GB", "GeForce MX450 2GB"} < without
    assert {"Tesla P100 16GB", "GeForce GTX 1080 Ti 11GB"} < without
    assert not {"T4 16GB", "GeForce RTX 2060 6GB", "Tesla V100 16GB"} & without


def test_a_context_grows_with_the_threads_a_card_runs_at_once() -> None:
    turing, ampere = predicted_context_bytes((7, 5), 40), predicted_context_bytes((8, 6), 40)
    volta = predicted_context_bytes((7, 0), 40)
    assert ampere - turing == pytest.approx(40 * 512 * 2.31 * KIB, abs=1)
    assert volta - turing == pytest.approx(40 * 1024 * 2.31 * KIB, abs=1)
    # Hopper's cuBLAS takes more: four times the larger workspace.
    hopper = predicted_context_bytes((9, 0), 40)
    assert hopper - volta == 4 * (32 * MIB - (8 * MIB + 128 * KIB))


@without_gpu
def test_without_a_gpu_nothing_is_measured() -> None:
    assert measured_context_bytes() is None
    assert this_card() is None
    with nvml.open_device() as device:
        assert device is None


def test_a_handles_workspace_follows_the_capability() -> None:
    assert handle_workspace_bytes((9, 0), {}) == 32 * MIB
    assert handle_workspace_bytes((12, 0), {}) == 32 * MIB
    assert handle_workspace_bytes((8, 6), {}) == 8 * MIB + 128 * KIB
    assert handle_workspace_bytes((7, 5), {}) == 8 * MIB + 128 * KIB


def test_forward_and_backward_each_have_a_workspace() -> None:
    assert workspace_bytes((9, 0), environment={}) == 65 * MIB
    assert workspace_bytes((9, 0), backward=False, environment={}) == 33 * MIB
    assert workspace_bytes((9, 0), recompute=True, environment={}) == 66 * MIB
    assert workspace_bytes((9, 0), biases=False, environment={}) == 64 * MIB


def test_the_workspaces_of_every_measured_run_are_the_predicted_ones() -> None:
    for run in json.loads(RESULTS.read_text())["runs"]:
        if "measured" not in run:
            continue
        case = run["case"]
        expected = workspace_bytes(
            (9, 0),
            recompute=case["gradient_checkpointing"],
            biases=case["model_type"] != "qwen3",
            environment={},
        )
        assert run["measured"]["left_bytes"] == expected, case["id"]


def test_the_workspace_setting_of_the_environment_is_honoured() -> None:
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert handle_workspace_bytes((7, 5), deterministic) == 32 * MIB
    assert handle_workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == 128 * KIB
    assert handle_workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": "nonsense"}) == 32 * MIB


def test_cublaslt_has_its_own_small_workspace_unless_told_to_share() -> None:
    assert lt_workspace_bytes({}) == MIB
    assert lt_workspace_bytes({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}) == 0
    assert lt_workspace_bytes({"CUBLASLT_WORKSPACE_SIZE": "2048"}) == 2 * MIB
