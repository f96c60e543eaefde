"""Which two files does the bench of generation run? Docstrings of the standard library."""

import importlib
import inspect
import random

from engine.request import GenerateRequest, Sampling
from engine.tokenizer import Tokenizer

TAGGING = """You label short technical texts for a search index. Read the text of the user and
answer with exactly one label of this list and nothing else: strings, files, dates, numbers,
network, processes, threads, errors, testing, typing, compression, archives, email, html, json, xml,
databases, logging, security, graphics, other. If two labels fit, take the one that stands earlier
in the list. Never explain your choice, never repeat the text."""

MODULES = """
    argparse asyncio collections datetime decimal email.message functools http.client inspect json
    logging mailbox optparse os pathlib shutil smtplib socket sqlite3 statistics string subprocess
    tarfile tempfile textwrap threading typing unittest urllib.request xml.dom.minidom zipfile
"""


def texts(count: int, words: int) -> list[str]:
    """Docstrings of the standard library, cut to about so many words."""
    found: list[str] = []
    for name in MODULES.split():
        module = importlib.import_module(name)
        members = [member for _, member in inspect.getmembers(module)]
        members += [m for c in members if inspect.isclass(c) for _, m in inspect.getmembers(c)]
        for member in members:
            text = inspect.getdoc(member) if callable(member) else None
            if text and len(text.split()) > 12:
                found.append(" ".join(text.split()[:words]))
    unique = sorted(set(found))
    random.Random(5).shuffle(unique)
    return unique[:count]


def tagging(tokenizer: Tokenizer) -> list[GenerateRequest]:
    """300 lines, one long system prompt, at most 4 tokens out."""
    requests = []
    for number, text in enumerate(texts(300, 45)):
        messages = [{"role": "system", "content": TAGGING}, {"role": "user", "content": text}]
        prompt = tokenizer.encode_rendered(tokenizer.render_chat(messages))
        requests.append(GenerateRequest(number, tuple(prompt), _greedy(4)))
    return requests


def generation(tokenizer: Tokenizer) -> list[GenerateRequest]:
    """128 lines of 16 to 128 tokens out."""
    requests = []
    lengths = random.Random(7)
    for number, text in enumerate(texts(428, 25)[300:]):
        messages = [{"role": "user", "content": f"Explain in detail, with an example: {text}"}]
        prompt = tokenizer.encode_rendered(tokenizer.render_chat(messages))
        requests.append(GenerateRequest(number, tuple(prompt), _greedy(lengths.randint(16, 128))))
    return requests


def _greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0)
