"""How does a program use halfrate? Upload, create a batch, poll, download; here twice at once.

    .venv/bin/python examples/demo.py [--home .halfrate] [--out out]

Starts the stack if it is not up, runs both files beside this program, checks and shows the results
and stops what it started. Exit status 0 means that every line of both files was answered.
"""

import argparse
import json
import math
import operator
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import openai
from openai.types import Batch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
MODELS = ("all-minilm-l6-v2", "smollm2-135m-instruct")  # an engine worker each, and no more
POLL_S = 0.5
DOWN_S = 120.0  # the object store may take half a minute to stop
LOG_LINES = 12
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})

Endpoint = Literal["/v1/embeddings", "/v1/chat/completions"]


class DemoError(Exception):
    """Something did not work. The message says what, for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Example:
    """One input file, and where its results go."""

    name: str
    endpoint: Endpoint
    input: Path
    output: Path
    errors: Path  # exists afterwards only if a line failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """One example, its batch in a terminal state, and the seconds from creation to there."""

    example: Example
    batch: Batch
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and give its exit status: 0 worked, 1 did not, 130 was interrupted."""
    options = _parse(arguments)
    console = Console()
    # A demo ended by `kill` or a closed terminal stops its stack as one ended by Ctrl-C does.
    for number in STOPPING:
        signal.signal(number, _interrupt)
    try:
        run_demo(options.home, options.out, time.monotonic() + options.deadline, console)
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    except (DemoError, openai.OpenAIError, OSError, subprocess.TimeoutExpired) as error:
        console.print(f"[bold red]The demo failed.[/] {escape(str(error))}")
        show_logs(options.home, console)
        return 1
    console.print(f"[bold green]It worked.[/] The results are in {escape(str(options.out))}/.")
    return 0


def run_demo(home: Path, out: Path, deadline: float, console: Console) -> None:
    """The whole demo; `deadline` is on the monotonic clock. Raises what `main` explains."""
    chosen = examples(out)
    clear(chosen)
    with stack(home, deadline, console):
        with connect(home) as client:
            outcomes = run_batches(client, chosen, deadline, console)
            for outcome in outcomes:
                download(client, outcome.batch.output_file_id, outcome.example.output)
                download(client, outcome.batch.error_file_id, outcome.example.errors)
        for outcome in outcomes:
            check(outcome)
        show_table(outcomes, console)
        show_neighbours(chosen[0], console)
        show_tags(chosen[1], console)


def examples(out: Path) -> tuple[Example, Example]:
    """Both examples, with results in `out`."""

    def example(name: str, endpoint: Endpoint) -> Example:
        errors = out / f"{name}.errors.jsonl"
        return Example(name, endpoint, HERE / f"{name}.jsonl", out / f"{name}.jsonl", errors)

    return (
        example("embeddings", "/v1/embeddings"),
        example("tagging", "/v1/chat/completions"),
    )


def clear(chosen: Sequence[Example]) -> None:
    """Remove an earlier run's results, which could be taken for this one's."""
    for example in chosen:
        example.output.parent.mkdir(parents=True, exist_ok=True)
        example.output.unlink(missing_ok=True)
        example.errors.unlink(missing_ok=True)


def left(deadline: float) -> float:
    """Seconds until the deadline, more than 0. Raises DemoError if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise DemoError("The demo ran out of time; --deadline gives it more.")
    return seconds


# The stack


@contextmanager
def stack(home: Path, deadline: float, console: Console) -> Iterator[None]:
    """A stack that is up inside the block; afterwards it is as it was before."""
    if is_up(home, deadline):
        console.print(f"Using the stack that is up in {escape(str(home))}.")
        yield
        return
    try:
        start(home, left(deadline))
        yield
    except BaseException:
        with suppress(DemoError):  # it would hide the failure that matters
            stop(home)
        raise
    stop(home)


def is_up(home: Path, deadline: float) -> bool:
    """Whether any part of the stack of this home runs."""
    answer = subprocess.run(
        [command(), "status", "--home", str(home), "--json"],
        capture_output=True,
        check=False,
        timeout=left(deadline),
    )
    try:
        parts = json.loads(answer.stdout)["parts"]
    except (ValueError, KeyError):  # no such home: then `up` makes it, or says what is wrong
        return False
    return any(part["state"] != "stopped" for part in parts)


def start(home: Path, timeout_s: float) -> None:
    """Bring the stack up; returns when every part is ready."""
    serving = ("--serve", ",".join(MODELS))
    if halfrate("up", "--home", str(home), "--detach", *serving, timeout_s=timeout_s) != 0:
        raise DemoError("The stack did not start.")


def stop(home: Path) -> None:
    """Take the stack down, and let no second Ctrl-C leave half of it behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        if halfrate("down", "--home", str(home), timeout_s=DOWN_S) != 0:
            raise DemoError("The stack did not stop.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def halfrate(*arguments: str, timeout_s: float) -> int:
    """Run the command, on this terminal, and give its exit status."""
    process = subprocess.Popen([command(), *arguments])
    try:
        return process.wait(timeout_s)
    except BaseException as error:
        process.terminate()  # not SIGKILL: the command tidies up what it has begun
        try:
            process.wait(DOWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            raise DemoError(f"halfrate {arguments[0]} took too long.") from error
        raise


def command() -> str:
    """Where `halfrate` was installed: beside the Python that runs this."""
    path = Path(sys.executable).with_name("halfrate")
    if not path.exists():
        raise DemoError(f"{path} is missing: run `make setup`, then this with .venv/bin/python.")
    return str(path)


# The batches


def connect(home: Path) -> openai.OpenAI:
    """An ordinary OpenAI client, pointed at the stack of this home."""
    settings = read_client_env((home / "client.env").read_text())
    return openai.OpenAI(
        base_url=settings["OPENAI_BASE_URL"],
        api_key=settings["OPENAI_API_KEY"],
        timeout=60,
        # The stack is on this machine, so a proxy that the environment names is not asked.
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def read_client_env(text: str) -> dict[str, str]:
    """The variables of a client.env, quoted or not."""
    pairs = (word.partition("=") for word in shlex.split(text, comments=True))
    return {name: value for name, equals, value in pairs if equals}


def run_batches(
    client: openai.OpenAI, chosen: Sequence[Example], deadline: float, console: Console
) -> list[Outcome]:
    """Both batches at once, each to its end."""
    uploaded = [client.files.create(file=example.input, purpose="batch").id for example in chosen]
    batches = [
        client.batches.create(
            input_file_id=file_id, endpoint=example.endpoint, completion_window="24h"
        )
        for example, file_id in zip(chosen, uploaded, strict=True)
    ]
    return await_batches(client, list(zip(chosen, batches, strict=True)), deadline, console)


def await_batches(
    client: openai.OpenAI,
    created: Sequence[tuple[Example, Batch]],
    deadline: float,
    console: Console,
) -> list[Outcome]:
    """Poll until every batch is terminal, with a bar for each."""
    began = time.monotonic()
    ended: dict[str, Outcome] = {}  # by batch id
    with _bars(console) as progress:
        bars = {
            batch.id: progress.add_task(
                example.name, total=len(custom_ids(example.input)), status=batch.status
            )
            for example, batch in created
        }
        while len(ended) < len(created):
            time.sleep(min(POLL_S, left(deadline)))
            for example, before in created:
                if before.id in ended:
                    continue
                batch = client.batches.retrieve(before.id)
                progress.update(bars[batch.id], completed=answered(batch), status=batch.status)
                if batch.status in TERMINAL:
                    progress.stop_task(bars[batch.id])
                    ended[batch.id] = Outcome(example, batch, time.monotonic() - began)
    return [ended[batch.id] for _, batch in created]


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]:<11}"),
        TimeElapsedColumn(),
        console=console,
    )


def answered(batch: Batch) -> int:
    """Lines that are done, well or badly."""
    counts = batch.request_counts
    return 0 if counts is None else counts.completed + counts.failed


def download(client: openai.OpenAI, file_id: str | None, path: Path) -> None:
    """Stream a result file to disk, if there is one."""
    if file_id is not None:
        with client.files.with_streaming_response.content(file_id) as response:
            response.stream_to_file(path)


# The checks


def check(outcome: Outcome) -> None:
    """Raises DemoError unless the batch completed and every line of its input was answered."""
    example, batch = outcome.example, outcome.batch
    if batch.status != "completed":
        reasons = [str(error.message) for error in (batch.errors and batch.errors.data) or []]
        raise DemoError(
            f"Batch {batch.id} ({example.name}) ended {batch.status}. " + " ".join(reasons[:3])
        )
    errors = custom_ids(example.errors)
    problems = faults(custom_ids(example.input), custom_ids(example.output), errors)
    if problems:
        raise DemoError(f"{example.name}: " + "; ".join(problems[:5]))
    if errors:
        number = "1 line" if len(errors) == 1 else f"{len(errors)} lines"
        raise DemoError(f"{example.name}: {number} failed, see {example.errors}.")


def faults(inputs: Sequence[str], output: Sequence[str], errors: Sequence[str]) -> list[str]:
    """What is wrong with the custom_ids of a batch's results, nothing if all is well.

    Each id of the input must stand once in output and errors together, and both files must keep
    the order of the input.
    """
    found = Counter([*output, *errors])
    place = {custom_id: number for number, custom_id in enumerate(inputs)}
    problems = [f"{custom_id} is missing" for custom_id in inputs if found[custom_id] == 0]
    problems += [f"{custom_id} stands {n} times" for custom_id, n in found.items() if n > 1]
    problems += [f"{custom_id} was not asked for" for custom_id in found if custom_id not in place]
    for name, ids in (("output", output), ("error file", errors)):
        places = [place[custom_id] for custom_id in ids if custom_id in place]
        if places != sorted(places):
            problems.append(f"the {name} is not in input order")
    return problems


def custom_ids(path: Path) -> list[str]:
    """The custom_id of each line of a file, none if there is no file."""
    return [line["custom_id"] for line in read_lines(path)] if path.exists() else []


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file, one at a time."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


# The results


def show_table(outcomes: Sequence[Outcome], console: Console) -> None:
    """What was done, how fast, and what it costs."""
    table = Table(title="Two batches")
    table.add_column("example")
    for heading in ("lines", "input tokens", "output tokens", "seconds", "standard", "paid"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        usage, cost = outcome.batch.usage, cost_of(outcome.batch)
        if usage is None:
            raise DemoError(f"Batch {outcome.batch.id} completed without usage.")
        table.add_row(
            outcome.example.name,
            f"{answered(outcome.batch):,}",
            f"{usage.input_tokens:,}",
            f"{usage.output_tokens:,}",
            f"{outcome.seconds:.1f}",
            f"{cost['standard']} {cost['currency']}",
            f"{cost['paid']} {cost['currency']}",
        )
    console.print(table)


def cost_of(batch: Batch) -> Mapping[str, str]:
    """Of a batch: `standard` price, price `paid`, `currency`; beside the reference's own fields."""
    extras: Mapping[str, Any] = batch.model_extra or {}
    cost: Mapping[str, str] = extras["halfrate"]["cost"]
    return cost


def show_neighbours(example: Example, console: Console) -> None:
    """For three texts of the input, the one that the model thinks closest."""
    texts = [line["body"]["input"] for line in read_lines(example.input)]
    vectors = [
        line["response"]["body"]["data"][0]["embedding"] for line in read_lines(example.output)
    ]
    table = Table("text", "nearest neighbour", "cosine", title="Embeddings", show_lines=True)
    for index in range(0, len(texts), len(texts) // 3 + 1):
        neighbour, cosine = nearest(vectors, index)
        table.add_row(shorten(texts[index]), shorten(texts[neighbour]), f"{cosine:.2f}")
    console.print(table)


def nearest(vectors: Sequence[Sequence[float]], index: int) -> tuple[int, float]:
    """The index of the vector closest to that at `index`, itself aside, and their cosine."""

    def cosine(other: Sequence[float]) -> float:
        dot: float = sum(map(operator.mul, mine, other))
        return dot / (math.hypot(*mine) * math.hypot(*other))

    mine = vectors[index]
    others = (number for number in range(len(vectors)) if number != index)
    score, best = max((cosine(vectors[number]), number) for number in others)
    return best, score


def show_tags(example: Example, console: Console) -> None:
    """Some messages of the input, with the tag that the model chose."""
    messages = [line["body"]["messages"][-1]["content"] for line in read_lines(example.input)]
    tags = [
        line["response"]["body"]["choices"][0]["message"]["content"]
        for line in read_lines(example.output)
    ]
    table = Table("message", "tag", title="Tagging")
    for index in range(0, len(messages), len(messages) // 6 + 1):
        table.add_row(shorten(messages[index]), escape(str(tags[index]).strip()))
    console.print(table)


def shorten(text: str, width: int = 90) -> str:
    """The text on one line, cut to `width` characters, as rich shows it literally."""
    flat = " ".join(text.split())
    return escape(flat if len(flat) <= width else flat[: width - 1] + "…")


def show_logs(home: Path, console: Console) -> None:
    """The end of each part's log."""
    for log in sorted((home / "logs").glob("*.log")):
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        console.print(f"[dim]── {escape(str(log))}")
        console.print("\n".join(last), markup=False, highlight=False)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run two batches on a local stack.")
    parser.add_argument("--home", type=Path, default=Path(".halfrate"), help="of the stack")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds, 900 by default")
    return parser.parse_args(arguments)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
