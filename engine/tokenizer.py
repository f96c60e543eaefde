"""How does text become token ids, and token ids text?

Reads the model's tokenizer.json itself: importing this file costs no torch, so planning and
estimating stay light.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import TemplateProcessing
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ModelLoadError, TemplateError
from engine.model.files import (
    context_length_of,
    default_prompt,
    read_json,
    sentence_config,
    transformer_folder,
)
from engine.surface import Pair, Window

# What a template that meets unexpected messages raises: jinja's own errors and plain Python's.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class Tokenizer:
    """One model's tokenizer. Never cuts a text, whatever tokenizer.json says about truncation."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        chat_template: str | None,
        context_length: int | None,
        prompt: str,
    ) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self._chat_template = chat_template
        self._prompt = prompt
        self.context_length = context_length

    @classmethod
    def from_dir(cls, model_dir: Path) -> "Tokenizer":
        """The tokenizer of a model folder. Raises ModelLoadError where there is none."""
        folder = transformer_folder(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            msg = f"{folder} holds no tokenizer.json"
            raise ModelLoadError(msg)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            msg = f"{path} cannot be read: {error}"
            raise ModelLoadError(msg) from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(folder, config)
        _add_ends(backend, config, special_tokens)
        if sentence_config(model_dir).get("do_lower_case"):
            _lower_case(backend)
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=_chat_template(folder, config),
            context_length=context_length_of(model_dir),
            prompt=default_prompt(model_dir),
        )

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to below this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; None where the model's files name none."""
        token = self._special_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,  # noqa: ARG002 to come
        limit: int | None = None,  # noqa: ARG002 to come
    ) -> list[list[int]]:
        """Ids of each text with special tokens, after the model's own default prompt if it has one.

        Raises ValueError for a text that is not Unicode (a lone surrogate).
        """
        prompted = [_unicode(self._prompt + text) for text in texts]
        encodings = self._backend.encode_batch(prompted, add_special_tokens=True)
        return [encoding.ids for encoding in encodings]

    @property
    def prompts(self) -> Mapping[str, str]:
        """What may be put before a text, by name."""
        return {}

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: int | None = None
    ) -> list[Pair]:
        """Each pair as one sequence with special tokens."""
        raise NotImplementedError

    def encode_windows(self, text: str, *, limit: int, overlap: int) -> list[Window]:
        """The text as pieces of at most `limit` tokens."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain completion's prompt, with the special tokens the model puts before one."""
        return self._backend.encode(_unicode(text), add_special_tokens=True).ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what `render_chat` made, special tokens included (no second BOS)."""
        return self._backend.encode(_unicode(text), add_special_tokens=False).ids

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The messages as the model's chat template writes them, up to where the answer begins.

        Raises TemplateError where the model has no template or its template refuses the messages.
        """
        if self._chat_template is None:
            msg = "This model has no chat template."
            raise TemplateError(msg)
        context: dict[str, Any] = dict(self._special_tokens)
        try:
            rendered = render_jinja_template(
                conversations=[messages],
                chat_template=self._chat_template,
                add_generation_prompt=True,
                **context,
            )[0]
        except _TEMPLATE_FAULTS as error:
            raise TemplateError(str(error)) from error
        return str(rendered[0])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids; bytes that are no whole character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _unicode(text: str) -> str:
    text.encode("utf-8")  # UnicodeEncodeError, a ValueError, names the place of a lone surrogate
    return text


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name to text of bos_token, eos_token …, as templates are given them."""
    found: dict[str, str] = {}
    for source in (read_json(folder / "special_tokens_map.json"), config):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _add_ends(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add the BOS or EOS that tokenizer_config.json asks for and tokenizer.json does not write."""
    if backend.encode("", add_special_tokens=True).ids:
        return
    ends: dict[str, tuple[str, int]] = {}
    for name in ("bos", "eos"):
        token = special_tokens.get(f"{name}_token", "")
        token_id = backend.token_to_id(token)
        if config.get(f"add_{name}_token") is True and token_id is not None:
            ends[name] = (token, token_id)
    if ends:
        pieces = [ends[name][0] if name in ends else "" for name in ("bos", "eos")]
        template = " ".join(piece for piece in (pieces[0], "$A", pieces[1]) if piece)
        backend.post_processor = TemplateProcessing(
            single=template, pair=None, special_tokens=list(ends.values())
        )


def _lower_case(backend: tokenizers.Tokenizer) -> None:
    existing = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = NormalizerSequence([Lowercase(), *existing])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
