"""The functions on the page about loggers do what it says, with a real report."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_nanguard import NanGuard, NonFiniteError

PAGE = Path(__file__).parents[2] / "docs" / "loggers.md"


class _Recorder:
    """Notes each call on it, and on what it returns, under the names that led there."""

    def __init__(self, calls: list[Any], name: str = "") -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, name: str) -> _Recorder:
        return _Recorder(self._calls, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> _Recorder:
        self._calls.append((self._name, args, kwargs))
        return _Recorder(self._calls, f"{self._name}()")

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *args: Any) -> None: ...


def _function(name: str, **names: Any) -> Any:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if f"def {name}(" in block]
    exec(code, names)
    return names[name]


def _event(on_event: Any) -> dict[str, Any]:
    """What a real stop hands to a function beside the one that is tested."""
    told: list[dict[str, Any]] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def both(event: dict[str, Any]) -> None:
        told.append(event)
        on_event(event)

    guard = NanGuard(model, optimizer, dump_dir=None, look_again=False, on_event=both)
    guard(torch.full((1, 2), float("inf"))).sum().backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    guard.close()
    (event,) = told
    return event


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the bodies that came there."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/", bodies
        http.shutdown()
        thread.join()


def test_the_webhook_posts_the_text(server: tuple[str, list[Any]]) -> None:
    address, bodies = server
    event = _event(_function("webhook", WEBHOOK_URL=address))
    assert bodies == [{"text": event["text"]}]


def _called(name: str, monkeypatch: pytest.MonkeyPatch, module: str) -> tuple[list[Any], Any]:
    calls: list[Any] = []
    stub = types.ModuleType(module)
    stub.__getattr__ = _Recorder(calls).__getattr__  # type: ignore[method-assign]  # as a module may have it
    monkeypatch.setitem(sys.modules, module, stub)
    event = _event(_function(name, run=_Recorder(calls, "run")))
    return calls, event


def test_the_alert_has_a_title_and_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, event = _called("alert", monkeypatch, "no_module")
    assert calls == [("run.alert", ("stop in step 0", event["text"]), {"level": "ERROR"})]


def test_sentry_gets_the_fault_as_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, event = _called("to_sentry", monkeypatch, "sentry_sdk")
    scope = "new_scope()"
    assert calls == [
        ("new_scope", (), {}),
        (f"{scope}.set_tag", ("nanguard.event", "stop"), {}),
        (f"{scope}.set_context", ("nanguard", {"step": 0, "dump": None}), {}),
        (f"{scope}.capture_message", (event["text"].splitlines()[0],), {"level": "error"}),
    ]


def test_the_span_gets_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, event = _called("to_span", monkeypatch, "opentelemetry")
    assert calls[-1] == (
        "trace.get_current_span().add_event",
        ("nanguard", {"step": 0, "event": "stop", "fingerprint": event["fingerprint"]}),
        {},
    )


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, _ = _called("count", monkeypatch, "prometheus_client")
    assert [name for name, *_ in calls] == ["Counter", "Counter().labels", "Counter().labels().inc"]
    assert calls[1][1] == ("stop",)
