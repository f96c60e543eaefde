"""How does text become token ids, and token ids text?

Reads the model's tokenizer.json itself: importing this file costs no torch, so planning and
estimating stay light.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from engine.calls import CallForm, call_form
from engine.errors import ModelLoadError, TemplateError, UnknownPrompt
from engine.model.files import (
    context_length_of,
    default_prompt_name,
    pools_prompts,
    prompts_of,
    read_json,
    sentence_config,
    transformer_folder,
)
from engine.plan.room import longest_first
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


# Classes whose pairs transformers gives no types, unless tokenizer_config.json names them.
_TYPELESS = frozenset({"PreTrainedTokenizer", "TokenizersBackend", "AlbertTokenizer"})

# How byte-level tokens spell bytes, and SentencePiece's a byte of no token's and a space.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]  # transformers'
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class Tokenizer:
    """One model's tokenizer. Cuts a text only where it is told to, whatever tokenizer.json says.

    Threads may share one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        chat_template: str | None,
        context_length: int | None,
        prompts: Mapping[str, str],
        default_prompt: str,
        cut_side: str,
        types: bool,
    ) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self._chat_template = chat_template
        self._default_prompt = default_prompt
        self._cut_side = cut_side  # the end of a text that is cut off, "right" or "left"
        self._types = types  # whether the model tells the texts of a pair apart by a type
        self.context_length = context_length
        self.prompts = prompts

    @classmethod
    def from_dir(cls, model_dir: Path, *, prompts: Mapping[str, str] | None = None) -> "Tokenizer":
        """The tokenizer of a model folder; `prompts` are the catalog's and win over the folder's.

        Raises ModelLoadError where there is none.
        """
        folder = transformer_folder(model_dir)
        backend, cut_side = _read_backend(folder)
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(folder, config)
        _add_ends(backend, config, special_tokens)
        if sentence_config(model_dir).get("do_lower_case"):
            _lower_case(backend)
        known = {**prompts_of(model_dir), **(prompts or {})}
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=_chat_template(folder, config),
            context_length=context_length_of(model_dir),
            prompts=MappingProxyType(known),
            default_prompt=_default_prompt(model_dir, known),
            cut_side=config.get("truncation_side") or cut_side,
            types=_types(config),
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
        self, texts: Sequence[str], *, prompt_name: str | None = None, limit: int | None = None
    ) -> list[list[int]]:
        """Ids of each text with special tokens; cut to `limit` tokens, those included, or whole.

        Without a `prompt_name` the model's default prompt, if it has one, stands before each text.
        Raises UnknownPrompt, and ValueError for a text that is not Unicode (a lone surrogate).
        """
        prompt = self._default_prompt
        if prompt_name is not None:
            if prompt_name not in self.prompts:
                raise UnknownPrompt.of(prompt_name, self.prompts)
            prompt = self.prompts[prompt_name]
        prompted = [_unicode(prompt + text) for text in texts]
        # The fast form does not note which characters a token stands for.
        encodings = self._backend.encode_batch_fast(prompted, add_special_tokens=True)
        found = [encoding.ids for encoding in encodings]
        if limit is not None:
            for place, ids in enumerate(found):
                if len(ids) > limit:
                    found[place] = self._cut(prompted[place], limit).ids
        return found

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: int | None = None
    ) -> list[Pair]:
        """Each pair as one sequence with special tokens; cut to `limit`, the longer text first.

        A model that does not tell the two apart has all tokens in the `first`.
        """
        whole = [(_unicode(first), _unicode(second)) for first, second in pairs]
        encodings = self._backend.encode_batch_fast(whole, add_special_tokens=True)
        return [
            Pair(encoding.ids, self._boundary(encoding))
            if limit is None or len(encoding.ids) <= limit
            else self._cut_pair(pair, limit, self._boundary(encoding))
            for pair, encoding in zip(whole, encodings, strict=True)
        ]

    def encode_windows(self, text: str, *, limit: int, overlap: int) -> list[Window]:
        """The text as pieces of at most `limit` tokens, neighbours sharing `overlap` of them.

        Raises ValueError where that leaves a piece no token of its own.
        """
        room = limit - self._backend.num_special_tokens_to_add(is_pair=False)
        if not 0 <= overlap < room:
            msg = f"pieces of {limit} tokens cannot share {overlap}: {max(0, room)} are the text's"
            raise ValueError(msg)
        pieces = self._cut(_unicode(text), limit, overlap)
        return [Window(piece.ids, piece.offsets) for piece in (pieces, *pieces.overflowing)]

    def continues(self, text: str, window: Window) -> list[bool]:
        """Which tokens of a window of that text go on with the word of the token before them.

        As transformers' token-classification pipeline tells: by the mark of a tokenizer that marks
        them, else by the space that is not there.
        """
        marks = bool(getattr(self._backend.model, "continuing_subword_prefix", None))
        unknown = self._special_tokens.get("unk_token")
        found = []
        for token_id, (start, end) in zip(window.tokens, window.spans, strict=True):
            token = self._backend.id_to_token(token_id) or ""
            if marks:
                inside = len(token) != end - start
            else:
                inside = start > 0 and " " not in text[start - 1 : start + 1]
            found.append(inside and token != unknown)
        return found

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain completion's prompt, with the special tokens the model puts before one."""
        return self._backend.encode(_unicode(text), add_special_tokens=True).ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what `render_chat` made, special tokens included (no second BOS)."""
        return self._backend.encode(_unicode(text), add_special_tokens=False).ids

    @cached_property
    def calls(self) -> CallForm | None:
        """How the chat template writes calls of tools; None where it has no place for them."""
        special = {token.content: key for key, token in self._added.items() if token.special}
        return call_form(self._render, special)

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The messages as the model's chat template writes them, up to where the answer begins.

        Raises TemplateError where the model has no template or its template refuses the messages.
        """
        return self._render(messages, tools, True)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        begins: bool,
    ) -> str:
        if self._chat_template is None:
            msg = "This model has no chat template."
            raise TemplateError(msg)
        context: dict[str, Any] = dict(self._special_tokens)
        try:
            rendered = render_jinja_template(
                conversations=[messages],
                tools=list(tools) or None,
                chat_template=self._chat_template,
                add_generation_prompt=begins,
                **context,
            )[0]
        except _TEMPLATE_FAULTS as error:
            raise TemplateError(str(error)) from error
        return str(rendered[0])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids; bytes that are no whole character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, which may be a part of a character; nothing for no token."""
        token = self._backend.id_to_token(token_id) or ""
        if token_id in self._added:
            return token.encode()
        if self._byte_level and _BYTES.keys() >= set(token):
            return bytes(_BYTES[character] for character in token)
        whole = _BYTE.fullmatch(token)
        if whole:
            return bytes.fromhex(whole[1])
        return token.replace(_SPACE, " ").encode()

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in repr(self._backend.decoder)

    def to_json(self) -> str:
        """All of it, as the tokenizers library writes it."""
        return self._backend.to_str()

    def _cut(self, text: str, limit: int, overlap: int = 0) -> tokenizers.Encoding:
        """The first piece of a text, special tokens included; it holds the others."""
        room = max(0, limit - self._backend.num_special_tokens_to_add(is_pair=False))
        content = self._backend.encode(text, add_special_tokens=False)
        content.truncate(room, stride=overlap, direction=self._cut_side)
        return self._backend.post_process(content)

    def _cut_pair(self, pair: tuple[str, str], limit: int, boundary: int) -> Pair:
        """`boundary` is where the whole pair's second text would begin."""
        room = max(0, limit - self._backend.num_special_tokens_to_add(is_pair=True))
        first, second = (self._backend.encode(text, add_special_tokens=False) for text in pair)
        whole = len(first.ids)
        kept = longest_first(whole, len(second.ids), room)
        for content, length in zip((first, second), kept, strict=True):
            content.truncate(length, direction=self._cut_side)
        ids = self._backend.post_process(first, second).ids
        # Only the texts became shorter, and the boundary stands behind the first.
        return Pair(ids, min(len(ids), boundary - (whole - kept[0])))

    def _boundary(self, encoding: tokenizers.Encoding) -> int:
        types = encoding.type_ids if self._types else []
        return types.index(1) if 1 in types else len(encoding.ids)


def _read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer that tokenizer.json describes, told to cut and pad nothing, and which end of a
    text the file would have cut off.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        msg = f"{folder} holds no tokenizer.json"
        raise ModelLoadError(msg)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        msg = f"{path} cannot be read: {error}"
        raise ModelLoadError(msg) from error
    cut_side = str((backend.truncation or {}).get("direction", "right"))
    backend.no_truncation()
    backend.no_padding()
    return backend, cut_side


def _types(config: dict[str, Any]) -> bool:
    """Whether the model is told which text of a pair a token belongs to."""
    if "model_input_names" in config:
        return "token_type_ids" in config["model_input_names"]
    return str(config.get("tokenizer_class")).removesuffix("Fast") not in _TYPELESS


def _default_prompt(model_dir: Path, prompts: Mapping[str, str]) -> str:
    """What stands before every text for which no other is asked; usually nothing."""
    name = default_prompt_name(model_dir)
    if name is not None and name not in prompts:
        msg = f"{model_dir}: its default prompt {name!r} is not among its prompts"
        raise ModelLoadError(msg)
    if any(prompts.values()) and not pools_prompts(model_dir):
        msg = f"{model_dir}: leaving the prompt out of the pooling is not supported"
        raise ModelLoadError(msg)
    return "" if name is None else prompts[name]


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
