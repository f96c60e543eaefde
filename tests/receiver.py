"""Where do tests have webhooks sent? To a real HTTP server that remembers what it was sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Received:
    """One request, as it came."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class Receiver:
    """Answers with the statuses of `answers`, one after another, and then with 200.

    While `gate` is closed, requests to paths that begin with /slow are held.
    """

    url: str
    answers: list[int] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def at(self, path: str) -> list[Received]:
        """What came to that path."""
        return [each for each in self.received if each.path == path]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A server on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            made.received.append(Received(self.path, headers, body))
            if self.path.startswith("/slow"):
                made.gate.wait(30)
            status = made.answers.pop(0) if made.answers else 200
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", f"{made.url}/elsewhere")
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256  # a connection that finds no place waits for a second

    server = Server(("127.0.0.1", 0), Handler)
    made = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
