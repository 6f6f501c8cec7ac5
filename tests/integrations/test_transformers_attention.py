"""Models of transformers on the ops: greedy tokens, logits and masks as with their eager attention."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("paged_ops.integrations.transformers", exc_type=ImportError)

import paged_ops  # noqa: E402
from paged_ops.integrations import _spans  # noqa: E402
from paged_ops.testing.backends import Target  # noqa: E402

VOCAB = 256
OP_OPTIONS = set(inspect.signature(paged_ops.paged_attention).parameters)


def needs(*options: str) -> pytest.MarkDecorator:
    """Skips a test while the ops lack one of these options."""
    missing = sorted(set(options) - OP_OPTIONS)
    return pytest.mark.skipif(bool(missing), reason=f"paged_attention has no {', '.join(missing)}")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(kind: str = "Llama", **settings: Any) -> Any:
    """Random weights, wide enough that greedy choices are neither ties nor loops. No download."""
    torch.manual_seed(0)
    base = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config = getattr(transformers, f"{kind}Config")(**{**base, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15) if parameter.ndim >= 2 else parameter.normal_(1, 0.2)
    return model


def prompts(batch: int, length: int, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Random ids, the first `padding[b]` of row b padded on the left."""
    ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, call: Any) -> list[Any]:
    """What `call` gives with eager attention and with ours; and that ours was called at all."""
    results = []
    for name in ("eager", "paged_ops"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(call(model))
    assert model.config._attn_implementation == "paged_ops"
    return results


def generate(inputs: dict[str, torch.Tensor], count: int = 24, **options: Any) -> Any:
    fixed = dict(do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None)
    return lambda model: model.generate(**inputs, **fixed, pad_token_id=0, **options)


def require_same_tokens(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    eager, ours = both(model, generate(inputs, **options))
    new = eager[:, inputs["input_ids"].shape[1] :]
    assert new.unique().numel() > 5  # or one token over and over could pass for equal
    assert torch.equal(eager, ours)


def logits_of(inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    return lambda model: model(**inputs, **options).logits


def require_same_logits(eager: Any, ours: Any, seen: Any = slice(None)) -> None:
    assert eager.std() > 1  # or a wrong answer could pass for close
    torch.testing.assert_close(ours[seen], eager[seen], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_greedy_tokens(groups: int) -> None:
    """MHA, GQA and MQA."""
    require_same_tokens(small_model(num_key_value_heads=8 // groups), prompts(2, 19))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_with_padding(kind: str, cache: str) -> None:
    inputs = prompts(4, 19, padding=(0, 7, 18, 1))
    require_same_tokens(small_model(kind), inputs, cache_implementation=cache, disable_compile=True)


def test_greedy_tokens_on_every_implementation(target: Target) -> None:
    if target.device != "cpu":
        pytest.skip("the model lives on the CPU")
    with target.use():
        require_same_tokens(small_model(), prompts(3, 9, padding=(0, 4, 8)), count=8)


def test_logits_without_a_cache() -> None:
    require_same_logits(*both(small_model(), logits_of(prompts(2, 40), use_cache=False)))


def test_logits_where_padding_is_on_the_right() -> None:
    """Rows of padding are nobody's business."""
    inputs = prompts(3, 21)
    for row, count in enumerate((0, 6, 20)):
        inputs["attention_mask"][row, 21 - count :] = 0
    eager, ours = both(small_model(), logits_of(inputs))
    require_same_logits(eager, ours, inputs["attention_mask"].bool())


def test_a_row_of_nothing_but_padding() -> None:
    inputs = prompts(2, 12, padding=(12, 3))
    eager, ours = both(small_model(), logits_of(inputs))
    require_same_logits(eager, ours, inputs["attention_mask"].bool())
    assert ours.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="full"),
        # Whose cache forgets keys: the first one held is not the first of the sequence.
        pytest.param(dict(kind="Mistral", sliding_window=8), id="sliding", marks=needs("window")),
    ],
)
def test_a_prompt_in_chunks(settings: dict[str, Any]) -> None:
    """Several query tokens behind a cache."""
    inputs = prompts(3, 30, padding=(0, 5, 13))
    forward = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    cache_name = "cache" if "cache" in forward else "past_key_values"  # as newer and older versions call it

    def run(model: Any) -> Any:
        cache, parts = transformers.DynamicCache(config=model.config), []
        for begin, end in ((0, 11), (11, 12), (12, 18), (18, 30)):
            parts.append(
                model(
                    input_ids=inputs["input_ids"][:, begin:end],
                    attention_mask=inputs["attention_mask"][:, :end],
                    position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, begin:end],
                    **{cache_name: cache},
                ).logits
            )
        return torch.cat(parts, dim=1)

    eager, ours = both(small_model(**settings), run)
    require_same_logits(eager, ours, inputs["attention_mask"].bool())


@pytest.mark.parametrize("additive", [False, True])
def test_ready_masks(additive: bool) -> None:
    """4-D, bool or added to the logits."""
    inputs = prompts(2, 15, padding=(4, 0))
    seen = torch.ones(15, 15, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None]
    least = torch.finfo(torch.float32).min
    ready = torch.where(seen, 0.0, least)
    inputs = {**inputs, "attention_mask": ready}
    model = small_model()
    eager = both(model, logits_of(inputs))[0]
    if not additive:
        inputs["attention_mask"] = seen
    with torch.no_grad():
        ours = logits_of(inputs)(model)
    require_same_logits(eager, ours, torch.stack([torch.arange(15) >= 4, torch.arange(15) >= 0]))


def test_an_encoder() -> None:
    """Not causal: every token sees all keys that are not padding."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    inputs = prompts(3, 17)
    inputs["attention_mask"][1, 9:] = 0
    inputs["attention_mask"][2, :5] = 0
    eager, ours = both(model, lambda model: model(**inputs).last_hidden_state)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], eager[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        eager[real], both(model, lambda m: m(inputs["input_ids"]).last_hidden_state)[0][real]
    )


@needs("window")
@pytest.mark.parametrize("padding", [(), (0, 9, 3)])
def test_sliding_window(padding: tuple[int, ...]) -> None:
    model = small_model("Mistral", sliding_window=8)
    require_same_tokens(model, prompts(3, 21, padding))
    # And the window matters here.
    windowed, full = (
        both(small_model("Mistral", sliding_window=window), logits_of(prompts(1, 21)))[0]
        for window in (8, None)
    )
    assert not torch.allclose(windowed, full, atol=1e-2)


def test_sliding_window_at_decode_needs_no_window() -> None:
    """One query's window is a run of keys; prompts that fit into it need none either."""
    require_same_tokens(small_model("Mistral", sliding_window=12), prompts(2, 12, padding=(0, 3)))


@needs("window", "soft_cap")
def test_soft_cap() -> None:
    model = small_model("Gemma2", attn_logit_softcapping=1.5, sliding_window=8, query_pre_attn_scalar=16)
    require_same_tokens(model, prompts(2, 15, padding=(0, 4)))


@needs("window", "sinks")
def test_sinks() -> None:
    model = small_model("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    inputs = prompts(2, 15, padding=(0, 4))
    eager, ours = both(model, logits_of(inputs))
    require_same_logits(eager, ours, inputs["attention_mask"].bool())


# --- the function itself ----------------------------------------------------------------------------------


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


def tensors(batch: int = 2, q_len: int = 5, kv_len: int = 9) -> list[torch.Tensor]:
    torch.manual_seed(3)
    shapes = (batch, 4, q_len, 16), (batch, 2, kv_len, 16), (batch, 2, kv_len, 24)
    return [torch.randn(shape) for shape in shapes]


def dense(query: Any, key: Any, value: Any, seen: Any) -> Any:
    """float64, keys that are not seen left out of the softmax."""
    key, value = (x.double().repeat_interleave(2, dim=1) for x in (key, value))
    logits = query.double() @ key.transpose(2, 3) * 0.4
    logits = logits.masked_fill(~seen, -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2)


def test_without_a_mask_the_module_says_whether_it_is_causal() -> None:
    query, key, value = tensors()
    last_rows = torch.ones(5, 9, dtype=torch.bool).tril(4)
    for is_causal, seen in (
        (None, last_rows),
        (True, last_rows),
        (False, torch.ones(5, 9, dtype=torch.bool)),
    ):
        out, weights = integration.paged_ops_attention(
            Module(), query, key, value, None, scaling=0.4, is_causal=is_causal
        )
        assert weights is None and out.shape == (2, 5, 4, 24)
        torch.testing.assert_close(out.double(), dense(query, key, value, seen), rtol=1e-5, atol=1e-5)


@needs("window")
@pytest.mark.parametrize("sliding_window", [1, 3, 8])
def test_without_a_mask_a_window_is_the_layers(sliding_window: int) -> None:
    query, key, value = tensors()
    own = torch.arange(4, 9)[:, None]
    seen = (torch.arange(9) <= own) & (torch.arange(9) > own - sliding_window)
    out, _ = integration.paged_ops_attention(
        Module(), query, key, value, None, scaling=0.4, sliding_window=sliding_window
    )
    torch.testing.assert_close(out.double(), dense(query, key, value, seen), rtol=1e-5, atol=1e-5)


def test_layers_share_a_mask_and_not_their_strides() -> None:
    query, key, value = tensors()
    mask = integration.paged_ops_mask(
        2, 5, 9, q_offset=4, attention_mask=torch.arange(9) >= torch.tensor([[3], [0]])
    )
    wanted = dense(query, key, value, mask)
    wide = [torch.nn.functional.pad(x, (0, 0, 0, 4), value=torch.nan)[:, :, :9] for x in (key, value)]
    for caches in ((key, value), wide, (key, value)):
        out, _ = integration.paged_ops_attention(Module(), query, *caches, mask, scaling=0.4)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", "sliced", "tokens first", "pitches differ", "no pitch"])
def test_caches_of_any_strides(kind: str) -> None:
    """Padding makes every token a page, over the memory as it is, or copied where it does not lie evenly."""
    query, key, value = tensors()
    starts = torch.tensor([3, 0])
    if kind == "sliced":  # out of a static cache, NaN around
        wide = [torch.full((3, 3, 14, x.shape[3]), torch.nan) for x in (key, value)]
        for into, x in zip(wide, (key, value), strict=True):
            into[1:, 1:, 2:11] = x
        key, value = (into[1:, 1:, 2:11] for into in wide)
    elif kind == "tokens first":
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    elif kind == "pitches differ":
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "no pitch":
        key = torch.randn(1000).as_strided(key.shape, (333, 150, 16, 1))
        value = torch.randn(1000).as_strided(value.shape, (371, 250, 24, 1))
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4) & (torch.arange(9) >= starts[:, None])[:, None, None]
    copies = sum(
        used.data_ptr() != given.data_ptr()
        for used, given in zip(
            integration._pages(_spans.of_mask(seen[:, 0], 9), key, value), (key, value), strict=False
        )
    )
    assert (copies == 0) == (kind in ("contiguous", "sliced", "tokens first"))
    out, _ = integration.paged_ops_attention(Module(), query, key, value, seen, scaling=0.4)
    torch.testing.assert_close(out.double(), dense(query, key, value, seen), rtol=1e-5, atol=1e-5)


def test_spans_of_masks() -> None:
    causal = torch.ones(5, 9, dtype=torch.bool).tril(4)
    padded = causal & (torch.arange(9) >= torch.tensor([3, 6])[:, None])[:, None]
    spans = _spans.of_mask(padded, 9)
    assert spans.starts.tolist() == [3, 6] and spans.lengths.tolist() == [6, 3]
    assert spans.causal and spans.window is None
    own = torch.arange(4, 9)[:, None]
    spans = _spans.of_mask((causal & (torch.arange(9) > own - 3))[None], 9)
    assert spans.causal and spans.window == 3 and spans.starts.tolist() == [2]
    # A static cache: keys behind the last query's own are not there yet.
    spans = _spans.of_mask(torch.cat([padded, torch.zeros(2, 5, 4, dtype=torch.bool)], dim=2), 9)
    assert spans.lengths.tolist() == [6, 3]
    # And a sequence that is all padding.
    spans = _spans.of_mask(torch.zeros(1, 5, 13, dtype=torch.bool), 9)
    assert spans.lengths.tolist() == [0]
    spans = _spans.of_mask((torch.arange(9) < 4).expand(2, 5, 9), 9)
    assert not spans.causal and spans.lengths.tolist() == [4, 4] and spans.starts.tolist() == [0, 0]


def test_masks_that_the_ops_cannot_follow_are_refused() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    packed, hole, windows = causal.clone(), causal.clone(), causal.clone()
    packed[3:, :3] = False
    hole[5, 2] = False
    windows[4, :2], windows[5, :4] = False, False
    for mask in (packed, hole, windows, ~causal):
        with pytest.raises(NotImplementedError, match="^attention_mask: is neither"):
            _spans.of_mask(torch.stack([causal, mask]), 6)
    with pytest.raises(NotImplementedError, match="^attention_mask: adds to logits"):
        integration.paged_ops_attention(Module(), *tensors(), torch.full((2, 1, 5, 9), -1.0))
    with pytest.raises(NotImplementedError, match="^attention_mask: shape"):
        integration.paged_ops_attention(Module(), *tensors(), torch.zeros(2, 4, 5, 9))


def test_packed_sequences_are_refused() -> None:
    model = small_model()
    model.set_attn_implementation("paged_ops")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with pytest.raises(NotImplementedError, match="packed"), torch.no_grad():
        model(torch.arange(3, 10)[None], position_ids=positions, use_cache=False)


def test_what_is_for_training_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="^dropout"):
        integration.paged_ops_attention(Module(), *tensors(), None, dropout=0.1)
    with pytest.raises(NotImplementedError, match="^position_bias"):
        integration.paged_ops_attention(Module(), *tensors(), None, position_bias=torch.zeros(1))
    model = small_model()
    model.set_attn_implementation("paged_ops")
    with pytest.raises(ValueError, match="requires a gradient"):
        model(**prompts(1, 5))


def test_registering_is_asked_for() -> None:
    """Neither paged_ops nor transformers alone knows of the other."""
    code = (
        "import sys, paged_ops; assert 'transformers' not in sys.modules; "
        "import transformers; from transformers import AttentionInterface as A; "
        "before = 'paged_ops' in A._global_mapping; import paged_ops.integrations.transformers; "
        "print(before, 'paged_ops' in A._global_mapping)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False True", done.stderr
