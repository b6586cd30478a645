"""Send messages to a chat if a stage fails or stalls and when the run ends, and mails if the train stage stalls.

A message is sent at least once. Each message has an identifier, in its text and in the header Idempotency-Key, so that
a receiver can recognize a repeated message. The body has the format of Slack's incoming webhooks, {"text": …}
(https://api.slack.com/messaging/webhooks). Mattermost and Discord's /slack endpoint also accept this format.
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

from pipeline.base.errors import UserError, make_printable
from pipeline.base.files import read_last_objects
from pipeline.base.text import format_duration
from pipeline.config.sections import URL
from pipeline.data.manifest import count_training_steps
from pipeline.evaluate.result import format_result, read_newest_result
from pipeline.run.directory import Run
from pipeline.run.events import Cancelled, Done, Failed
from pipeline.run.metrics import is_step_line
from tracking.tracker import HOST, Line, RunReader, Tracker, TrackerState, display_names, last_stage, sha256_line

TIMEOUT_S = 10.0
"""Time limit of a request to the webhook."""
_MAIL_TIMEOUT_S = 60.0
"""Time limit of sendmail."""
_PROCESS_START = time.time()
"""The start of this process, in seconds since 1970. The time before does not count as a stall."""
MIN_HANG_S = 300.0
"""The shortest time without progress that the watchdog accepts (pipeline/resilience/watchdog.py)."""
_STALL_STEPS = 10
"""If `recovery.hang_s` is not set, a stall is reported at the earliest after this many times the median duration of a
step."""
_SUSPENDED_S = 30.0
"""If the time between two polls is longer than this, Slurm suspended the job of this process (`scontrol suspend`)."""


def escape_chat_text(text: str) -> str:
    """Return `text` with escapes, so that a chat shows the original text, without links, and notifies no channel.

    Slack requires the three entities (https://api.slack.com/reference/surfaces/formatting#escaping). Mattermost and
    Discord notify everyone if a message contains @channel, @here, @all or @everyone. A zero-width space after the @
    prevents this.
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"@(?=(?:channel|here|all|everyone)\b)", "@\u200b", text, flags=re.IGNORECASE)


class Webhook(Tracker):
    """Sends messages to a chat, with one request per message."""

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        self._last_poll = time.time()
        self._awake_since = _PROCESS_START
        """When this process started, or continued after a suspension."""

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Record the duration of the longest held-out evaluation so far, because an evaluation may delay a step."""
        durations = (line.get("evaluate_s") or 0.0 for line in steps)
        self.state.evaluate_s = max([self.state.evaluate_s, *durations])

    def on_event(self, event: Line) -> None:
        """Send a message if the event is a failure, a cancellation or the end of the run."""
        if (message := self._describe_event(event)) is not None:
            self._send_message(message, sha256_line(event)[:12])

    def on_poll(self) -> bool:
        """Send a message if the train stage makes no progress, before the watchdog of the ranks ends the attempt.

        The limits here are therefore half as long as those of the watchdog.

        Returns:
            Whether a stall was reported.
        """
        now = time.time()
        if now - self._last_poll > _SUSPENDED_S:
            self._awake_since = now
        self._last_poll = now
        attempt = self.reader.running_attempt
        recovery = self.run.config.recovery
        quiet_s = now - max(self.state.heard, self._awake_since)  # how long no data has arrived
        hang_s = recovery.hang_s or MIN_HANG_S
        if attempt is None or 2 * quiet_s < hang_s:  # once there is a step, every limit below is at least `hang_s` / 2
            return False
        steps = [*read_last_objects(self.run.metrics_file, is_step_line)]  # newest first
        if not steps or (steps[0].get("time") or 0.0) < attempt.timestamp:  # no step of this attempt
            limit_s = recovery.start_s / 2
            since = "since the start"
        else:
            limit_s = self._step_limit_s(steps, hang_s)
            since = f"since step {steps[0]['step']}"
        identifier = sha256_line({"stall": since, "start": attempt.time})[:12]
        # no step follows the last one; the ranks then save the final checkpoint
        is_last_save = steps and steps[0]["step"] == count_training_steps(self.run.config, self.run.data_dir)
        if quiet_s < limit_s or identifier == self.state.stall or is_last_save:
            return False
        self._send_message(f"train seems to stall: no step for {format_duration(quiet_s)}, {since}", identifier)
        self.state.stall = identifier
        return True

    def _step_limit_s(self, steps: Sequence[Line], hang_s: float) -> float:
        """Return after how many seconds without a new step a stall is reported.

        Args:
            steps: the last lines of metrics.jsonl, newest first.
            hang_s: `recovery.hang_s`, or `MIN_HANG_S` if this key is not set.
        """
        recovery = self.run.config.recovery
        # saves and evaluations delay the next step
        pauses = [sum(line.get(key) or 0.0 for key in ("checkpoint_s", "evaluate_s")) for line in steps]
        several_steps_s = 0.0 if recovery.hang_s else _STALL_STEPS * median(line["step_time_s"] for line in steps)
        limit_s = max(hang_s / 2, several_steps_s) + max(pauses)
        step = steps[0]["step"]
        evaluate_every = self.run.config.train.evaluate_every
        if step % self.run.config.checkpoint.every_steps == 0:  # the ranks save a checkpoint after this step
            limit_s = max(limit_s, recovery.save_s / 2)
        # the next step includes a held-out evaluation, which may take as long as a save
        if evaluate_every and (step + 1) % evaluate_every == 0:
            limit_s = max(limit_s + self.state.evaluate_s, recovery.save_s / 2)
        return limit_s

    def _send_message(self, message: str, identifier: str) -> None:
        """Send a message in one line, with the run, the host and the identifier."""
        text = f"{display_names(self.run)[0]}: {message} [{self.run.path}, {HOST}, id {identifier}]"
        one_line = " ".join(make_printable(text).split())
        self._send(one_line, identifier)

    def _send(self, text: str, identifier: str) -> None:
        """Send a request to the webhook.

        Raises:
            OSError: if the request fails. The message does not contain the URL, because the URL is a secret.
        """
        body = json.dumps({"text": escape_chat_text(text)}).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": identifier}
        request = urllib.request.Request(self._url(), body, headers)
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            raise OSError(f"the webhook answered {error.code} {error.reason}") from None
        except (ValueError, HTTPException) as error:  # the messages of these exceptions contain the URL
            raise OSError(f"the webhook cannot be reached at its URL: {type(error).__name__}") from None

    def _url(self) -> str:
        """Return the URL of the webhook, from the config or from the environment variable that the config names.

        Raises:
            UserError: if the variable is not set, or its value is not a URL.
        """
        webhook = self.run.config.track.webhook
        assert webhook is not None
        if webhook.url is not None:
            return webhook.url
        if not (url := os.environ.get(webhook.variable or "")):
            raise UserError(
                "track.webhook_url_unset",
                f"track.webhook.variable: the environment variable {webhook.variable} is not set; set it, or add it to "
                "site.pass",
            )
        if not URL.fullmatch(url):
            raise UserError(
                "track.webhook_url_malformed",
                f"track.webhook.variable: the value of {webhook.variable} is not a URL such as https://host/path",
            )
        return url

    def _describe_event(self, event: Line) -> str | None:
        """Return the message about an event; None if no message is sent about the event."""
        stage = event.get("stage")
        if event["event"] == Failed.NAME:
            reason = str(event.get("message", "")).partition("\n")[0]
            outcome = "stalled" if event.get("cause") == "hang" else f"failed ({event.get('cause')})"
            return f"{stage} {outcome}: {reason}"
        if event["event"] == Cancelled.NAME:
            return f"{stage} was cancelled"
        # the last stage of a sweep itself is the last shared stage, so its end is not the end of the sweep
        if event["event"] == Done.NAME and stage == last_stage(self.run) and self.run.config.sweep is None:
            result = read_newest_result(self.run)
            return f"done. {format_result(result)}" if result else "done"
        return None


class Mail(Webhook):
    """Sends a mail about a stall with this node's sendmail(8). Slurm sends all other mails, but detects no stalls."""

    def on_event(self, event: Line) -> None:
        """Do nothing, because Slurm sends mails about jobs that end."""

    def _send(self, text: str, identifier: str) -> None:
        """Send a mail to the address in `track.mail`.

        Raises:
            UserError: if this node has no sendmail.
            subprocess.SubprocessError: if sendmail fails or does not end in time.
        """
        sendmail = shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib")
        if sendmail is None:
            raise UserError("track.no_sendmail", f"track.mail: {HOST} has no sendmail; the message is: {text}")
        mail = EmailMessage()
        mail["To"] = self.run.config.track.mail
        mail["Subject"] = text.partition(" [")[0]  # without path, host and identifier
        mail["Message-ID"] = f"<{identifier}@{HOST}>"
        mail.set_content(text)
        subprocess.run([sendmail, "-t"], input=bytes(mail), timeout=_MAIL_TIMEOUT_S, check=True)
