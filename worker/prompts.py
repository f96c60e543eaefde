"""Which token ids does a request line's body ask for, and how are they to be run?

The one place that turns bodies into engine requests: the plan counts by it, the drain runs by it.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from engine.errors import TemplateError
from engine.request import EmbedRequest, GenerateRequest, Request, Sampling
from engine.surface import TokenizerLike
from service import bodies
from service.catalog import Model
from service.faults import Fault

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Embed:
    """An embeddings line: one sequence an input."""

    body: bodies.EmbeddingsBody
    sequences: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """A chat or completions line: `choices` answers to each prompt."""

    body: bodies.ChatBody | bodies.CompletionBody
    sequences: tuple[tuple[int, ...], ...]
    sampling: Sampling
    choices: int


Prompt = Embed | Generate


def read(
    body: Mapping[str, Any],
    *,
    endpoint: str,
    model: Model,
    tokenizer: TokenizerLike,
    max_inputs: int,
    line_seed: int = 0,
) -> Prompt:
    """The body checked and tokenised. Raises InvalidBody: the line's 400."""
    if endpoint == EMBEDDINGS:
        checked = bodies.embeddings(body, max_inputs=max_inputs)
        return Embed(checked, _embedded(checked.input, tokenizer))
    if endpoint == CHAT:
        chat = bodies.chat(body)
        limit = chat.max_completion_tokens or chat.max_tokens or model.default_max_tokens
        rendered = (tuple(tokenizer.encode_rendered(_render(chat, tokenizer))),)
        return Generate(chat, rendered, _sampling(chat, limit, line_seed), chat.n or 1)
    completion = bodies.completion(body)
    limit = completion.max_tokens or model.default_max_tokens
    prompts = tuple(
        tuple(tokenizer.encode_prompt(item) if isinstance(item, str) else item)
        for item in completion.prompt
    )
    return Generate(completion, prompts, _sampling(completion, limit, line_seed), completion.n or 1)


def _embedded(
    inputs: Sequence[str] | Sequence[list[int]], tokenizer: TokenizerLike
) -> tuple[tuple[int, ...], ...]:
    texts = [item for item in inputs if isinstance(item, str)]
    if texts:
        return tuple(tuple(ids) for ids in tokenizer.encode(texts))
    # Token ids come from the client as the model is to see them.
    return tuple(tuple(item) for item in inputs if not isinstance(item, str))


def _render(chat: bodies.ChatBody, tokenizer: TokenizerLike) -> str:
    # "developer" is the reference's newer name for a system message; templates know the old one.
    messages = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
        }
        for message in chat.messages
    ]
    try:
        return tokenizer.render_chat(messages)
    except TemplateError as error:
        fault = Fault(
            f"The model's chat template refused the messages: {error}", "messages", "invalid_value"
        )
        raise bodies.InvalidBody(fault) from error


def _sampling(
    body: bodies.ChatBody | bodies.CompletionBody, limit: int, line_seed: int
) -> Sampling:
    return Sampling(
        max_tokens=limit,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        seed=line_seed if body.seed is None else body.seed,
        stop=tuple(body.stop or ()),
    )


def seed_of(batch_id: UUID, line: int) -> int:
    """The seed of a line that names none: a retry draws the same numbers, a twin draws others."""
    digest = hashlib.blake2b(batch_id.bytes + line.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def requests(prompt: Prompt, *, key: Hashable) -> list[Request]:
    """One engine request a sequence and choice; ids are (key, position)."""
    match prompt:
        case Embed():
            return [
                EmbedRequest(id=(key, position), tokens=tokens)
                for position, tokens in enumerate(prompt.sequences)
            ]
        case Generate():
            return [
                GenerateRequest(
                    id=(key, position * prompt.choices + choice),
                    prompt=tokens,
                    sampling=prompt.sampling,
                    choice=choice,
                )
                for position, tokens in enumerate(prompt.sequences)
                for choice in range(prompt.choices)
            ]
