"""The JSON report: exactly the session document, as `Session.save` writes it."""

from __future__ import annotations

from fusescout.session import Session


def render(session: Session) -> str:
    """The session document. Infinities and NaN are spelled as strings, so any JSON reader takes it."""
    return session.model_dump_json(indent=1) + "\n"
