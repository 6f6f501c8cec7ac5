"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE, as GPT-2, Llama 3, Qwen2 and SmolLM use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference_engine.models.config import ModelError
from reference_engine.models.gguf_file import GgufFile
from reference_engine.models.requirements import require
from reference_engine.models.tokenizer import Tokenizer

# Token types of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

# Tokens with these names end an answer even where the metadata name only one of them: a chat model that goes
# on with a plain text ends it with the document's token, not the turn's.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>")

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Rule:
    """What the name in tokenizer.ggml.pre stands for; the file does not spell it out.

    Attributes:
        words: the pattern that cuts text into words before merging; None is GPT-2's.
        digits: every numeral is a word.
        whole_words: a word that is a token is taken as it is, without merging up to it.
        begins: a prompt begins with the beginning-of-text token, unless the file says otherwise.
        composed: text is first brought into Unicode's normal form C.
    """

    words: str | None = None
    digits: bool = False
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


_LLAMA3 = _Rule(words=_LLAMA3_WORDS, whole_words=True, begins=True)
_RULES = {
    "default": _Rule(),
    "gpt-2": _Rule(),
    "smollm": _Rule(digits=True),
    "starcoder": _Rule(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Rule(words=_LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"), composed=True),
}


def load_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the metadata describe.

    Raises:
        ModelError: incomplete, or of a kind that is not supported.
    """
    tokenizers = require("tokenizers")
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelError(
            f"{file.path}: tokenizer model {model!r} is not supported; supported is gpt2 (byte-level BPE)"
        )
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _RULES:
        raise ModelError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; supported are {', '.join(_RULES)}"
        )
    rule = _RULES[name]
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    merges: list[str] = file.get("tokenizer.ggml.merges", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: there are {len(tokens)} tokens but {len(kinds)} token types")
    if len(set(tokens)) != len(tokens):
        raise ModelError(
            f"{file.path}: tokens must be unique, there are {len(set(tokens))} among {len(tokens)}"
        )
    try:
        backend = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[tuple(merge.split(" ", 1)) for merge in merges],
                fuse_unk=False,
                byte_fallback=False,
                ignore_merges=rule.whole_words,
            )
        )
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"{file.path}: tokens and merges make no tokenizer: {error}") from None
    if rule.composed:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(tokenizers, rule)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        named = [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, k in zip(tokens, kinds, strict=True)
            if k == kind
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(named)

    bos_id = _token_id(file, "bos_token_id", tokens)
    eos_id = _token_id(file, "eos_token_id", tokens)
    if file.get("tokenizer.ggml.add_bos_token", bool, rule.begins):
        if bos_id is None:
            raise ModelError(f"{file.path}: add_bos_token is set but there is no bos_token_id")
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return Tokenizer(
        backend,
        eos_token_ids=_end_ids(file, tokens, kinds, eos_id),
        bos_token="" if bos_id is None else tokens[bos_id],
        eos_token="" if eos_id is None else tokens[eos_id],
        chat_template=file.metadata.get("tokenizer.chat_template"),
        name=str(file.path),
    )


def _pre_tokenizer(tokenizers: Any, rule: _Rule) -> Any:
    pre = tokenizers.pre_tokenizers
    if rule.words is not None:
        words = pre.Split(tokenizers.Regex(rule.words), behavior="isolated")
        return pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre.Sequence([pre.Digits(individual_digits=True), words]) if rule.digits else words


def _token_id(file: GgufFile, key: str, tokens: list[str]) -> int | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{key} must be one of {len(tokens)} token ids, got {index!r}"
        )
    return index


def _end_ids(file: GgufFile, tokens: list[str], kinds: list[int], eos_id: int | None) -> tuple[int, ...]:
    ids = {eos_id, _token_id(file, "eot_token_id", tokens), _token_id(file, "eom_token_id", tokens)} - {None}
    ids |= {
        i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k == _CONTROL and t in _END_TOKENS
    }
    return tuple(sorted(i for i in ids if i is not None))
