"""Measuring a machine, remembering it, and finding the measurement again."""

import dataclasses
import json
import logging
import re

import pytest
import torch

from hf_dspark import fast_linears, profile_throughput
from hf_dspark.cpu import small_batch_gemm
from hf_dspark.cpu.small_batch_gemm import Gain
from hf_dspark.scheduling import step_costs as profiling
from hf_dspark.scheduling.costs import ThroughputTable
from hf_dspark.scheduling.step_costs import ThroughputProfile, find_cost, known_profiles


@pytest.fixture(autouse=True)
def shipped(own_cache, tmp_path, monkeypatch):
    """Each test has an empty cache and no shipped tables, and has been told nothing."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(profiling, "SHIPPED_TABLES", folder)
    return folder


@pytest.fixture
def pair(make_target, make_draft):
    target = make_target()
    return target, make_draft(target)


@pytest.fixture
def profile(target, draft):
    return profile_throughput(target, draft, batch_sizes=(1, 2), context_lengths=(8, 24), repetitions=1)


def keep(profile, name="own.json", folder=None):
    """Let a profile be known by a name, in the user's own folder unless another is given."""
    profile.save((folder or profiling.cache_folder()) / name)
    known_profiles.cache_clear()


def test_profile_is_remembered_found_again_and_named(target, draft, profile):
    found = find_cost(target, draft)
    assert found.provenance["table"] == f"{profile.machine.key}.json"
    assert isinstance(found, ThroughputTable) and found.verify_tokens == profile.table.verify_tokens
    assert found.steps_per_second == pytest.approx(profile.table.steps_per_second)


def test_stored_profiles_are_sglang_tables(profile, tmp_path):
    profile.save(tmp_path / "table.json")
    table = json.loads((tmp_path / "table.json").read_text())
    assert {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"} <= set(table)
    assert ThroughputTable.load(tmp_path / "table.json") == profile.table
    assert ThroughputProfile.from_dict(table) == profile


def test_measurements_hold_less_elsewhere_and_not_at_all_for_other_models(profile):
    machine = profile.machine
    assert machine.threads == torch.get_num_threads() and "cores" in machine.device
    cores = re.sub(r"\d+ cores", "777 cores", machine.device)
    for change, distance in (
        ({}, 0), ({"versions": {"torch": "0"}}, 1), ({"packed": True}, 1), ({"threads": 9}, 2), ({"device": cores}, 2),
        ({"dtype": "bfloat16"}, None), ({"device": "another"}, None),
        ({"target": machine.target | {"hidden_size": 1}}, None), ({"draft": machine.draft | {"block_size": 9}}, None),
    ):  # fmt: skip
        assert machine.distance(dataclasses.replace(machine, **change)) == distance


def test_a_table_of_other_threads_is_taken(target, draft, profile):
    other = dataclasses.replace(profile, machine=dataclasses.replace(profile.machine, threads=99))
    keep(other, f"{profile.machine.key}.json")
    assert find_cost(target, draft).steps_per_second == pytest.approx(profile.table.steps_per_second)


def test_shipped_tables_serve_until_the_machine_is_measured(target, draft, shipped):
    measured = profile_throughput(target, draft, (1, 2), (8, 9), repetitions=1, cache=False)
    machine = dataclasses.replace(measured.machine, versions={"torch": "2.0"})
    keep(dataclasses.replace(measured, machine=machine, table=ThroughputTable((1, 2), (1.0, 1.0))), folder=shipped)
    assert find_cost(target, draft).verify_tokens == (1, 2)
    keep(measured)
    assert find_cost(target, draft).verify_tokens == measured.table.verify_tokens


def test_products_with_packed_weights_have_a_table_of_their_own(target, draft, profile, monkeypatch):
    packs_all = lambda way, dtype: Gain(1, 1) if (way, dtype) == ("packed", torch.float32) else None  # noqa: E731
    monkeypatch.setattr(small_batch_gemm, "gain_of", packs_all)
    with fast_linears(target, draft, packed=True):
        assert find_cost(target, draft).provenance["table"].endswith(f"{profile.machine.key}.json")  # better than none
        packed = profile_throughput(target, draft, (1, 2), (8, 9), repetitions=1)
        assert packed.machine.packed and packed.machine.key != profile.machine.key
        assert find_cost(target, draft).provenance["table"].endswith(f"{packed.machine.key}.json")
    assert find_cost(target, draft).provenance["table"].endswith(f"{profile.machine.key}.json")


def test_a_broken_table_is_ignored_with_a_warning(target, draft, profile, caplog):
    (profiling.cache_folder() / "broken.json").write_text('{"machine": 3')
    known_profiles.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_dspark"):
        assert find_cost(target, draft) is not None
    assert "ignoring the throughput table" in caplog.text and "broken.json" in caplog.text
