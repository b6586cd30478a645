"""A webhook server that can fail on purpose: `python -m tests.support.webhook_receiver PORT FOLDER`.

The server appends each stored message to `FOLDER/received.jsonl` as `{"id": ..., "text": ...}`. The file
`FOLDER/behavior` contains one word, which selects how the server handles a message:

- `well`: store the message and send status 200.
- `refuse`: send status 500, store nothing.
- `hang`: send nothing, store nothing.
- `lose`: store the message, but send nothing, so that the sender must repeat the message.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HANG_S = 30.0
"""Seconds before a hanging connection is closed. Longer than a sender waits (tracking/webhook.py: TIMEOUT_S)."""


class Receiver(BaseHTTPRequestHandler):
    """Handle the requests of the webhook server."""

    folder: Path

    def do_GET(self) -> None:
        """Send status 200, so that a test can wait until the server runs."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """Handle a message as selected by the file `behavior`."""
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
            self.do_GET()  # sends status 200


if __name__ == "__main__":
    Receiver.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
