"""A receiver of webhooks that misbehaves: `python -m tests.support.webhook_receiver PORT FOLDER`.

What it takes it adds to `FOLDER/heard.jsonl` as `{"id": ..., "text": ...}`. How it takes a request stands in
`FOLDER/mood`: `well`; `refuse` (500, nothing kept); `hang` (nothing kept, no answer); `lose` (kept, and the answer is
lost, so that the sender must say it again).
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
    """One request."""

    folder: Path

    def do_GET(self) -> None:
        """Say that it is there."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """Take a message, or not."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mood = (self.folder / "mood").read_text()
        if mood == "refuse":
            self.send_error(500)
            return
        if mood == "hang":
            time.sleep(HANG_S)
            return
        with open(self.folder / "heard.jsonl", "a") as file:
            file.write(json.dumps({"id": self.headers["Idempotency-Key"], "text": body["text"]}) + "\n")
        if mood != "lose":
            self.do_GET()


if __name__ == "__main__":
    Receiver.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
