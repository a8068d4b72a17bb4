"""The feature cache: what is read is what the target said, whatever was interrupted, damaged or mixed up before."""

import errno
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from hf_dspark import DSparkConfig
from hf_dspark.training import target_states as module
from hf_dspark.training.target_states import FeatureCache, TargetStates, cache_features, target_states
from tests.measuring.interruption import interrupt_third_call

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12], [3, 4, 5, 6, 7], [20], [21, 22, 23], [30, 31, 32, 33]]
NUM_TOKENS = sum(map(len, ROWS))
ROW_BYTES = 2 * 3 * 32  # two tapped layers and the last hidden state, per token
FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    PermissionError("No space left on device for this user"),
]


def config_of(target, **overrides):
    return DSparkConfig.from_target(target.config, **{"markov_rank": 4, "target_layer_ids": [0, 2]} | overrides)


def open_cache(target, folder):
    """A cache that can be added to."""
    cache = FeatureCache(folder, config_of(target), target)
    cache.prepare(num_tokens=0)
    return cache


def fill(target, folder, rows=ROWS, **options):
    return cache_features(target, config_of(target), rows, folder, **{"batch_size": 2, "progress": False} | options)


def files(folder):
    return sorted(folder.glob("states/*/*"))


def states_of(row, value=0.0):
    return TargetStates(torch.full((len(row), 64), value), torch.full((len(row), 32), value))


@pytest.fixture
def num_passes(target):
    """Count the target's rows."""
    seen = []
    count = lambda module, args, kwargs: seen.append(len(kwargs["input_ids"]))  # noqa: E731
    target.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    return lambda: sum(seen)


def assert_holds(cache, target, rows=ROWS):
    """Each row is what the target says of it alone, up to rounding."""
    for row in rows:
        ids = torch.tensor([row])
        expected = target_states(target, [0, 2], ids, torch.ones_like(ids), torch.device("cpu"), torch.float32)
        found = cache.read(row)
        torch.testing.assert_close(found.features.float(), expected.features[0], atol=0.01, rtol=0.01)
        torch.testing.assert_close(found.last_hidden.float(), expected.last_hidden[0], atol=0.01, rtol=0.01)


def test_rows_are_read_as_they_were_added_in_bfloat16(target, tmp_path):
    cache = open_cache(target, tmp_path)
    for row in ROWS:
        kept = TargetStates(torch.randn(len(row), 64), torch.randn(len(row), 32))
        cache.add(row, kept)
        again = FeatureCache(tmp_path, config_of(target))
        for found in (cache.read(row), again.read(torch.tensor(row)), again.read({"input_ids": row})):
            assert torch.equal(found.features, kept.features.bfloat16())
            assert torch.equal(found.last_hidden, kept.last_hidden.bfloat16())
    assert len(again) == 6


def test_filling_keeps_what_the_target_says_of_each_row(target, tmp_path):
    cache = fill(target, tmp_path, [{"input_ids": row, "loss_mask": row} for row in ROWS])
    assert_holds(cache, target)
    assert_holds(FeatureCache(tmp_path, config_of(target)), target, ROWS[::-1])
    others = [ROWS[0][:-1], [*ROWS[1], 12], [12, 11]]
    assert cache.missing([*others, *ROWS]) == others
    with pytest.raises(KeyError, match="a row of 2 tokens .* is not in the cache"):
        cache.read([12, 11])


def test_rows_that_are_there_are_not_computed_again(target, tmp_path, num_passes):
    fill(target, tmp_path, [*ROWS[:4], ROWS[0]])
    assert num_passes() == 4
    cache = fill(target, tmp_path, ROWS[::-1])
    assert num_passes() == 6 and len(cache) == 6


@pytest.mark.parametrize(
    ("row", "message"),
    [([], "at least one"), ([1.5], "token ids"), ("text", "token ids"), ({"prompt": "x"}, "token ids"),
     (torch.ones(1, 3).long(), "token ids"), ([3, 48], r"example 0 has token ids in \[3, 48\].*ends at 47"),
     ([-1, 3], r"example 0 has token ids in \[-1, 3\]")],
)  # fmt: skip
def test_rows_that_are_no_token_ids_are_refused_before_anything_is_written(target, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        fill(target, tmp_path / "cache", [row])
    assert not (tmp_path / "cache").exists()


def test_impossible_options_are_refused(target, tmp_path):
    for options in ({"batch_size": 0}, {"rank": 2, "num_ranks": 2}, {"rank": -1}):
        with pytest.raises(ValueError, match="batch_size must be positive and rank lie in"):
            fill(target, tmp_path, **options)


def test_opening_needs_a_cache_or_a_target(target, tmp_path):
    with pytest.raises(ValueError, match=r"no feature cache in .*meta.json is missing.*cache_features"):
        FeatureCache(tmp_path / "nothing", config_of(target))
    FeatureCache(tmp_path / "nothing", config_of(target), target)
    assert not (tmp_path / "nothing").exists()


def test_cache_of_another_model_is_refused_and_the_difference_named(target, make_target, tmp_path):
    fill(target, tmp_path)
    other = make_target()
    other.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1e-3
    with pytest.raises(ValueError, match=r"another target, revision or dtype.*target_fingerprint \(.* now\)"):
        FeatureCache(tmp_path, config_of(other), other)
    with pytest.raises(ValueError, match=r"target_layer_ids \(\[0, 2\] there, \[2, 0\] now\)"):
        FeatureCache(tmp_path, config_of(target, target_layer_ids=[2, 0]))
    with pytest.raises(ValueError, match=r"vocab_size \(48 there, 50 now\)"):
        FeatureCache(tmp_path, config_of(make_target(vocab_size=50)))
    assert len(FeatureCache(tmp_path, config_of(make_target()), make_target())) == 6


def test_processes_that_start_together_make_one_cache(target, make_target, tmp_path):
    caches = [open_cache(target, tmp_path) for _ in range(2)]
    for value, (cache, row) in enumerate(zip(caches, ROWS, strict=False)):
        cache.add(row, states_of(row, value))
    with pytest.raises(ValueError, match="target_fingerprint"):
        open_cache(make_target(seed=5), tmp_path)
    for cache in caches:
        assert [cache.read(row).features.mean().item() for row in ROWS[:2]] == [0, 1]


def test_ranks_share_the_rows(target, tmp_path, num_passes):
    first = fill(target, tmp_path, rank=0, num_ranks=2)
    assert 0 < len(first) < 6
    assert len(fill(target, tmp_path, rank=1, num_ranks=2)) == len(first) == num_passes() == 6
    assert_holds(first, target)


def test_filling_resumes_after_the_last_row(target, tmp_path, monkeypatch, num_passes):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_third_call(patch, module, "target_states")
        fill(target, tmp_path)
    path = files(tmp_path)[0]
    path.with_name(f"{path.name}.0123abcd.tmp").write_bytes(path.read_bytes()[:100])  # as a killed process leaves it
    path.unlink()
    cache = FeatureCache(tmp_path, config_of(target))
    assert len(cache) == len(cache.missing(ROWS)) == 3
    before = num_passes()
    cache = fill(target, tmp_path)
    assert num_passes() == before + 3
    assert_holds(cache, target)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "content",
    [b"", b"half", b"\xff" * 64, None, {"states": torch.zeros(9, 96, dtype=torch.bfloat16)},
     {"states": torch.zeros(6, 96)}, {"other": torch.zeros(6, 96, dtype=torch.bfloat16)}],
)  # fmt: skip
def test_damaged_file_is_named_and_its_row_computed_again(target, tmp_path, content, num_passes):
    fill(target, tmp_path)
    for path in files(tmp_path):
        if isinstance(content, dict):
            save_file(content, path)
        else:
            path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    cache = FeatureCache(tmp_path, config_of(target))
    for row in ROWS:
        with pytest.raises(ValueError, match=r"\.safetensors is damaged .*: delete it, and fill the cache"):
            cache.read(row)
    shutil.rmtree(tmp_path / "states")
    assert_holds(fill(target, tmp_path), target)
    assert num_passes() == 6 + 6 + 6  # filled, filled again, compared with


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "meta.json cannot be used"), ("[1]", "meta.json cannot be used"), ("[" * 10**5, "meta.json cannot be used"),
     ('{"format": 99, "facts": {}}', r"format \(99 there, 2 now\)"),
     *((text, r"hidden_size \(None there") for text in ('{"format": 2, "facts": 7}', '{"format": 2, "facts": {}}'))],
)  # fmt: skip
def test_unsound_meta_files_are_refused(target, tmp_path, content, message):
    fill(target, tmp_path)
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        FeatureCache(tmp_path, config_of(target))
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ValueError, match="meta.json cannot be used: there is no such file"):
        FeatureCache(tmp_path, config_of(target), target)


def test_damaged_weights_of_the_target_are_refused_and_written_again(target, tmp_path):
    fill(target, tmp_path)
    path = tmp_path / "target.safetensors"
    for content in (path.read_bytes()[:-1], b"", b"{}", save({"other": torch.zeros(1)})):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"target.safetensors is damaged"):
            FeatureCache(tmp_path, config_of(target)).borrowed()
    path.unlink()
    with pytest.raises(ValueError, match=r"target.safetensors is not there: fill the cache with the target"):
        FeatureCache(tmp_path, config_of(target)).borrowed()
    assert torch.equal(fill(target, tmp_path).borrowed().lm_head.weight, target.lm_head.weight)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, None], ids=["files", "permission", "safetensors"])
def test_files_that_cannot_be_read_now_are_not_called_damaged(target, tmp_path, monkeypatch, number):
    cache = fill(target, tmp_path)

    def fail(path, *args, **options):
        raise OSError("the disk says so") if number is None else OSError(number, "the disk says so", str(path))

    # safetensors' own errors have no number and no path.
    monkeypatch.setattr(*((module, "safe_open") if number is None else (module.Path, "open")), fail)
    with pytest.raises(OSError, match=r"the disk says so: '.*/states/.*\.safetensors'") as caught:
        cache.read(ROWS[0])
    assert caught.value.errno == number
    if number is not None:
        with pytest.raises(OSError, match=r"the disk says so: '.*/target.safetensors'"):
            cache.borrowed()


def test_space_is_estimated_and_refused_before_anything_is_computed(target, tmp_path, monkeypatch, num_passes):
    fill(target, tmp_path / "a")
    sizes = sum(path.stat().st_size for path in files(tmp_path / "a"))
    assert NUM_TOKENS * ROW_BYTES <= sizes <= NUM_TOKENS * ROW_BYTES + 100 * len(ROWS)

    needed, folder, before = NUM_TOKENS * ROW_BYTES, tmp_path / "new" / "cache", num_passes()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(ValueError, match=r"does not fit into .* 0.00 MiB are free. Make room, or use fewer examples"):
        fill(target, folder)
    assert not folder.parent.exists() and num_passes() == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert len(fill(target, folder)) == 6


@pytest.mark.parametrize("error", FULL, ids=["os", "safetensors", "permission"])
def test_full_disk_leaves_what_was_finished_and_says_so(target, tmp_path, monkeypatch, error, num_passes):
    honest, calls = module.save_file, []

    def write(tensors, path):
        calls.append(path)
        if len(calls) > 3:
            path.write_bytes(b"partial")
            raise error
        honest(tensors, path)

    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match="could not be written .*No space left on device.* The 3 examples") as caught,
    ):
        patch.setattr(module, "save_file", write)
        fill(target, tmp_path)
    assert caught.value.__cause__ is error
    assert len(files(tmp_path)) == 3 and not list(tmp_path.rglob("*.tmp"))
    before = num_passes()
    cache = fill(target, tmp_path)
    assert num_passes() - before == 3
    assert_holds(cache, target)


def test_a_target_that_is_trained_besides_is_read_without_dropout_and_left_in_its_modes(make_target, tmp_path):
    target = make_target(attention_dropout=0.5)
    target.train()
    target.model.layers[1].eval()
    modes = [module.training for module in target.modules()]
    cache = fill(target, tmp_path)
    assert [module.training for module in target.modules()] == modes
    assert_holds(cache, target.eval())
