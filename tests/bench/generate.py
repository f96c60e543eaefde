"""How fast does the engine answer, against padded batches of the same model?

Two files on SmolLM2-135M in float32: tagging (300 lines, one long system prompt, at most 4 tokens
out) and generation (128 lines, 16 to 128 tokens out).

    python tests/bench/generate.py [--padded]
"""

import argparse
import importlib
import inspect
import json
import random
import time

import torch

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.generate.padded import GenerateLoop
from engine.model.load import load_decoder
from engine.request import GenerateRequest, Generation, Sampling
from engine.surface import Counters
from engine.tokenizer import Tokenizer
from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from worker.models import pull

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
    requests = []
    for number, text in enumerate(texts(300, 45)):
        messages = [{"role": "system", "content": TAGGING}, {"role": "user", "content": text}]
        prompt = tokenizer.encode_rendered(tokenizer.render_chat(messages))
        sampling = Sampling(max_tokens=4, temperature=0.0)
        requests.append(GenerateRequest(number, tuple(prompt), sampling))
    return requests


def generation(tokenizer: Tokenizer) -> list[GenerateRequest]:
    requests = []
    lengths = random.Random(7)
    for number, text in enumerate(texts(428, 25)[300:]):
        messages = [{"role": "user", "content": f"Explain in detail, with an example: {text}"}]
        prompt = tokenizer.encode_rendered(tokenizer.render_chat(messages))
        sampling = Sampling(max_tokens=lengths.randint(16, 128), temperature=0.0)
        requests.append(GenerateRequest(number, tuple(prompt), sampling))
    return requests


def report(name: str, requests: list[GenerateRequest], results: dict, seconds: float) -> None:
    answers = [result for result in results.values() if isinstance(result, Generation)]
    assert len(answers) == len(requests)
    prompt = sum(answer.input_tokens for answer in answers)
    made = sum(answer.output_tokens for answer in answers)
    print(
        f"{name}: {seconds:.1f} s, {prompt} prompt + {made} output tokens, "
        f"{(prompt + made) / seconds:.0f} tokens/s, {made / seconds:.0f} output tokens/s"
    )


def continuous(name: str, config: EngineConfig, requests: list[GenerateRequest]) -> dict:
    engine = Engine(config)
    assert engine.status.path == "packed"
    list(engine.run(requests[:2]))  # warm
    before = engine.counters
    began = time.perf_counter()
    results = dict(engine.run(requests))
    seconds = time.perf_counter() - began
    report(f"{name}, continuous", requests, results, seconds)
    after = engine.counters
    print(
        f"  {after.steps - before.steps} steps, {after.prefill_tokens - before.prefill_tokens} "
        f"prefill, {after.decode_tokens - before.decode_tokens} decode tokens, "
        f"{after.cached_tokens - before.cached_tokens} read from others, "
        f"{after.preempted - before.preempted} preempted, "
        f"{(after.rows - before.rows) / (after.steps - before.steps):.0f} pieces a step"
    )
    return results


def padded(name: str, config: EngineConfig, requests: list[GenerateRequest]) -> dict:
    loop = GenerateLoop(load_decoder(config), config)
    results: dict = {}
    began = time.perf_counter()
    loop.add(requests)
    cost = Counters()
    with torch.inference_mode():
        while len(results) < len(requests):
            outcome = loop.step()
            cost += outcome.cost
            results.update({result.id: result for result in outcome.results})
    report(f"{name}, padded", requests, results, time.perf_counter() - began)
    print(f"  {cost.padded_tokens} tokens with padding")
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--only", choices=["tagging", "generation"])
    parser.add_argument("--set", default="{}", help="changes to the engine's config, as JSON")
    options = parser.parse_args()
    model = Catalog.load(DEFAULT_CATALOG).get("smollm2-135m-instruct")
    assert model is not None
    folder = pull(model, Files().models)
    tokenizer = Tokenizer.from_dir(folder)
    config = EngineConfig(model=folder, kind=Kind.GENERATE, **json.loads(options.set))
    for name, make in (("tagging", tagging), ("generation", generation)):
        if options.only not in (None, name):
            continue
        requests = make(tokenizer)
        found = continuous(name, config, requests)
        if options.padded:
            expected = padded(name, config, requests)
            same = sum(found[n].token_ids == expected[n].token_ids for n in expected)
            print(f"  {same} of {len(expected)} answers are the same, token for token")


if __name__ == "__main__":
    main()
