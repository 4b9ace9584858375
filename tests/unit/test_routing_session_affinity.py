"""Who served a session last, for a while, in bounded memory."""

from __future__ import annotations

from gateway.routing.session_affinity import IDLE_MAX_S, SessionAffinity


def test_the_last_server_of_a_session_for_a_while() -> None:
    sessions = SessionAffinity()
    assert sessions.endpoint_of("t/s", now=0.0) is None
    sessions.served("t/s", "a", now=0.0)
    sessions.served("t/s", "b", now=1.0)
    assert sessions.endpoint_of("t/s", now=1.0 + IDLE_MAX_S) == "b"
    assert sessions.endpoint_of("t/s", now=1.1 + IDLE_MAX_S) is None


def test_the_least_recently_used_session_goes_first() -> None:
    sessions = SessionAffinity(sessions_max=3)
    for name in ("a", "b", "c", "a", "d"):
        sessions.served(name, "w", now=0.0)
    assert len(sessions) == 3
    assert sessions.endpoint_of("b", now=0.0) is None
    assert sessions.endpoint_of("a", now=0.0) == "w"
