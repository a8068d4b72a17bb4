"""The feature cache: what is read is what the target said, whatever was interrupted, damaged or mixed up before."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hf_dspark import DSparkConfig
from hf_dspark.training import feature_cache, shards
from hf_dspark.training.blocks import target_states
from hf_dspark.training.feature_cache import FeatureCache, cache_features, estimate_cache_bytes, row_key

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12], [3, 4, 5, 6, 7], [20], [21, 22, 23], [30, 31, 32, 33]]
ROW_BYTES = 2 * 3 * 32  # two tapped layers and the last hidden state, per token
NUM_TOKENS = sum(map(len, ROWS))
FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


def config_of(target, **overrides):
    return DSparkConfig.from_target(target.config, **{"markov_rank": 4, "target_layer_ids": [0, 2]} | overrides)


def fill(target, folder, rows=ROWS, **options):
    """Fill with a shard for about every other row."""
    options = {"batch_size": 2, "progress": False, "shard_bytes": 5 * ROW_BYTES} | options
    return cache_features(target, config_of(target), rows, folder, **options)


def shard_files(folder):
    return sorted(path.name for path in folder.glob("features-*"))


@pytest.fixture
def num_passes(target):
    """Count the target's rows."""
    seen = []
    target.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return lambda: sum(seen)


def assert_holds(cache, target, rows=ROWS):
    """Each row is what the target says of it alone, up to rounding."""
    for row in rows:
        ids = torch.tensor([row])
        expected = target_states(target, [0, 2], ids, torch.ones_like(ids), torch.device("cpu"), torch.float32)
        found = cache.read([row], dtype=torch.float32)
        torch.testing.assert_close(found.features, expected.features, atol=0.01, rtol=0.01)
        torch.testing.assert_close(found.last_hidden, expected.last_hidden, atol=0.01, rtol=0.01)


# ---- rows


def test_rows_are_read_as_they_were_added_in_bfloat16(target, tmp_path):
    states = {tuple(row): (torch.randn(len(row), 64), torch.randn(len(row), 32)) for row in ROWS}
    with FeatureCache(tmp_path, config_of(target), target) as cache:
        for row, (features, last_hidden) in states.items():
            cache.add(list(row), features, last_hidden)
            unwritten = cache.read([torch.tensor(row)])
            assert torch.equal(unwritten.features[0], features.bfloat16())
    again = FeatureCache(tmp_path, config_of(target))
    assert len(again) == 6 and again.num_tokens == NUM_TOKENS
    batch = again.read([ROWS[1], {"input_ids": ROWS[0]}])
    assert batch.features.shape == (2, 6, 64) and batch.last_hidden.shape == (2, 6, 32)
    for index, row in enumerate((ROWS[1], ROWS[0])):
        features, last_hidden = states[tuple(row)]
        assert torch.equal(batch.features[index, : len(row)], features.bfloat16())
        assert torch.equal(batch.last_hidden[index, : len(row)], last_hidden.bfloat16())
        assert not batch.features[index, len(row) :].any() and not batch.last_hidden[index, len(row) :].any()
    assert again.read([ROWS[1]], dtype=torch.float32).features.dtype == torch.float32


def test_packed_rows_are_documents_one_behind_the_other(target, tmp_path):
    cache = fill(target, tmp_path)
    batch = cache.read([ROWS[1], ROWS[2], ROWS[3]], documents=[2, 1])
    assert batch.features.shape == (2, 7, 64)
    assert torch.equal(batch.features[0, 2:], cache.read([ROWS[2]]).features[0])
    assert torch.equal(batch.last_hidden[1, :1], cache.read([ROWS[3]]).last_hidden[0])
    with pytest.raises(ValueError, match=r"documents \[2, 2\] must be positive and add up to 3 rows"):
        cache.read(ROWS[:3], documents=[2, 2])


def test_filling_keeps_what_the_target_says_of_each_row(target, tmp_path):
    cache = fill(target, tmp_path)
    assert len(shard_files(tmp_path)) >= 3
    assert_holds(cache, target)
    assert_holds(FeatureCache(tmp_path, config_of(target)), target)


def test_rows_are_found_whatever_their_order_and_type(target, tmp_path):
    cache = fill(target, tmp_path, [{"input_ids": row, "loss_mask": row} for row in ROWS])
    assert all(torch.tensor(row) in cache for row in reversed(ROWS))
    assert ROWS[0][:-1] not in cache and [*ROWS[1], 12] not in cache and [12, 11] not in cache
    with pytest.raises(KeyError, match="a row of 2 tokens .* is not in the cache"):
        cache.read([[12, 11]])


def test_rows_that_are_there_are_not_computed_again(target, tmp_path, num_passes):
    fill(target, tmp_path, [*ROWS[:4], ROWS[0]])
    assert num_passes() == 4
    cache = fill(target, tmp_path, ROWS[::-1])
    assert num_passes() == 6 and len(cache) == 6
    before = cache.read([ROWS[0]]).features
    cache.add(ROWS[0], torch.zeros(6, 64), torch.zeros(6, 32))
    assert torch.equal(cache.read([ROWS[0]]).features, before)


@pytest.mark.parametrize(
    ("row", "message"),
    [([], "at least one"), ([1.5], "token ids"), ("text", "token ids"), ({"prompt": "x"}, "token ids"),
     (torch.ones(1, 3).long(), "token ids"), ([3, 48], r"row 0 has token ids in \[3, 48\].*ends at 47"),
     ([-1, 3], r"row 0 has token ids in \[-1, 3\]")],
)  # fmt: skip
def test_rows_that_are_no_token_ids_are_refused_before_anything_is_written(target, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        fill(target, tmp_path / "cache", [row])
    assert not (tmp_path / "cache").exists()


def test_states_of_another_shape_are_refused(target, tmp_path):
    cache = FeatureCache(tmp_path, config_of(target), target)
    with pytest.raises(ValueError, match=r"\(2, 64\) and \(2, 32\), got \(3, 64\) and \(3, 32\): cut off the padding"):
        cache.add([1, 2], torch.zeros(3, 64), torch.zeros(3, 32))


# ---- without the target


def test_draft_scores_from_a_cache_as_with_its_target(target, make_draft, tmp_path):
    cache = fill(target, tmp_path)
    draft = make_draft(target, target_layer_ids=[0, 2])
    ids, hidden = torch.arange(48)[None], torch.randn(2, 3, 32)
    rows, logits = draft.embed(ids), draft.base_logits(hidden)
    borrowed = FeatureCache(tmp_path, draft.config).borrowed()
    draft._borrowed = (borrowed,)
    assert torch.equal(draft.embed(ids), rows) and torch.equal(draft.base_logits(hidden), logits)
    last_hidden = cache.read([ROWS[0]], dtype=torch.float32).last_hidden
    torch.testing.assert_close(
        draft.base_logits(last_hidden), target(torch.tensor([ROWS[0]])).logits, atol=0.05, rtol=0.05
    )


def test_opening_needs_a_cache_or_a_target_and_adding_a_target(target, tmp_path):
    with pytest.raises(ValueError, match=r"no feature cache in .*meta.json is missing.*cache_features"):
        FeatureCache(tmp_path / "nothing", config_of(target))
    new = FeatureCache(tmp_path / "nothing", config_of(target), target)
    with pytest.raises(ValueError, match="is not there: fill the cache"):
        new.borrowed()
    assert not (tmp_path / "nothing").exists()
    fill(target, tmp_path)
    with pytest.raises(ValueError, match="opened with the target"):
        FeatureCache(tmp_path, config_of(target)).add([1], torch.zeros(1, 64), torch.zeros(1, 32))


# ---- another model


def test_cache_of_another_model_is_refused_and_the_difference_named(target, make_target, tmp_path):
    fill(target, tmp_path)
    other = make_target()
    other.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1e-3
    with pytest.raises(ValueError, match="another target.*target_fingerprint: cache .*, here .*revisions"):
        FeatureCache(tmp_path, config_of(other), other)
    with pytest.raises(ValueError, match=r"target_layer_ids: cache \[0, 2\], here \[2, 0\]"):
        FeatureCache(tmp_path, config_of(target, target_layer_ids=[2, 0]))
    bigger = make_target(vocab_size=50)
    with pytest.raises(ValueError, match="vocab_size: cache 48, here 50"):
        FeatureCache(tmp_path, config_of(bigger))
    assert len(FeatureCache(tmp_path, config_of(make_target()), make_target())) == 6


def test_cache_of_another_format_is_refused(target, tmp_path):
    fill(target, tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version of hf_dspark reads 1"):
        FeatureCache(tmp_path, config_of(target))


def test_shards_without_a_model_are_not_adopted(target, tmp_path):
    fill(target, tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ValueError, match="has shards but no meta.json: delete the folder"):
        FeatureCache(tmp_path, config_of(target), target)


# ---- interruptions


def interrupt(monkeypatch, module, name, after, error):
    """Let a function raise at its call number `after`."""
    honest, calls = getattr(module, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == after:
            raise error
        return honest(*args, **kwargs)

    monkeypatch.setattr(module, name, interrupted)


def test_filling_resumes_behind_the_last_row(target, tmp_path, monkeypatch, num_passes):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, feature_cache, "target_states", 3, KeyboardInterrupt())
        fill(target, tmp_path)
    assert len(FeatureCache(tmp_path, config_of(target))) == 4
    cache = fill(target, tmp_path)
    assert num_passes() == 6
    assert_holds(cache, target)


def test_shards_that_were_not_finished_are_dropped_and_their_rows_computed_again(
    target, tmp_path, monkeypatch, num_passes
):
    """As a killed process leaves them: one file half written, one not yet listed, one line half written."""
    fill(target, tmp_path, ROWS[:4])
    index = tmp_path / "index-00000.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    lost = json.loads(lines[-1])
    index.write_text("".join(lines[:-1]) + lines[-1][:40])
    (tmp_path / "features-00000-0123456789abcdef.safetensors.00000.tmp").write_bytes(b"half")
    (tmp_path / "features-00007-0123456789abcdef.safetensors.00007.tmp").write_bytes(b"another rank's")
    opened = FeatureCache(tmp_path, config_of(target))
    assert len(opened) == 4 - len(lost["rows"])
    assert lost["file"] in shard_files(tmp_path)  # reading removes nothing
    cache = fill(target, tmp_path)
    assert num_passes() == 6 + len(lost["rows"])
    assert lost["file"] not in shard_files(tmp_path)
    assert [name for name in shard_files(tmp_path) if name.endswith(".tmp")] == [
        "features-00007-0123456789abcdef.safetensors.00007.tmp"
    ]
    assert_holds(cache, target)
    assert_holds(FeatureCache(tmp_path, config_of(target)), target)


def test_nothing_is_lost_when_the_index_cannot_be_written(target, tmp_path, monkeypatch):
    cache = fill(target, tmp_path, ROWS[:4])
    before, index = shard_files(tmp_path), (tmp_path / "index-00000.jsonl").read_text()
    cache.add(ROWS[4], torch.zeros(3, 64), torch.zeros(3, 32))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="is full"):
        interrupt(patch, os, "fsync", 2, FULL[0])  # the first is the shard's
        cache.flush()
    assert shard_files(tmp_path) == before and (tmp_path / "index-00000.jsonl").read_text() == index
    cache.flush()
    assert len(FeatureCache(tmp_path, config_of(target))) == 5


# ---- several processes


def test_ranks_share_the_rows_and_see_each_others(target, tmp_path, num_passes):
    first = fill(target, tmp_path, rank=0, num_ranks=2)
    assert 0 < len(first) < 6
    second = fill(target, tmp_path, rank=1, num_ranks=2)
    assert num_passes() == 6 and len(second) == 6
    assert len(first) < 6 and ROWS[0] in second
    first.refresh()
    assert len(first) == 6
    assert_holds(first, target)
    assert {path.name for path in tmp_path.glob("index-*")} == {"index-00000.jsonl", "index-00001.jsonl"}
    assert {name[:14] for name in shard_files(tmp_path)} == {"features-00000", "features-00001"}


def test_ranks_that_start_together_make_one_cache(target, make_target, tmp_path):
    caches = [FeatureCache(tmp_path, config_of(target), target, rank=rank) for rank in range(2)]
    stranger = FeatureCache(tmp_path, config_of(target), make_target(seed=5), rank=2)
    for cache, row in zip(caches, ROWS, strict=False):
        cache.add(row, torch.full((len(row), 64), cache._store.rank), torch.zeros(len(row), 32))
    with pytest.raises(ValueError, match="target_fingerprint"):
        stranger.add([1], torch.zeros(1, 64), torch.zeros(1, 32))
    for cache in caches:
        cache.flush()
    both = FeatureCache(tmp_path, config_of(target), target)
    assert [both.read([row]).features.mean().item() for row in ROWS[:2]] == [0, 1]
    assert both.borrowed().embedding.weight.shape == (48, 32)


# ---- damage


def flip_bit(path):
    with open(path, "rb+") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_shard_with_a_flipped_bit_is_found_named_and_filled_again(target, tmp_path, num_passes):
    fill(target, tmp_path)
    path = tmp_path / shard_files(tmp_path)[0]
    flip_bit(path)
    cache = FeatureCache(tmp_path, config_of(target))
    with pytest.raises(ValueError, match=f"{path.name} is damaged: its SHA-256.*Delete it"):
        cache.read(ROWS)
    FeatureCache(tmp_path, config_of(target), verify=False).read(ROWS)
    path.unlink()
    lost = 6 - len(FeatureCache(tmp_path, config_of(target)))
    again = fill(target, tmp_path)
    assert lost > 0 and num_passes() == 6 + lost
    assert_holds(again, target)


def test_truncated_shard_is_found_when_the_cache_is_opened_and_when_it_is_read(target, tmp_path):
    fill(target, tmp_path)
    opened = FeatureCache(tmp_path, config_of(target), verify=False)
    path = tmp_path / shard_files(tmp_path)[0]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{path.name} is damaged: it has .* bytes, not"):
        opened.read(ROWS)
    with pytest.raises(ValueError, match=f"{path.name} is damaged: it has .* bytes, not"):
        FeatureCache(tmp_path, config_of(target))


def test_digests_are_compared_once_per_shard(target, tmp_path, monkeypatch):
    writer = fill(target, tmp_path)
    checked, honest = [], shards.check_digest
    monkeypatch.setattr(shards, "check_digest", lambda path, digest: (checked.append(path.name), honest(path, digest)))
    cache = FeatureCache(tmp_path, config_of(target))
    writer.read(ROWS)
    assert not checked  # opening checks none, and a writer knows its own
    for _ in range(2):
        cache.read(ROWS)
    assert sorted(checked) == shard_files(tmp_path)


def test_damaged_weights_of_the_target_are_refused_and_written_again(target, tmp_path):
    fill(target, tmp_path)
    flip_bit(tmp_path / "target.safetensors")
    with pytest.raises(ValueError, match="target.safetensors is damaged: its SHA-256"):
        FeatureCache(tmp_path, config_of(target)).borrowed()
    (tmp_path / "target.safetensors").unlink()
    fill(target, tmp_path)
    weights = FeatureCache(tmp_path, config_of(target)).borrowed()
    assert torch.equal(weights.lm_head.weight, target.lm_head.weight)


@pytest.mark.parametrize("name", ["../features-00000-0123456789abcdef.safetensors", "/etc/passwd", "meta.json", 7])
def test_index_that_names_other_files_is_refused(target, tmp_path, name):
    folder = tmp_path / "cache"
    fill(target, folder)
    shutil.copy(folder / shard_files(folder)[0], tmp_path / "features-00000-0123456789abcdef.safetensors")
    index = folder / "index-00000.jsonl"
    record = json.loads(index.read_text().splitlines()[0]) | {"file": name}
    with open(index, "a") as file:
        file.write(json.dumps(record) + "\n")
    number = len(index.read_text().splitlines())
    with pytest.raises(ValueError, match=f"line {number} of .*index-00000.jsonl is damaged .*no name of a shard"):
        FeatureCache(folder, config_of(target))


@pytest.mark.parametrize("line", ["{", "[]", '{"file": 1}', "null"])
def test_index_with_a_line_of_rubbish_is_refused(target, tmp_path, line):
    fill(target, tmp_path)
    with open(tmp_path / "index-00000.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="is damaged .*Delete the line"):
        FeatureCache(tmp_path, config_of(target))


def test_shard_with_a_row_of_another_length_is_refused(target, tmp_path):
    fill(target, tmp_path, ROWS[:1])
    path = tmp_path / shard_files(tmp_path)[0]
    save_file({row_key(ROWS[0]): torch.zeros(5, 96, dtype=torch.bfloat16)}, path)
    index = tmp_path / "index-00000.jsonl"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"bytes": path.stat().st_size}) + "\n")
    with pytest.raises(ValueError, match=r"damaged: a row has shape \[5, 96\] BF16, not \[6, 96\] BF16"):
        FeatureCache(tmp_path, config_of(target), verify=False).read([ROWS[0]])


# ---- the disk


def test_estimate_is_what_the_shards_take(target, tmp_path):
    fill(target, tmp_path, shard_bytes=10**9)
    (name,) = shard_files(tmp_path)
    estimate = estimate_cache_bytes(NUM_TOKENS, config_of(target))
    assert estimate == NUM_TOKENS * ROW_BYTES
    assert estimate <= (tmp_path / name).stat().st_size <= estimate + 200 * (len(ROWS) + 1)


def test_estimate_is_printed_and_counts_new_rows_only(target, tmp_path, capsys):
    fill(target, tmp_path, ROWS[:3])
    assert "13 tokens x 96 values in bfloat16, and the target's embedding and LM head: 0.01 MiB needed" in (
        capsys.readouterr().out
    )
    fill(target, tmp_path, [*ROWS, ROWS[5]])
    assert "8 tokens x 96 values in bfloat16: 0.00 MiB needed" in capsys.readouterr().out


def test_disk_that_is_too_small_is_refused_before_anything_is_computed_or_written(
    target, tmp_path, monkeypatch, num_passes
):
    needed = NUM_TOKENS * ROW_BYTES + 2 * 48 * 32 * 4
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    folder = tmp_path / "new" / "cache"
    with pytest.raises(ValueError, match=r"does not fit into .*MiB needed, .*MiB free. Use fewer rows, a shorter"):
        fill(target, folder)
    assert not folder.parent.exists() and num_passes() == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert len(fill(target, folder)) == 6


@pytest.mark.parametrize("error", FULL, ids=["os", "safetensors"])
def test_full_disk_leaves_what_was_finished_and_says_so(target, tmp_path, monkeypatch, error, num_passes):
    honest, calls = shards.save_file, []

    def save(tensors, path):
        calls.append(path)
        if len(calls) > 1:
            path.write_bytes(b"partial")
            raise error
        honest(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"is full. The \d rows written") as caught:
        patch.setattr(shards, "save_file", save)
        fill(target, tmp_path)
    assert caught.value.errno == errno.ENOSPC and caught.value.__cause__ is error
    assert len(calls) == 2 and len(shard_files(tmp_path)) == 1 and not list(tmp_path.glob("*.tmp"))
    cache = FeatureCache(tmp_path, config_of(target))
    assert 0 < len(cache) < 6
    assert_holds(cache, target, [row for row in ROWS if row in cache])
    before = num_passes()
    again = fill(target, tmp_path)
    assert num_passes() - before == 6 - len(cache)
    assert_holds(again, target)


def test_rows_in_memory_survive_a_full_disk(target, tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, config_of(target), target)
    cache.add([1, 2], torch.ones(2, 64), torch.ones(2, 32))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="1 more are in memory"):
        interrupt(patch, shards, "save_file", 1, FULL[0])
        cache.flush()
    assert cache.read([[1, 2]]).features.mean() == 1
    cache.flush()
    assert [1, 2] in FeatureCache(tmp_path, config_of(target))


def test_other_errors_while_writing_are_passed_on_and_leave_no_file(target, tmp_path, monkeypatch):
    cache = fill(target, tmp_path, ROWS[:2])
    before = shard_files(tmp_path)
    cache.add([1, 2], torch.ones(2, 64), torch.ones(2, 32))
    with monkeypatch.context() as patch, pytest.raises(PermissionError, match="read-only"):
        interrupt(patch, os, "replace", 1, PermissionError("read-only"))
        cache.flush()
    assert shard_files(tmp_path) == before


def test_few_shards_are_open_at_a_time(target, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 2)
    cache = fill(target, tmp_path, shard_bytes=1)
    assert len(shard_files(tmp_path)) == 6
    assert_holds(cache, target, ROWS + ROWS[::-1])
    assert len(cache._store._handles) == 2


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"rank": 2, "num_ranks": 2}, {"shard_bytes": 0}, {"rank": -1}])
def test_impossible_options_are_refused(target, tmp_path, options):
    with pytest.raises(ValueError, match="must"):
        fill(target, tmp_path, **options)


def test_two_writers_of_one_rank_are_refused(target, tmp_path):
    """One would take the other's unfinished shards for leftovers."""
    pytest.importorskip("fcntl")
    states = torch.zeros(len(ROWS[0]), 64), torch.zeros(len(ROWS[0]), 32)
    first, second = (FeatureCache(tmp_path, config_of(target), target) for _ in range(2))
    first.add(ROWS[0], *states)
    with pytest.raises(ValueError, match="something else is writing to .* as rank 0: wait for it, use another folder"):
        second.add(ROWS[0], *states)
    with first:
        pass  # done
    second.refresh()
    other = FeatureCache(tmp_path, config_of(target), target, rank=1)
    other.add(ROWS[1], torch.zeros(len(ROWS[1]), 64), torch.zeros(len(ROWS[1]), 32))
    other.flush()
