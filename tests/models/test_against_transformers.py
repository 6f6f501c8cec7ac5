"""The decoder against transformers: the same files give the same logits and, greedily, the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import (  # noqa: E402
    VOCAB,
    ContiguousAttention,
    PagedAttention,
    greedy,
    greedy_of_transformers,
    logits_of,
    make_model,
    save,
)

from reference_engine.models import load_model  # noqa: E402

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inner-size": ("gpt2", {"n_inner": 72, "n_layer": 2}),
    "gpt2-erf-gelu-head-dim-8": ("gpt2", {"activation_function": "gelu", "n_head": 8}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2-relu": ("gpt2", {"activation_function": "relu"}),
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-group-3-head-dim-24": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24},
    ),
    "llama-head-dim-40": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 40},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-gelu-gate": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window-of-the-whole-context": ("mistral", {"sliding_window": 256, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
}


@pytest.fixture(params=CASES, scope="module")
def pair(request, tmp_path_factory):
    """A transformers model, and what we load from the files that it saved."""
    kind, settings = CASES[request.param]
    model = make_model(kind, **settings)
    folder = save(model, tmp_path_factory.mktemp(request.param))
    return model, load_model(folder)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def test_logits_at_every_position(pair) -> None:
    model, loaded = pair
    prompt = random_prompt(0, 100)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    assert expected.std() > 1  # or a wrong answer could pass for close
    actual = logits_of(loaded.decoder, PagedAttention(loaded.config), prompt)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("attention", [PagedAttention, ContiguousAttention])
def test_greedy_tokens(pair, attention) -> None:
    model, loaded = pair
    seen = set()
    for length in (1, 7, 40):
        prompt = random_prompt(length, length)
        expected = greedy_of_transformers(model, prompt, 48)
        assert greedy(loaded.decoder, attention(loaded.config), prompt, 48) == expected
        seen.update(expected)
    assert len(seen) > 5  # or one token over and over could pass for equal


def test_chunks_of_a_prompt_change_nothing(pair) -> None:
    _, loaded = pair
    prompt = random_prompt(3, 60)
    whole = logits_of(loaded.decoder, ContiguousAttention(loaded.config), prompt)
    attend, parts = PagedAttention(loaded.config), []
    for start, stop in ((0, 1), (1, 18), (18, 19), (19, 60)):
        parts.append(logits_of(loaded.decoder, attend, prompt[start:stop], start=start))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    model = make_model("llama")
    whole = load_model(save(model, tmp_path / "whole"))
    sharded = load_model(save(model, tmp_path / "sharded", max_shard_size="50KB"))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for (name, a), (_, b) in zip(
        whole.decoder.named_parameters(), sharded.decoder.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_names_without_the_prefix(kind: str, tmp_path: Path) -> None:
    """Checkpoints of the body alone, like the original GPT-2 files, leave "transformer." or "model." out."""
    from safetensors.torch import load_file, save_file

    model = make_model(kind, tie_word_embeddings=True)
    folder = save(model, tmp_path)
    expected = load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = {"gpt2": "transformer.", "llama": "model."}[kind]
    save_file({n.removeprefix(prefix): t for n, t in tensors.items()}, folder / "model.safetensors")
    for a, b in zip(expected.decoder.parameters(), load_model(folder).decoder.parameters(), strict=True):
        assert torch.equal(a, b)


def test_older_config_spelling_of_rope(tmp_path: Path) -> None:
    """Before transformers 5: rope_theta beside rope_scaling, whose kind was once called "type"."""
    import json

    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    folder = save(make_model("llama", rope_parameters=rope), tmp_path)
    new = load_model(folder).config
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    values.update(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    path.write_text(json.dumps(values))
    assert load_model(folder).config == new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept_or_converted(dtype, tmp_path: Path) -> None:
    model = make_model("llama").to(dtype)
    folder = save(model, tmp_path)
    assert load_model(folder).decoder.dtype == dtype
    assert load_model(folder, dtype=torch.bfloat16).decoder.dtype == torch.bfloat16


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    """A long prompt at once, or in chunks: near the float32 result."""
    folder = save(make_model("llama", max_position_embeddings=512), tmp_path)
    exact, rounded = load_model(folder), load_model(folder, dtype=torch.bfloat16)
    prompt = random_prompt(5, 300)
    expected = logits_of(exact.decoder, ContiguousAttention(exact.config), prompt)
    many = logits_of(rounded.decoder, ContiguousAttention(rounded.config), prompt)
    attend, few = ContiguousAttention(rounded.config), []
    for start, stop in ((0, 200), (200, 201), (201, 300)):
        few.append(logits_of(rounded.decoder, attend, prompt[start:stop], start=start))
    for actual in (many, torch.cat(few)):
        error = (actual - expected).square().mean().sqrt() / expected.std()
        assert error < 0.03
