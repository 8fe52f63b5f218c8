"""Ceilings only rise: a noisy measurement must not lower what a device was seen to do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fusescout.ceilings import best_seen
from fusescout.ceilings import ceilings
from fusescout.device import Device

DEVICE = Device("cpu", "a chip", "x86_64", 2, copy_bytes_per_s=10e9, flops_per_s={"float32": 2e11}, launch_us=2.0)


def test_the_best_of_all_measurements_is_kept(tmp_path: Path) -> None:
    assert best_seen(DEVICE, tmp_path) == DEVICE
    noisy = replace(DEVICE, copy_bytes_per_s=5e9, flops_per_s={"float32": 1e11}, launch_us=9.0)
    assert best_seen(noisy, tmp_path) == DEVICE
    better = replace(DEVICE, flops_per_s={"float32": 3e11, "bfloat16": 4e11})
    assert best_seen(better, tmp_path) == better
    assert best_seen(noisy, tmp_path) == replace(DEVICE, flops_per_s={"float32": 3e11})
    assert best_seen(noisy, tmp_path, "TF32") == noisy
    assert best_seen(replace(noisy, flops_per_s={"bfloat16": 1.0}), tmp_path).flops_per_s == {"bfloat16": 4e11}


@pytest.mark.parametrize("other", [{"name": "another"}, {"cores": 4}, {"arch": "arm"}])
def test_another_device_has_its_own_memory(tmp_path: Path, other: dict[str, object]) -> None:
    best_seen(DEVICE, tmp_path)
    slow = replace(DEVICE, copy_bytes_per_s=1.0, **other)
    assert best_seen(slow, tmp_path) == slow


@pytest.mark.parametrize("text", ["", "[]", "3", '{"flops_per_s": {"float32": "x"}}', '{"copy_bytes_per_s": null}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, text: str) -> None:
    best_seen(DEVICE, tmp_path)
    (file,) = (tmp_path / "ceilings").iterdir()
    file.write_text(text)
    assert best_seen(DEVICE, tmp_path) == DEVICE
    assert best_seen(replace(DEVICE, launch_us=5.0), tmp_path) == DEVICE


def test_a_folder_that_can_not_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert best_seen(DEVICE, tmp_path / "file") == DEVICE


def test_two_measurements_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.get_float32_matmul_precision = lambda: "highest"
    monkeypatch.setitem(sys.modules, "torch", torch)
    taken: list[tuple[str, ...]] = []

    def measure(kind: str, dtypes: tuple[str, ...]) -> Device:
        taken.append(dtypes)
        return replace(DEVICE, flops_per_s=dict.fromkeys(dtypes, 1e11 * len(taken)))

    monkeypatch.setattr("fusescout.ceilings.measure_device", measure)
    monkeypatch.setattr("fusescout.ceilings.describe_device", lambda kind: Device("cpu", "a chip", "x86_64", 2))
    found = [ceilings("cpu", ("float32",), tmp_path) for _ in range(5)]
    assert [d.flops_per_s["float32"] for d in found] == [1e11, 2e11, 2e11, 2e11, 2e11]
    assert found[-1] == found[1]
    assert ceilings("cpu", ("bfloat16",), tmp_path).flops_per_s == {"bfloat16": 3e11}
    assert len(taken) == 3
