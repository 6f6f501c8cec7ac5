"""Tokenizers: building from GGUF metadata, stream-safe decoding, chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from reference_engine.models import ModelError, Tokenizer  # noqa: E402
from reference_engine.models.tokenizer import load_tokenizer  # noqa: E402


def byte_level() -> Tokenizer:
    """All bytes, a few merges that end inside characters, a special token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    euro = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c) for c in "€😀é"]
    merges = [(word[0], word[1]) for ((word, _),) in euro] + [("h", "e"), ("Ġ", "w")]
    vocab = alphabet + ["".join(merge) for merge in merges]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def sentencepiece_like() -> Tokenizer:
    """Words with a leading mark for the space, bytes as <0x..>: decoding strips the first space of a text."""
    vocab = ["<unk>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    vocab += ["▁", "▁he", "llo", "▁wor", "ld", "a", "b", "▁a", "▁▁"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(vocab)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece-like": sentencepiece_like()}


def stream_pieces(tokenizer: Tokenizer, token_ids: list[int], **options) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*map(stream.push, token_ids), stream.finish()]


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZERS["byte-level"].vocab_size - 1), max_size=30), skip=st.booleans())
def test_a_stream_of_any_tokens_is_its_decoding(ids: list[int], skip: bool) -> None:
    """Broken characters included; and what is out already is never taken back."""
    tokenizer = TOKENIZERS["byte-level"]
    pieces = stream_pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(["▁", "▁he", "llo", "▁wor", "ld", "▁▁", "</s>"]), st.characters(codec="utf-8")
        ),
        max_size=20,
    ),
    skip=st.booleans(),
)
def test_a_stream_with_byte_fallback_is_its_decoding(words: list[str], skip: bool) -> None:
    tokenizer = TOKENIZERS["sentencepiece-like"]
    ids = []
    for word in words:
        token = tokenizer.backend.token_to_id(word)
        ids += [token] if token is not None else [2 + byte for byte in word.encode()]
    pieces = stream_pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert any("\ufffd" in word for word in words) or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_a_stream_of_text_never_shows_half_a_character(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\ufffd", "")
    pieces = stream_pieces(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing was held back that was already certain


def test_text_comes_out_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert stream_pieces(tokenizer, tokenizer.encode("he€w")) == ["he", "", "€", "w", ""]
    assert stream_pieces(tokenizer, tokenizer.encode("€")[:1]) == ["", "\ufffd"]


def test_a_stream_that_finished_starts_anew() -> None:
    tokenizer = TOKENIZERS["sentencepiece-like"]
    stream, ids = tokenizer.stream(), [tokenizer.backend.token_to_id(t) for t in ("▁he", "llo", "▁wor", "ld")]
    for _ in range(2):
        assert [*map(stream.push, ids), stream.finish()] == ["he", "llo", " wor", "ld", ""]


def test_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("he<|end|>he")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "hehe"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|end|>he"


def chat(template: str | None) -> Tokenizer:
    return Tokenizer(
        TOKENIZERS["byte-level"].backend, chat_template=template, bos_token="<s>", name="the file"
    )


MESSAGES = [{"role": "system", "content": "be <kind>"}, {"role": "user", "content": "hi & bye"}]


def test_chat_templates_are_rendered() -> None:
    tokenizer = chat(
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if loop.first %}{% continue %}{% endif %}\n"
        "[{{ m.role }}] {{ m['content'] | trim }}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert tokenizer.render_chat(MESSAGES) == "<s>[user] hi & bye\n[assistant]"
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == "<s>[user] hi & bye\n"
    ids = tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(ids) == tokenizer.render_chat(MESSAGES)
    assert chat("{{ messages | tojson }}").render_chat(MESSAGES) == json.dumps(MESSAGES)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the file: the model has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "chat template failed: roles must alternate"),
        ("{% for", "chat template failed"),
        ("{{ messages.append(1) }}", "chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template failed"),
        ("{{ 1 + 'a' }}", "chat template failed"),
    ],
)
def test_chat_templates_that_fail(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat(template).render_chat(list(MESSAGES))


@pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [{"role": 3, "content": "hi"}]])
def test_messages_are_checked(messages: list) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\] must be a mapping with"):
        chat("x").render_chat(messages)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, ()) is None


@pytest.mark.parametrize("form", ["inline", "named", "separate"])
def test_a_folder_with_a_tokenizer(form: str, tmp_path: Path) -> None:
    TOKENIZERS["byte-level"].backend.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    values: dict = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    if form == "inline":
        values["chat_template"] = template
    elif form == "named":
        values["chat_template"] = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": template},
        ]
    else:
        (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path, (7,))
    assert tokenizer is not None and tokenizer.eos_token_ids == (7,)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert tokenizer.encode("he w") == TOKENIZERS["byte-level"].encode("he w")


def test_a_broken_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match="tokenizer.json: not readable as a tokenizer"):
        load_tokenizer(tmp_path, ())
