"""The engine against the same model run alone, token by token, without pages, batches or a schedule.

Equality of tokens is exact in what the engine decides: which keys a token sees, at which position, with which
random number. It also needs the logits of a token to be equal whatever the batch. The ops guarantee that for
attention, but a matrix product of torch may differ in its last bits with the number of rows, so that two
tokens of nearly equal logits could trade places. The models here have clear margins; the seeds are fixed.
"""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import alone, attend_to_all, tiny_model

import paged_ops
from paged_ops.testing.backends import Target
from reference_engine.engine import Completion, Engine
from reference_engine.request import FinishReason, RequestRefused
from reference_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def prompts_of(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens(completions: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in completions for completion in group]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, seed=5)]
)
def test_batched_equals_alone(dtype: torch.dtype, params: SamplingParams) -> None:
    model = tiny_model(dtype)
    prompts = prompts_of(1, 8)
    engine = Engine(model, num_blocks=200, block_size=4)
    done = engine.generate(prompts, params)
    assert tokens(done) == [alone(model, prompt, params) for prompt in prompts]
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_every_backend(target: Target, dtype: torch.dtype) -> None:
    """Prefill in chunks, decode and a fork's copy, on each instruction set and on the CUDA kernels."""
    model = tiny_model(dtype, device=target.device)
    prompts, params = prompts_of(9, 2, longest=12), SamplingParams(temperature=0.9, n=2, seed=6, max_tokens=5)
    with target.use():
        engine = Engine(model, num_blocks=40, block_size=4, max_step_tokens=7)
        done = tokens(engine.generate(prompts, params))
        if dtype is torch.float32:
            expected = [alone(model, prompt, params, index) for prompt in prompts for index in (0, 1)]
        else:  # backends round 16-bit probabilities differently: each is held to itself, one prompt at a time
            expected = [
                t for p in prompts for t in tokens(Engine(model, num_blocks=40).generate([p], params))
            ]
    assert engine.scheduler.counters.copied_blocks > 0
    assert done == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_does_not_change_a_token(dtype: torch.dtype, prefix_caching: bool) -> None:
    model = tiny_model(dtype)
    prompts = prompts_of(2, 8)
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=1)
    engine = Engine(model, num_blocks=20, block_size=4, prefix_caching=prefix_caching)
    done = engine.generate(prompts, params)
    assert engine.scheduler.counters.preemptions > 0
    assert tokens(done) == [alone(model, prompt, params) for prompt in prompts]


@pytest.mark.parametrize("budget", [1, 3, 16, 64, 1024])
def test_any_budget_gives_the_same_tokens(model: Any, budget: int) -> None:
    prompts = prompts_of(3, 5, longest=70)
    engine = Engine(model, num_blocks=200, block_size=3, max_step_tokens=budget)
    assert tokens(engine.generate(prompts, GREEDY)) == [alone(model, prompt, GREEDY) for prompt in prompts]


@pytest.mark.parametrize("num_blocks", [100, 16])
def test_samples_share_the_prompt_and_equal_independent_runs(model: Any, num_blocks: int) -> None:
    (prompt,) = prompts_of(4, 1)
    prompt = (prompt * 10)[:21]
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=20)
    engine = Engine(model, num_blocks=num_blocks, block_size=4)
    (samples,) = engine.generate([prompt], params)
    assert engine.accounting.peak_saved_blocks >= 10 and engine.scheduler.counters.copied_blocks >= 2
    assert [s.token_ids for s in samples] == [alone(model, prompt, params, index) for index in range(3)]
    assert len({tuple(s.token_ids) for s in samples}) == 3
    assert (engine.scheduler.counters.preemptions > 0) == (num_blocks == 16)


def test_second_turn_finds_the_first_in_the_cache(model: Any) -> None:
    (first,) = prompts_of(5, 1)
    engine = Engine(model, num_blocks=64, block_size=4)
    ((turn,),) = engine.generate([first], GREEDY)
    second = first + turn.token_ids + [1, 2, 3]
    ((answer,),) = engine.generate([second], GREEDY)
    assert engine.scheduler.counters.hit_tokens == (len(first) + len(turn.token_ids) - 1) // 4 * 4
    assert answer.token_ids == alone(model, second, GREEDY)


def test_pieces_are_the_text_and_never_break_a_character(model: Any) -> None:
    engine = Engine(model, num_blocks=64)
    params = SamplingParams(temperature=1.5, max_tokens=60, n=2, seed=2)
    number = engine.add("Grüße, 世界 👋", params)
    completions = engine.completions_of(number)
    text = ["", ""]
    for piece in engine.stream():
        piece.text.encode()  # or UnicodeEncodeError
        text[piece.completion.sample_index] += piece.text
        assert piece.completion.text == text[piece.completion.sample_index]
    for completion in completions:
        assert completion.text == model.tokenizer.decode(completion.token_ids) != ""
        assert completion.first_token_at is not None and completion.finished_at is not None


def test_stop_string_cuts_the_text_across_tokens(model: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=8)
    ((whole,),) = Engine(model, num_blocks=64).generate([[5, 6, 7]], params)
    stop = whole.text[10:13]
    assert len(stop) == 3 and whole.text.find(stop) == 10
    stopping = SamplingParams(temperature=1.0, max_tokens=40, seed=8, stop=(stop, "never"))
    engine = Engine(model, num_blocks=64)
    engine.add([5, 6, 7], stopping)
    pieces = list(engine.stream())
    (cut,) = {id(p.completion): p.completion for p in pieces}.values()
    assert cut.text == whole.text[:10] == "".join(p.text for p in pieces)
    assert cut.finish_reason is FinishReason.STOP and len(cut.token_ids) < 40
    assert not engine.has_work and engine.scheduler.pool.num_used == 0


def test_stop_tokens_end_and_are_not_text(model: Any) -> None:
    ((whole,),) = Engine(model, num_blocks=64).generate([[9] * 5], GREEDY)
    stop = whole.token_ids[6]
    first = whole.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,))
    ((cut,),) = Engine(model, num_blocks=64).generate([[9] * 5], params)
    assert cut.token_ids == whole.token_ids[: first + 1] and cut.finish_reason is FinishReason.STOP
    assert cut.text == model.tokenizer.decode(whole.token_ids[:first])


def test_end_of_sequence_token_ends_unless_ignored(model: Any) -> None:
    whole = alone(model, [9] * 5, GREEDY)
    ending = dataclasses.replace(model, eos_token_ids=(whole[6],))
    ((ended,),) = Engine(ending, num_blocks=64).generate([[9] * 5], GREEDY)
    assert ended.token_ids == whole[: whole.index(whole[6]) + 1] and ended.finish_reason is FinishReason.STOP
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True)
    ((longer,),) = Engine(ending, num_blocks=64).generate([[9] * 5], ignoring)
    assert longer.token_ids == whole and longer.finish_reason is FinishReason.LENGTH


def test_logprobs_are_those_of_the_model(model: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=True)
    ((done,),) = Engine(model, num_blocks=64).generate([[3, 1, 4]], params)
    tokens_in = torch.tensor([3, 1, 4, *done.token_ids])
    with torch.inference_mode():
        hidden = model.decoder(tokens_in, torch.arange(len(tokens_in)), attend_to_all)
        wanted = model.decoder.logits(hidden).log_softmax(-1)[range(2, 7), done.token_ids]
    assert done.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_abort_in_the_middle_leaves_the_others_as_they_were(model: Any) -> None:
    prompts = prompts_of(6, 4)
    engine = Engine(model, num_blocks=64, block_size=4)
    numbers = [engine.add(p, SamplingParams(temperature=0.0, max_tokens=24, n=2)) for p in prompts]
    kept = [engine.completions_of(number) for number in numbers]
    for _ in range(6):
        engine.step()
    aborted = engine.abort(numbers[1])
    assert [c.finish_reason for c in aborted] == [FinishReason.ABORT] * 2 and engine.abort(numbers[1]) == []
    so_far = [list(c.token_ids) for c in aborted]
    assert all(piece.completion.request_id != numbers[1] for piece in engine.stream())
    assert [c.token_ids for c in aborted] == so_far
    for index in (0, 2, 3):
        expected = alone(model, prompts[index], GREEDY)
        assert [c.token_ids for c in kept[index]] == [expected] * 2
    assert engine.scheduler.pool.num_used == 0


def test_a_reader_of_the_stream_may_abort_and_gets_no_more_of_it(model: Any) -> None:
    engine = Engine(model, num_blocks=64)
    numbers = [engine.add(prompt, GREEDY) for prompt in prompts_of(8, 3)]
    kept = engine.completions_of(numbers[0])[0]
    heard = []
    for piece in engine.stream():
        heard.append(piece.completion.request_id)
        if piece.completion is kept and len(kept.token_ids) == 5:
            engine.abort(numbers[1])  # whose piece of this very step is still to come
    assert heard.count(numbers[0]) == 24 == heard.count(numbers[2]) and heard.count(numbers[1]) == 4


@pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_fails_loses_no_request(model: Any, failure: BaseException) -> None:
    calls = 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:  # in the midst of a step: some layers are written, some are not
            raise failure
        paged_ops.write_kv_cache(*args)

    ops = SimpleNamespace(**{name: getattr(paged_ops, name) for name in paged_ops.__all__})
    ops.write_kv_cache = failing
    prompts = prompts_of(7, 4)
    engine = Engine(model, num_blocks=64, block_size=4, ops=ops)
    params = SamplingParams(temperature=1.0, max_tokens=12, n=2, seed=4)
    done = [engine.completions_of(engine.add(prompt, params)) for prompt in prompts]
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except type(failure):
            failures += 1
            assert failures < 100
    assert failures >= 3
    expected = [[alone(model, prompt, params, index) for index in range(2)] for prompt in prompts]
    assert [[c.token_ids for c in group] for group in done] == expected


def test_refused_requests_are_reported_while_others_go_on(model: Any) -> None:
    engine = Engine(model, num_blocks=8, block_size=4, max_model_len=50)
    done = engine.generate([[1] * 33, [2] * 5, [], [3] * 50, [999]], GREEDY)
    assert [group[0].error for group in done] == [
        "request 0: 33 tokens need 9 blocks of 4; the pool has 8",
        "",
        "request 2: the prompt is empty",
        "request 3: the prompt has 50 tokens; the model's context of 50 leaves room for 49 at most",
        "prompt: token id 999 is not in 0..256",
    ]
    assert done[1][0].token_ids == alone(model, [2] * 5, GREEDY)


def test_outgrowing_the_pool_is_an_error_of_that_request_only(model: Any) -> None:
    engine = Engine(model, num_blocks=5, block_size=4)
    long = SamplingParams(temperature=0.0, max_tokens=100)
    first, second = (engine.completions_of(engine.add([n, n], p))[0] for n, p in ((1, long), (2, GREEDY)))
    for _ in engine.stream():
        pass
    assert first.finish_reason is FinishReason.ERROR and len(first.token_ids) == 19
    assert first.error == "21 tokens need 6 blocks of 4; the pool has 5"
    assert first.token_ids == alone(model, [1, 1], long)[:19]
    assert second.finish_reason is FinishReason.ERROR or second.token_ids == alone(model, [2, 2], GREEDY)


def test_the_context_ends_a_sequence(model: Any) -> None:
    engine = Engine(model, num_blocks=64, max_model_len=30)
    ((done,),) = engine.generate([[7] * 20], SamplingParams(temperature=0.0, max_tokens=100))
    assert len(done.token_ids) == 10 and done.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="max_model_len: got 300, the model has 256 positions"):
        Engine(model, max_model_len=300)


def test_without_a_seed_samples_differ_from_run_to_run(model: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    runs = [Engine(model, num_blocks=64).generate([[1, 2, 3]], params)[0][0].token_ids for _ in range(2)]
    assert runs[0] != runs[1]


def test_higher_priority_is_served_first(model: Any) -> None:
    engine = Engine(model, num_blocks=16, block_size=4, max_step_seqs=1)
    late = engine.completions_of(engine.add([1] * 8, GREEDY, priority=1))[0]
    early = engine.completions_of(engine.add([2] * 8, GREEDY, priority=0))[0]
    for _ in engine.stream():
        pass
    assert early.finished_at < late.first_token_at  # type: ignore[operator]


def test_a_model_without_a_tokenizer_takes_token_ids_only(model: Any) -> None:
    engine = Engine(dataclasses.replace(model, tokenizer=None), num_blocks=16)
    with pytest.raises(RequestRefused, match="no tokenizer"):
        engine.add("text")
    with pytest.raises(RequestRefused, match="no tokenizer"):
        engine.add([1], SamplingParams(stop=("x",)))
    ((done,),) = engine.generate([[1, 2]], GREEDY)
    assert done.token_ids == alone(model, [1, 2], GREEDY) and done.text == ""


def test_a_request_whose_logits_are_no_numbers_ends_and_the_others_go_on(model: Any) -> None:
    engine = Engine(model, num_blocks=64, block_size=4)
    prompts = prompts_of(3, 3)
    wanted = Engine(model, num_blocks=64, block_size=4).generate(prompts, GREEDY)
    broken = engine.add(prompts[0], GREEDY)
    decoder = engine.runner.decoder

    class SomeNaN:
        device = decoder.device

        def __call__(self, *arguments: Any) -> Any:
            return decoder(*arguments)

        def logits(self, hidden: Any) -> Any:
            rows = decoder.logits(hidden).clone()
            if any(sequence.request.id == broken for sequence in engine.scheduler.running):
                rows[0] = float("nan")  # of the oldest request
            return rows

    engine.runner.decoder = SomeNaN()  # type: ignore[assignment]
    others = [engine.completions_of(engine.add(prompt, GREEDY)) for prompt in prompts[1:]]
    (failed,) = engine.completions_of(broken)
    for _ in engine.stream():
        pass
    assert failed.finish_reason is FinishReason.ERROR and "not finite" in failed.error
    assert [c.token_ids for (c,) in others] == [c.token_ids for (c,) in wanted[1:]]


def test_an_error_after_the_computation_leaves_the_engine_usable(model: Any) -> None:
    engine = Engine(model, num_blocks=64, block_size=4)
    prompts = prompts_of(4, 2)
    wanted = tokens(Engine(model, num_blocks=64, block_size=4).generate(prompts, GREEDY))
    done = [engine.completions_of(engine.add(prompt, GREEDY)) for prompt in prompts]
    observe = engine.accounting.observe
    engine.accounting.observe = lambda usage: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.accounting.observe = observe
    for _ in engine.stream():
        pass
    assert tokens(done) == wanted
