"""Text to token ids and back: encoding, stream-safe decoding, chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reference_engine.models.config import ModelError
from reference_engine.models.json_file import read_json
from reference_engine.models.requirements import require

Messages = Sequence[Mapping[str, Any]]

_INCOMPLETE = "\ufffd"  # what decoding shows for bytes that are no character, or not yet


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's special tokens and chat template.

    Args:
        backend: the `tokenizers.Tokenizer`; its post-processor adds whatever a plain prompt starts with.
        eos_token_ids: ids that end a sequence.
        bos_token, eos_token: their texts, for the chat template.
        chat_template: Jinja source, or None for a model that has none.
        name: what to call it in messages.
    """

    def __init__(
        self,
        backend: Any,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
        name: str = "tokenizer",
    ) -> None:
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token, self.eos_token = bos_token, eos_token
        self.chat_template = chat_template
        self.name = name
        self._compiled_template: Any = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it, like "<|im_end|>", become themselves.

        Args:
            add_special_tokens: also add what the model wants around a prompt, like a beginning-of-text id.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that form no character show as U+FFFD."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt that the model's chat template makes of messages, each with a "role" and a "content".

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        jinja2 = require("jinja2")
        if self.chat_template is None:
            raise ValueError(f"{self.name}: the model has no chat template; give it a plain prompt")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"messages[{index}] must be a mapping with a 'role' and a 'content', got {message!r}"
                )
        try:
            if self._compiled_template is None:
                self._compiled_template = _environment().from_string(self.chat_template)
            rendered: str = self._compiled_template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
            return rendered
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"{self.name}: the chat template failed: {error}") from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of `render_chat`; the template itself writes the special tokens."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for the tokens of one answer, as they come."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)


class TextStream:
    """Turns one sequence's tokens into text piece by piece.

    A piece never ends inside a character; all pieces together equal `Tokenizer.decode` of all tokens. What is
    shown for a token can depend on its neighbours (a character spread over tokens, a space that only stands
    between words), so each piece is the difference that the new tokens make behind the last few old ones.

    One exception: sentencepiece's byte fallback judges a run of byte tokens as a whole, so that a later
    broken byte would turn the run's whole characters, shown already, into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # tokens whose text is out, enough to decode the next ones after
        self._pending: list[int] = []  # tokens whose text is not out yet
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain, often "" within a character."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """The rest, where an incomplete character shows as U+FFFD. The stream can then start anew."""
        text = self._emit(self._decode(self._context + self._pending))
        self._context, self._context_text = [], ""
        return text

    def _emit(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if piece:  # tokens without text of their own stay context together with what comes next
            self._context = self._pending
            self._context_text = self._decode(self._context)
        else:
            self._context = self._context + self._pending
        self._pending = []
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int]) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None if it has no `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = require("tokenizers").Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"{path}: not readable as a tokenizer: {error}") from None
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    return Tokenizer(
        backend,
        eos_token_ids=eos_token_ids,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        chat_template=_chat_template(folder, settings),
        name=str(path),
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str:
    """A special token is written as its text, or as an object that has the text in "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _environment() -> Any:
    """Jinja as chat templates expect it, sandboxed: a template comes with the model file, from anybody."""
    jinja2 = require("jinja2")
    sandbox = require("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment
