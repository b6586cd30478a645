"""Words to a chat: at a failure, a stall and the end, each at least once, and named by an id.

The body is what Slack's incoming webhooks take, {"text": …} (https://api.slack.com/messaging/webhooks); Mattermost and
Discord's /slack endpoint take it, too. The id stands in the text and in the header Idempotency-Key.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request

from pipeline.base.errors import UserError, printable
from pipeline.evaluate.result import newest_result, result_words
from slurm.track.record import Line, sha256
from slurm.track.sink import HOST, Sink, last_stage, names

TIMEOUT_S = 10.0


class Webhook(Sink):
    """One request per message."""

    def event(self, event: Line) -> None:
        """Tell it, if it is one that people wait for."""
        if (words := self._words(event)) is None:
            return
        name = sha256(event)[:12]
        text = f"{names(self.run)[0]}: {printable(words)} [{self.run.path}, {HOST}, id {name}]"
        headers = {"Content-Type": "application/json", "Idempotency-Key": name}
        request = urllib.request.Request(self._url(), json.dumps({"text": text}).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            raise OSError(f"the webhook answered {error.code} {error.reason}") from None  # not its URL: it is a secret

    def _url(self) -> str:
        wanted = self.run.config.track.webhook
        assert wanted is not None
        if wanted.url is not None:
            return wanted.url
        if not (url := os.environ.get(wanted.variable or "")):
            raise UserError(f"track.webhook.variable: {wanted.variable} is not set; name it in site.pass, or set it")
        return url

    def _words(self, event: Line) -> str | None:
        """What to say of an event; None where nobody waits for it."""
        stage, first = event.get("stage"), str(event.get("message", "")).partition("\n")[0]
        if event["event"] == "failed":
            told = "stalled" if event.get("cause") == "hang" else f"failed ({event.get('cause')})"
            return f"{stage} {told}: {first}"
        if event["event"] == "cancelled":
            return f"{stage} was cancelled"
        if event["event"] == "done" and stage == last_stage(self.run):
            result = newest_result(self.run)
            return f"done. {result_words(result)}" if result else "done"
        return None
