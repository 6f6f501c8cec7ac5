"""GGUF files: the same model as transformers' for every type of weights; files that are broken or foreign."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from checkpoints import PagedAttention, greedy, greedy_of_transformers, logits_of, make_model  # noqa: E402
from gguf_writing import vocabulary, write_gguf  # noqa: E402

from reference_engine.models import ModelError, load_model  # noqa: E402

KINDS = gguf.GGMLQuantizationType
VOCAB = len(vocabulary()[0]) + 20  # as in real files, a few more embeddings than tokens with a text


def small(kind: str, **settings):
    return make_model(kind, vocab_size=VOCAB, **settings)


@pytest.mark.parametrize(
    ("kind", "stored", "settings"),
    [
        ("llama", KINDS.F32, {}),
        ("llama", KINDS.F32, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", KINDS.F32, {"attention_bias": True}),
        ("llama", KINDS.F16, {}),
        ("llama", KINDS.BF16, {}),
        ("llama", KINDS.Q4_0, {}),
        ("llama", KINDS.Q4_1, {}),
        ("llama", KINDS.Q5_0, {}),
        ("llama", KINDS.Q8_0, {}),
        ("qwen2", KINDS.F32, {}),
        ("qwen2", KINDS.Q8_0, {"tie_word_embeddings": True}),
        ("gpt2", KINDS.F32, {}),
        ("gpt2", KINDS.Q4_1, {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_tokens_equal_transformers(kind: str, stored, settings: dict, tmp_path: Path) -> None:
    model = small(kind, **settings)
    held = write_gguf(tmp_path / "model.gguf", model, stored)
    missing = model.load_state_dict(held, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    loaded = load_model(tmp_path / "model.gguf", dtype=torch.float32)
    prompt = random.Random(1).choices(range(3, VOCAB), k=30)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = logits_of(loaded.decoder, PagedAttention(loaded.config), prompt)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)
    tokens = greedy_of_transformers(model, prompt, 40)
    assert greedy(loaded.decoder, PagedAttention(loaded.config), prompt, 40) == tokens


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_plain_weights_keep_their_dtype(stored: str, dtype: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", small("llama"), KINDS[stored])
    assert load_model(tmp_path / "m.gguf").decoder.dtype == getattr(torch, dtype)


def test_rope_divisors_are_llama3_scaling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = small("llama", rope_parameters=rope)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(8) and divisors.min() == pytest.approx(1)
    write_gguf(tmp_path / "m.gguf", model, rope_freqs=divisors)
    loaded = load_model(tmp_path / "m.gguf")
    prompt = random.Random(1).choices(range(3, VOCAB), k=100)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = logits_of(loaded.decoder, PagedAttention(loaded.config), prompt)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, small("llama", num_hidden_layers=1), KINDS.Q8_0)
    return path.read_bytes()


def test_a_file_cut_short_anywhere(file_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for kept in [*range(0, 200, 7), *range(200, len(file_bytes) - 1, 1999), len(file_bytes) - 1]:
        path.write_bytes(file_bytes[:kept])
        with pytest.raises(ModelError, match="cut.gguf"):
            load_model(path)


def test_a_cut_names_the_first_tensor_it_takes(file_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(file_bytes[: len(file_bytes) * 3 // 4])
    with pytest.raises(
        ModelError, match=r"tensor '\S+' ends at byte \d+, but the file has \d+: it is cut short"
    ):
        load_model(path)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # damaged scales
def test_damaged_bytes_never_do_worse_than_a_model_error(file_bytes: bytes, tmp_path: Path) -> None:
    """Each run changes a few bytes before the weights. A damaged value may well go unnoticed, of course."""
    choose, path = random.Random(0), tmp_path / "damaged.gguf"
    header = file_bytes.index(b"output_norm.weight") + 100
    refused = 0
    for _ in range(250):
        damaged = bytearray(file_bytes)
        for _ in range(choose.choice([1, 1, 1, 3])):
            damaged[choose.randrange(header)] = choose.choice([0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)])
        path.write_bytes(damaged)
        try:
            load_model(path)
        except ModelError as error:
            assert "damaged.gguf" in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"A__expert_count": np.uint32(8)}, "llama.expert_count = 8 asks for a mixture of experts"),
        ({"A__attention__sliding_window": np.uint32(64)}, "sliding window attention"),
        ({"A__attn_logit_softcapping": 50.0}, "soft-capped attention"),
        ({"A__rope__scaling__type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"A__rope__dimension_count": np.uint32(8)}, "rotary positions on 8 of 16 dimensions"),
        ({"A__attention__value_length": np.uint32(8)}, r"key and value head dims differ \(16, 8\)"),
        ({"A__attention__key_length": np.uint32(20)}, "head_dim must be a multiple of 8 up to 576, got 20"),
        ({"A__attention__head_count_kv": [1, 2]}, "head_count_kv' must be int, got"),
        ({"A__block_count": "three"}, "'llama.block_count' must be int, got 'three'"),
        ({"A__block_count": np.uint32(2**32 - 1)}, "tensor 'blk.3.attn_norm.weight' is missing"),
        ({"A__block_count": np.uint32(2)}, r"tensor 'blk.2.\S+' has no place in a decoder"),
        ({"A__embedding_length": np.uint32(128)}, r"'token_embd.weight' has shape \[\d+, 64\], .* wants"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer model 'llama' is not supported; supported is gpt2"),
        ({"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "tokens but 2 token types"),
        ({"tokenizer__ggml__eos_token_id": np.uint32(9999)}, "eos_token_id must be one of"),
        ({"tokenizer__ggml__merges": ["h zz"]}, "tokens and merges make no tokenizer"),
        ({"tokenizer__ggml__tokens": ["a", "a"], "tokenizer__ggml__token_type": [1, 1]}, "must be unique"),
    ],
    ids=str,
)
def test_files_that_are_refused(metadata: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, small("llama"), **metadata)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable"),
        (b"PK\x03\x04" + b"\0" * 50, "not a GGUF file: it starts with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version must be 2 or 3, little-endian, got 0x1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian, got 0x3000000"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "metadata 'general.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "ends within metadata key 0"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "ends within metadata 'k'"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 5), "'k' has the unknown value type 9"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), "'k' has the unknown value type 77"),
        (b"GGUF" + struct.pack("<IQQQc", 3, 0, 1, 1, b"\xff"), "is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 1, 0, 1, b"t", 9), "tensor 't' has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQcIQIQ", 3, 1, 0, 1, b"t", 1, 2**40, 0, 0), "tensor 't' ends at byte"),
        (b"GGUF" + struct.pack("<IQQQcIQIQ", 3, 1, 0, 1, b"t", 1, 7, 3, 0), "rows of 7, but Q4_1 wants"),
        (b"GGUF" + struct.pack("<IQQQcIQIQ", 3, 1, 0, 1, b"t", 1, 7, 99, 0), "'t' has the unknown type 99"),
    ],
)
def test_containers_that_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def tokenizer_of(path: Path, **metadata):
    write_gguf(path, small("llama", num_hidden_layers=1), **metadata)
    return load_model(path).tokenizer


def words_of(tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    return tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)


TEXT = "I'll  pay 12345 €, don't   you?\n\n x=foo_bar(½)  \r\n\tWE'VE 日本語 é "


def test_qwen2_words_are_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    ours = tokenizer_of(tmp_path / "m.gguf", tokenizer__ggml__pre="qwen2")
    theirs = Qwen2Tokenizer()
    assert words_of(ours, TEXT) == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert ours.encode("e\u0301") == ours.encode("é")


def test_llama3_words(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", tokenizer__ggml__pre="llama-bpe")
    cut = [TEXT[a:b] for _, (a, b) in words_of(tokenizer, TEXT)]
    assert cut[:10] == ["I", "'ll", " ", " pay", " ", "123", "45", " €,", " don", "'t"]
    assert "".join(cut) == TEXT
    assert tokenizer.encode("he")[0] == 1  # the beginning-of-text token
    assert tokenizer.encode("he", add_special_tokens=False)[0] != 1


def test_gpt2_words(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", tokenizer__ggml__pre="gpt-2")
    cut = [TEXT[a:b] for _, (a, b) in words_of(tokenizer, TEXT)]
    assert cut[:9] == ["I", "'ll", " ", " pay", " 12345", " €,", " don", "'t", "  "]
    assert tokenizer.encode("hello world") == [3 + 256 + 3, 3 + 256 + 8]


def test_our_reader_agrees_with_the_package(tmp_path: Path) -> None:
    """Names, shapes and values as gguf's own reader sees them."""
    from reference_engine.models.gguf_file import GgufFile

    path = tmp_path / "model.gguf"
    write_gguf(path, small("llama"), KINDS.Q4_1, A__extra=3.5, A__flag=True, A__words=["ab", "ü", ""])
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert list(ours.names()) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        np.testing.assert_array_equal(ours.read(tensor.name).numpy(), expected)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        assert ours.metadata[key] == theirs.fields[key].contents(), key
