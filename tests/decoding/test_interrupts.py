"""An interrupt at any moment leaves the user's model as it was: KeyboardInterrupt, an exception, another thread.
`HF_DSPARK_INTERRUPTS=N` draws more random moments than the tests do by default."""

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, configuration_utils

from hf_dspark import DecodingOptions, generate_many
from hf_dspark.cpu import linears
from hf_dspark.decoding import assisted, hook, loop, wraps
from hf_dspark.models import slot_cache
from hf_dspark.targets import feature_capture, patched_forward, recurrent, row_attention, slot_attention, support
from tests.hybrids import HAVE_PROTOCOL
from tests.targets.test_recurrent import pair_of

# Where models are switched, hooked and put back. torch.no_grad() has a gap as it is entered, which plain `generate()`
# has, too: it is not watched.
WATCHED = (contextlib, slot_attention, feature_capture, linears, loop, assisted, hook, wraps, slot_cache, support)
WATCHED += (torch.nn.modules.module, torch.utils.hooks, configuration_utils, recurrent, row_attention, patched_forward)
FILES = {module.__file__ for module in WATCHED}


def residue(*models):
    """What a call may have left in models, and in this thread: nothing, if all is as it was."""
    found = [] if torch.is_grad_enabled() else ["gradients are off"]
    for model in models:
        for name, module in model.named_modules():
            hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
            found += [f"{name}: {hooks} hooks"] if hooks else []
            found += [f"{name}: forward"] if "forward" in vars(module) else []
            if "hf_dspark" in str(getattr(getattr(module, "config", None), "_attn_implementation", None)):
                found.append(f"{name}: attention")
    return found


@pytest.fixture(params=["greedy", "sampled", "batch", "queue", "transformers"])
def way(request, target, draft, reference):
    """One way to decode with the draft, as a function; and whether two calls give the same tokens."""
    short, options = reference["prompts"][0][:6], {"max_new_tokens": 5}
    rows = torch.tensor([short] * (3 if request.param == "batch" else 1))
    options |= {"attention_mask": torch.ones_like(rows), "do_sample": request.param == "sampled"}
    if request.param == "transformers":
        draft.decoding = DecodingOptions(use_transformers_loop=True)

    def decode():
        if request.param == "queue":
            done = generate_many(target, draft, [short, short[:3], short[:5]], None, 2, False, max_new_tokens=8)
            return [each.token_ids.tolist() for each in sorted(done, key=lambda each: each.index)]
        torch.manual_seed(0)
        return target.generate(rows, assistant_model=draft, **options).tolist()

    return decode


def interrupt_at_each_place(decode, times, step=1):
    """Call `decode` once for each place where Python looks for signals in a watched file, and raise there: when a
    function is entered, and after a call of a built-in one. Yield the places; `step` leaves all but every n-th out."""
    places, wanted, seen = [], None, {}

    def profiler(frame, event, argument):
        if event not in ("call", "c_return") or frame.f_code.co_filename not in FILES:
            return
        place = (frame.f_code.co_filename, frame.f_lineno, event, getattr(argument, "__name__", ""))
        seen[place] = seen.get(place, 0) + 1
        if wanted is None and seen[place] <= times:
            places.append((*place, seen[place]))
        elif (*place, seen[place]) == wanted:
            raise KeyboardInterrupt

    def profiled():
        seen.clear()
        sys.setprofile(profiler)
        try:
            return decode()
        finally:
            sys.setprofile(None)

    profiled()
    for wanted in places[::step]:
        with contextlib.suppress(KeyboardInterrupt):
            profiled()
        yield wanted


@pytest.mark.parametrize(
    ("way", "times", "step"),
    [
        ("batch", 1, 5),
        *(pytest.param(name, 2, 1, marks=pytest.mark.slow) for name in ("batch", "queue", "transformers")),
    ],
    indirect=["way"],
)
def test_an_interrupt_at_any_place_leaves_nothing_switched(way, times, step, target, draft):
    expected, left = way(), {}
    assert residue(target, draft) == []
    for file, line, *event in interrupt_at_each_place(way, times, step):
        left[f"{Path(file).name}:{line} {event}"] = residue(target, draft)
    assert len(left) > 100 / step
    assert not any(left.values()), {place: kept for place, kept in left.items() if kept}
    assert way() == expected


@pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "recurrent_gemma", "glm5_next"])
def test_an_interrupt_at_any_place_leaves_no_recurrent_layer_switched(family):
    target, draft = pair_of(family)
    rows = torch.arange(3, 15).view(2, 6)
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 6, "do_sample": False}
    plain = target.generate(rows, **options)
    before = attributes_of(target)
    for place in interrupt_at_each_place(lambda: target.generate(rows, assistant_model=draft, **options), times=1):
        assert residue(target, draft) == [], place
        assert attributes_of(target) == before, place
    assert torch.equal(target.generate(rows, assistant_model=draft, **options), plain)


def attributes_of(target):
    """Return what the modules of a target have as attributes besides parameters, hooks and modules."""
    kinds = (int, float, str, tuple, torch.Tensor, type(None))
    return {
        f"{module}.{name}": id(value) if isinstance(value, torch.Tensor) else value
        for module, each in target.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, kinds)
    }


def interrupt_at_random(way, target, draft, count):
    """Let a timer interrupt so many calls; after each, nothing is left, and now and then the next calls are right."""
    rows = torch.arange(6)[None]
    plain = target.generate(rows, max_new_tokens=8, do_sample=False).tolist()
    expected, moments, interrupted = way(), random.Random(0), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    started = time.perf_counter()
    way()
    duration = time.perf_counter() - started
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupted < count:
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(duration * 0.01, duration))
                started = time.perf_counter()
                way()
                signal.setitimer(signal.ITIMER_REAL, 0)
                duration = min(duration, time.perf_counter() - started)  # the first one may have been disturbed
            except KeyboardInterrupt:
                interrupted += 1
                torch.set_grad_enabled(True)  # torch's own gap
                assert residue(target, draft) == []
                if interrupted % 20 == 0:
                    assert way() == expected
                    assert target.generate(rows, max_new_tokens=8, do_sample=False).tolist() == plain
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert way() == expected


@pytest.mark.slow
def test_interrupts_at_random_moments_leave_nothing_switched(way, target, draft):
    interrupt_at_random(way, target, draft, int(os.environ.get("HF_DSPARK_INTERRUPTS", "40")))


@pytest.mark.slow
def test_ten_thousand_interrupts_leave_nothing_switched(way, target, draft):
    interrupt_at_random(way, target, draft, 2000)


@pytest.mark.one_in(3)
def test_exceptions_in_a_worker_thread_leave_nothing_switched(way, target, draft):
    expected, moments = way(), random.Random(0)
    for _ in range(10):
        worker = threading.Thread(target=forever, args=(way,))
        worker.start()
        time.sleep(moments.uniform(0.001, 0.05))
        while worker.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit))
            worker.join(0.5)
        assert residue(target, draft) == []
        assert way() == expected


def forever(way):
    while True:
        way()


def test_a_target_that_several_interrupts_left_switched_is_healed_by_the_next_call(target, draft, monkeypatch):
    rows = torch.arange(6)[None]
    plain = target.generate(rows, max_new_tokens=8, do_sample=False)

    def gives_up(switch):
        if switch.originals:
            raise KeyboardInterrupt

    for options in ({}, {"assistant_model": draft}):
        with monkeypatch.context() as patch:
            patch.setattr(support.Switch, "restore", gives_up)
            with pytest.raises(KeyboardInterrupt):
                target.generate(rows, max_new_tokens=8, do_sample=False, assistant_model=draft)
        assert "model.layers.0.self_attn: attention" in residue(target)
        assert torch.equal(target.generate(rows, max_new_tokens=8, do_sample=False, **options), plain)
        assert residue(target, draft) == []


class _Asks(StoppingCriteria):
    """Runs the target without a draft after each token."""

    def __init__(self, target, **options):
        self.target, self.options = target, options

    def __call__(self, input_ids, scores, **kwargs):
        mask = torch.ones_like(input_ids)
        self.target.generate(input_ids, attention_mask=mask, max_new_tokens=2, do_sample=False, **self.options)
        self.target(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("with_draft", [False, True], ids=["plain", "drafted"])
def test_a_criterion_may_call_the_target_itself(target, draft, with_draft):
    rows, options = torch.arange(12).view(2, 6), {"assistant_model": draft} if with_draft else {}
    options = {"stopping_criteria": StoppingCriteriaList([_Asks(target, **options)])}
    kwargs = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(rows, **kwargs)
    assert torch.equal(target.generate(rows, assistant_model=draft, **kwargs, **options), plain)
