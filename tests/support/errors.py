"""Check that code raises a UserError with the expected code and message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.base.errors import UserError


@contextmanager
def raises_error(code: str, *facts: object, kind: type[UserError] = UserError) -> Iterator[None]:
    """Check that the block raises an error of type `kind` with this code.

    Args:
        code: code of the error.
        facts: texts that the message must contain, such as a file, a key or a value.
        kind: UserError or a subclass of it.
    """
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code, caught.value
    message = str(caught.value)
    missing_facts = [fact for fact in map(str, facts) if fact not in message]
    assert not missing_facts, message
