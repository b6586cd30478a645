"""Expect an error by its code and by the facts that its message names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.base.errors import UserError


@contextmanager
def raises_error(code: str, *facts: object, kind: type[UserError] = UserError) -> Iterator[None]:
    """Expect an error of `kind` with this code whose message contains each fact, such as a file, key or value."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code, caught.value
    message = str(caught.value)
    assert [fact for fact in map(str, facts) if fact not in message] == [], message
