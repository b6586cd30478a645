"""A config without what may be a secret in it, for whatever is shown, logged or pasted into a ticket.

Secrets do not belong into a config: `site.secrets` names a file that is the user's alone, `site.pass` variables of the
shell that submits. Where people write them all the same, `config.yaml` and `changes.jsonl` keep them, for jobs need
them; nothing else does. `site.setup` is shell, in which no pattern finds every secret (`X=…; export TOKEN=$X`), so its
lines are masked but for those that are known to hold none; a single word is not, for it may be fed to the command
before it (`<<EOF`). Of the other options, those are masked whose name or value looks like a secret, and
user and password of any URL. Too much may be
masked, so that too little is not.
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
_SECRET_REFERENCES = {
    key: re.compile(mark.pattern)
    for key, field in walk_fields()
    for mark in field.metadata
    if isinstance(mark, SecretReference)
}
_OPTION_MAPPINGS = {key.rpartition(".")[2] for key in list_keys_with(Policy.OPTIONS)}
_BEFORE_VALUE = re.compile(r"\s*(export\s+)?[\w./-]+(\s*[=:]\s*|\s+)(?=\S)")
_SECRET_NAME = r"(token|secret|pass|pwd|(?<![a-z])pat(?![a-z])|key|credential|auth|bearer|cookie|login|webhook)"
_SECRET = re.compile(rf"{_SECRET_NAME}[\w.-]*[\"']?\s*[=:\s]\s*\S|://", re.IGNORECASE)
_SHELL = re.compile(r"[\s=]|://")
"""What a line of shell, or a URL, has in it and the name of a partition has not."""
_RANDOM = re.compile(r"(?=\w*\d)(?=\w*[A-Za-z])\w{16,}")
"""Letters mixed with digits, as in a key that a program made."""
_WORD = re.compile(r"[A-Za-z]+([-_.][A-Za-z]+)*[-_]?\d{0,4}|[\d:.-]+[A-Za-z]{0,3}")
"""A word such as `gpu-long` or `h100`, a size or a time."""
_USER = re.compile(r"(?<=://)\S*@")
"""User and password of a URL, as in track.mlflow.uri."""


def mask_shell_line(line: str) -> str:
    """A line of shell without its values: all that follows the first word, or the first name that is set."""
    if _HARMLESS.fullmatch(line):
        return line
    shown = _BEFORE_VALUE.match(line)
    return (shown[0] if shown else "") + _MASK


def mask_secrets(values: Any, at: str = "") -> Any:
    """Values of a config without secrets. `at`: the key, or dotted keys, that they stand under, and a dot."""
    if isinstance(values, list):
        return [mask_secrets(value, at) for value in values]
    if any(at.startswith(f"{key}.") and not form.fullmatch(str(values)) for key, form in _SECRET_REFERENCES.items()):
        return _MASK
    if at.endswith(".") and has_policy(at[:-1], Policy.SHELL):
        return mask_shell_line(values) if isinstance(values, str) else _MASK if isinstance(values, dict) else values
    if isinstance(values, dict):
        return {key: mask_secrets(value, f"{at}{key}.") for key, value in values.items()}
    is_option = any(f".{name}." in at for name in _OPTION_MAPPINGS) or has_policy(at[:-1], Policy.SECRET_VALUE)
    if at.endswith(".") and is_option and _SECRET.search(f"{at[:-1]}={values}"):
        return _MASK
    return _USER.sub(f"{_MASK}@", values) if isinstance(values, str) else values


def mask_unknown_key(value: Any, path: Sequence[str], meant: Sequence[str]) -> Any:
    """Mask the value of a key that does not exist, unless it is harmless: the user looks for a misspelt key.

    Args:
        value: The value, as YAML gives it.
        path: The key and the sections around it, such as `("site", "partiton")`.
        meant: The keys that it may be misspelt from; those of its own section without that section's name.
    """
    if not isinstance(value, str | list | dict):
        return value
    section = "".join(f"{part}." for part in path[:-1])
    near = [key if "." in key else f"{section}{key}" for key in meant]
    if section != "site.":
        return mask_secrets(value, f"{'site' if 'site' in near else [*near, section + path[-1]][0]}.")
    strict = any(has_policy(key, Policy.SHELL) or key in _SECRET_REFERENCES for key in near)
    return _masked_in_unknown(value, path[-1], strict, near[0] if near else None)


def _masked_in_unknown(value: Any, name: str, strict: bool, near: str | None) -> Any:
    """`masked_unknown` for a value under the key `name`; `strict`: mask it as a line of `site.setup`."""
    if isinstance(value, dict):
        strict |= near is None  # the names may be those of variables
        return {key: _masked_in_unknown(one, str(key), strict, near) for key, one in value.items()}
    if isinstance(value, list):
        return [_masked_in_unknown(one, name, strict, near) for one in value]
    if re.search(_SECRET_NAME, name, re.IGNORECASE):
        return _MASK
    if not isinstance(value, str):
        return value
    if strict or _SHELL.search(value) or _RANDOM.search(value) or not (near or _WORD.fullmatch(value)):
        return mask_shell_line(value)
    return mask_secrets(value, f"{near}.") if near else value


def describe_exposed_setup(config: Config) -> str | None:
    """A warning where others may read the lines of `site.setup` that are masked elsewhere; None where they may not."""
    lines = [shown for line in config.site.setup if (shown := mask_shell_line(line)) != line]
    if config.run.sharing == "private" or not lines:
        return None
    return (
        f"warning: run.sharing: {config.run.sharing} lets others read site.setup in config.yaml and jobs/ "
        f"({'; '.join(lines)}): what is secret there belongs into site.secrets or site.pass"
    )
