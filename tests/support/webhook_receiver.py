"""A webhook server that can misbehave: `python -m tests.support.webhook_receiver PORT FOLDER`.

It appends each message that it stores to `FOLDER/received.jsonl` as `{"id": ..., "text": ...}`. The file
`FOLDER/behavior` selects how it handles a request:

- `well`: store the message and answer 200.
- `refuse`: answer 500, store nothing.
- `hang`: give no answer, store nothing.
- `lose`: store the message, but send no answer, so that the sender must repeat it.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HANG_S = 30.0
"""Longer than a sender waits (tracking/webhook.py: TIMEOUT_S)."""


class Receiver(BaseHTTPRequestHandler):
    """Handle one request."""

    folder: Path

    def do_GET(self) -> None:
        """Answer 200, so that a test can wait for the server."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """Handle a message as the file `behavior` selects."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behavior = (self.folder / "behavior").read_text()
        if behavior == "refuse":
            self.send_error(500)
            return
        if behavior == "hang":
            time.sleep(HANG_S)
            return
        with open(self.folder / "received.jsonl", "a") as file:
            file.write(json.dumps({"id": self.headers["Idempotency-Key"], "text": body["text"]}) + "\n")
        if behavior != "lose":
            self.do_GET()


if __name__ == "__main__":
    Receiver.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
