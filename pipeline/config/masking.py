"""Mask possible secrets of a config in everything that is printed, logged or put into a report.

Secrets do not belong in a config. Instead, `site.secrets` names a private file, and `site.pass` names variables of the
submitting shell. If a user nevertheless writes a secret into the config, only `config.yaml` and `changes.jsonl` contain
it, because jobs need it.

- `site.setup` is shell code, in which no pattern finds every secret (`X=…; export TOKEN=$X`). A line is masked unless
  it is a harmless command. Even a single word is masked, because it may be the input of the previous line (`<<EOF`).
- Options of other programs are masked if their name or value looks like a secret.
- The user and password of every URL are masked. When in doubt, a value is masked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pipeline.config.sections import Config, has_policy, list_keys_with, walk_fields
from pipeline.config.types import Policy, SecretReference

_MASK = "*****"
_HARMLESS = re.compile(
    r"((module|ml|spack load|(conda|micromamba) activate|ulimit|umask|unset|cd)(\s+[\w./+~@%-]+)+"
    r"|(source|\.)\s+[\w./+~@%-]+|[.~]*/[\w./-]+)?\s*"
)
"""A shell line that cannot contain a secret: an empty line, a path, or a command such as `module load cuda/12.4`."""
_SECRET_REFERENCES = {
    key: re.compile(mark.pattern)
    for key, field in walk_fields()
    for mark in field.metadata
    if isinstance(mark, SecretReference)
}
"""Dotted key → pattern of a valid value (`SecretReference`). A value that does not match may be a secret."""
_OPTION_MAPPINGS = {key.rpartition(".")[2] for key in list_keys_with(Policy.OPTIONS)}
"""The names of keys that contain options of another program, such as `sbatch`."""
_BEFORE_VALUE = re.compile(r"\s*(export\s+)?[\w./-]+(\s*[=:]\s*|\s+)(?=\S)")
"""The beginning of a shell line: a command or an assigned name, up to the value."""
_SECRET_NAME = r"(token|secret|pass|pwd|(?<![a-z])pat(?![a-z])|key|credential|auth|bearer|cookie|login|webhook)"
"""A part of a name that probably denotes a secret."""
_SECRET = re.compile(rf"{_SECRET_NAME}[\w.-]*[\"']?\s*[=:\s]\s*\S|://", re.IGNORECASE)
"""A name that probably denotes a secret, followed by its value; or a URL."""
_SHELL = re.compile(r"[\s=]|://")
"""Characters that occur in shell lines and URLs, but not in simple values such as the name of a partition."""
_RANDOM = re.compile(r"(?=\w*\d)(?=\w*[A-Za-z])\w{16,}")
"""At least 16 letters and digits, as in a generated key."""
_WORD = re.compile(r"[A-Za-z]+([-_.][A-Za-z]+)*[-_]?\d{0,4}|[\d:.-]+[A-Za-z]{0,3}")
"""A word such as `gpu-long` or `h100`, a size or a time."""
_URL_CREDENTIALS = re.compile(r"(?<=://)\S*@")
"""The user and password of a URL, as in track.mlflow.uri."""


def mask_shell_line(line: str) -> str:
    """Return a shell line with a mask in place of everything after its first word or first assigned name.

    If the line has only one word, the word is masked. A harmless line is not changed.
    """
    if _HARMLESS.fullmatch(line):
        return line
    prefix = _BEFORE_VALUE.match(line)
    return (prefix[0] if prefix else "") + _MASK


def mask_secrets(values: Any, prefix: str = "") -> Any:
    """Return values of a config with masks in place of possible secrets.

    Args:
        values: a section, a list or a single value. The keys of a section may be dotted.
        prefix: the dotted key of `values`, followed by a dot; "" for the whole config.
    """
    if isinstance(values, list):
        return [mask_secrets(value, prefix) for value in values]
    for key, pattern in _SECRET_REFERENCES.items():
        # null is "None" as text, which the pattern of an optional key also matches
        if prefix.startswith(f"{key}.") and not pattern.fullmatch(str(values)):
            return _MASK
    if prefix.endswith(".") and has_policy(prefix[:-1], Policy.SHELL):
        if isinstance(values, str):
            return mask_shell_line(values)
        return _MASK if isinstance(values, dict) else values
    if isinstance(values, dict):
        return {key: mask_secrets(value, f"{prefix}{key}.") for key, value in values.items()}
    is_option = any(f".{name}." in prefix for name in _OPTION_MAPPINGS)
    may_be_secret = is_option or has_policy(prefix[:-1], Policy.SECRET_VALUE)
    if prefix.endswith(".") and may_be_secret and _SECRET.search(f"{prefix[:-1]}={values}"):
        return _MASK
    return _URL_CREDENTIALS.sub(f"{_MASK}@", values) if isinstance(values, str) else values


def mask_unknown_key(value: Any, path: Sequence[str], similar_keys: Sequence[str]) -> Any:
    """Return the value of an unknown key for an error message, masked if it may be a secret.

    The user probably misspelt the name of another key, and the value of that key may be secret. Numbers, booleans and
    null are returned unchanged.

    Args:
        value: The value as parsed from YAML.
        path: The sections around the key and the key itself, such as `("site", "partiton")`.
        similar_keys: The keys that the user may have meant: names of keys in the same section, or dotted keys.
    """
    if not isinstance(value, str | list | dict):
        return value
    section = "".join(f"{part}." for part in path[:-1])
    candidates = [key if "." in key else f"{section}{key}" for key in similar_keys]
    if section != "site.":  # for keys of `site`, `_mask_unknown_value` has stricter rules
        # `site` takes precedence, because most keys that may contain secrets are in this section
        key = "site" if "site" in candidates else next(iter(candidates), section + path[-1])
        return mask_secrets(value, f"{key}.")
    is_strict = any(has_policy(key, Policy.SHELL) or key in _SECRET_REFERENCES for key in candidates)
    return _mask_unknown_value(value, path[-1], is_strict, candidates[0] if candidates else None)


def _mask_unknown_value(value: Any, name: str, is_strict: bool, similar_key: str | None) -> Any:
    """Return the value of an unknown key in `site`, masked if it may be a secret.

    Args:
        value: The value, or a part of the value.
        name: The innermost key around `value`.
        is_strict: Whether to mask `value` like a line of `site.setup`.
        similar_key: The dotted key that the user probably meant; None if no key is similar.
    """
    if isinstance(value, dict):
        is_strict |= similar_key is None  # the mapping may contain environment variables
        return {key: _mask_unknown_value(item, str(key), is_strict, similar_key) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask_unknown_value(item, name, is_strict, similar_key) for item in value]
    if re.search(_SECRET_NAME, name, re.IGNORECASE):
        return _MASK
    if not isinstance(value, str):
        return value
    if is_strict or _SHELL.search(value) or _RANDOM.search(value) or not (similar_key or _WORD.fullmatch(value)):
        return mask_shell_line(value)
    return mask_secrets(value, f"{similar_key}.") if similar_key else value


def describe_exposed_setup(config: Config) -> str | None:
    """Return a warning if other users can read lines of `site.setup` that may contain secrets; otherwise None."""
    masked_lines = [masked for line in config.site.setup if (masked := mask_shell_line(line)) != line]
    if config.run.sharing == "private" or not masked_lines:
        return None
    return (
        f"warning: run.sharing: {config.run.sharing} lets others read site.setup in config.yaml and jobs/ "
        f"({'; '.join(masked_lines)}): move secrets to site.secrets or site.pass"
    )
