"""Words to a chat: at a failure, a stall and the end, each at least once, and named by an id; of a stall by mail, too.

The body is what Slack's incoming webhooks take, {"text": …} (https://api.slack.com/messaging/webhooks); Mattermost and
Discord's /slack endpoint take it, too. The id stands in the text and in the header Idempotency-Key.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.message import EmailMessage
from http.client import HTTPException
from statistics import median

from pipeline.base.errors import UserError, printable
from pipeline.base.files import last_objects
from pipeline.base.text import format_duration
from pipeline.config.track import URL
from pipeline.data.manifest import steps_of
from pipeline.evaluate.result import format_result, read_newest_result
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.ledger import event_timestamp
from tracking.run_reader import Line, Record, sha256
from tracking.tracker import HOST, Memory, Sink, last_stage, names

TIMEOUT_S, _MAIL_S = 10.0, 60.0
_BEGAN = time.time()
"""This process, which knows nothing of what was before it: a job that waited is no stall."""
LEAST_HANG_S, _STEPS = 300.0, 10
"""The watchdog waits at least so long (pipeline/resilience/watchdog.py); a stall is told after so many usual steps."""
_SUSPENDED_S = 30.0
"""Longer between two looks: the job was suspended (`scontrol suspend`), and with it this process."""


def escape_chat_text(text: str) -> str:
    """Return `text` so that a chat shows it as it is, and neither calls a channel nor makes a link of it.

    Slack asks for the three entities (https://api.slack.com/reference/surfaces/formatting#escaping). Mattermost and
    Discord also call everybody for a plain @channel, @here, @all or @everyone; a zero-width space prevents that.
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"@(?=(?:channel|here|all|everyone)\b)", "@\u200b", text, flags=re.IGNORECASE)


class Webhook(Sink):
    """One request per message."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        super().__init__(run, memory, record)
        self._looked, self._awake = time.time(), _BEGAN

    def steps(self, found: Sequence[Line]) -> None:
        """Keep how long a look at held-out data took at most: the next one may come long after."""
        self.memory.evaluate_s = max([self.memory.evaluate_s, *(line.get("evaluate_s") or 0.0 for line in found)])

    def event(self, event: Line) -> None:
        """Tell it, if it is one that people wait for."""
        if (words := self._words(event)) is not None:
            self._tell(words, sha256(event)[:12])

    def look(self) -> bool:
        """Tell of a training from which nothing has come for long: half as long as its watchdog waits, or less."""
        start, limits, now = self.record.going, self.run.config.recovery, time.time()
        if now - self._looked > _SUSPENDED_S:
            self._awake = now
        self._looked = now
        quiet_s = now - max(self.memory.heard, self._awake)
        hang_s = limits.hang_s or LEAST_HANG_S
        if start is None or 2 * quiet_s < hang_s:
            return False
        steps = [*last_objects(self.run.metrics, lines.metric)]  # the newest first
        if not steps or (steps[0].get("time") or 0.0) < event_timestamp(start):  # none of this attempt
            longest_s, last = limits.start_s / 2, "since the start"
        else:
            pauses = [sum(line.get(key) or 0.0 for key in ("checkpoint_s", "evaluate_s")) for line in steps]
            usual_s = 0.0 if limits.hang_s else _STEPS * median(line["step_time_s"] for line in steps)
            longest_s, step = max(hang_s / 2, usual_s) + max(pauses), steps[0]["step"]
            last, looks = f"since step {step}", self.run.config.train.evaluate_every
            if step % self.run.config.checkpoint.every_steps == 0:  # it saves
                longest_s = max(longest_s, limits.save_s / 2)
            if looks and (step + 1) % looks == 0:
                longest_s = max(longest_s + self.memory.evaluate_s, limits.save_s / 2)
        name = sha256({"stall": last, "start": start["time"]})[:12]
        saves_last = steps and steps[0]["step"] == steps_of(self.run.config, self.run.data)
        if quiet_s < longest_s or name == self.memory.stall or saves_last:
            return False
        self._tell(f"train seems to stall: no step for {format_duration(quiet_s)}, {last}", name)
        self.memory.stall = name
        return True

    def _tell(self, words: str, name: str) -> None:
        text = f"{names(self.run)[0]}: {words} [{self.run.path}, {HOST}, id {name}]"
        self._send(" ".join(printable(text).split()), name)  # one line: a path or a message may hold several

    def _send(self, text: str, name: str) -> None:
        text = escape_chat_text(text)
        headers = {"Content-Type": "application/json", "Idempotency-Key": name}
        request = urllib.request.Request(self._url(), json.dumps({"text": text}).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            raise OSError(f"the webhook answered {error.code} {error.reason}") from None  # not its URL: it is a secret
        except (ValueError, HTTPException) as error:  # these quote it
            raise OSError(f"the webhook cannot be reached by its URL: {type(error).__name__}") from None

    def _url(self) -> str:
        wanted = self.run.config.track.webhook
        assert wanted is not None
        if wanted.url is not None:
            return wanted.url
        if not (url := os.environ.get(wanted.variable or "")):
            raise UserError(f"track.webhook.variable: {wanted.variable} is not set; name it in site.pass, or set it")
        if not URL.fullmatch(url):
            raise UserError(
                f"track.webhook.variable: {wanted.variable} is set, but holds no URL such as https://host/path"
            )
        return url

    def _words(self, event: Line) -> str | None:
        """What to say of an event; None where nobody waits for it."""
        stage, first = event.get("stage"), str(event.get("message", "")).partition("\n")[0]
        if event["event"] == "failed":
            told = "stalled" if event.get("cause") == "hang" else f"failed ({event.get('cause')})"
            return f"{stage} {told}: {first}"
        if event["event"] == "cancelled":
            return f"{stage} was cancelled"
        if event["event"] == "done" and stage == last_stage(self.run) and self.run.config.sweep is None:
            result = read_newest_result(self.run)
            return f"done. {format_result(result)}" if result else "done"
        return None


class Mail(Webhook):
    """A mail at a stall, of which Slurm, whose mails tell the rest, knows nothing; by the node's own sendmail(8)."""

    def event(self, event: Line) -> None:
        """Slurm tells these."""

    def _send(self, text: str, name: str) -> None:
        sendmail = shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib")
        if sendmail is None:
            raise UserError(f"track.mail: {HOST} has no sendmail: {text}")
        mail = EmailMessage()
        mail["To"], mail["Subject"], mail["Message-ID"] = (
            self.run.config.track.mail,
            text.partition(" [")[0],
            f"<{name}@{HOST}>",
        )
        mail.set_content(text)
        subprocess.run([sendmail, "-t"], input=bytes(mail), timeout=_MAIL_S, check=True)
