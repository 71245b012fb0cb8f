"""A server: requests side by side, again where it is busy, counted, never more than allowed."""

from __future__ import annotations

import http.client
import json
import math
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from outrider.certify.endpoint.wire import IDS, OFF, Answer, Ask, answer, body
from outrider.errors import EndpointError, EndpointRefused, InvalidConfig

BUSY = 429, 500, 502, 503, 504
REFUSED = 400, 422, 501
TRIES, FIRST_WAIT_S, LONGEST_WAIT_S = 6, 0.5, 20.0
SAID = 300
"""Characters of an answer that an error shows."""
SCHEMES = "http", "https"


@dataclass(slots=True)
class Meter:
    """Requests and tokens spent, of several servers together."""

    most_requests: float = math.inf
    requests: int = 0
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spent(self) -> bool:
        """Whether no more is to be asked for."""
        return self.requests >= self.most_requests

    def count(self, requests: int = 0, tokens: int = 0) -> None:
        """Adds to what was spent."""
        with self.lock:
            self.requests += requests
            self.tokens += tokens


@dataclass(slots=True)
class Server:
    """An OpenAI-compatible server.

    Attributes:
        url: of /v1/completions.
        model: the name it knows its model by.
        extra: fields of every request, such as a switch of its speculation.
        key: sent as a bearer token; None without.
        at_once: requests that are under way together.
        timeout_s: for one answer.
        meter: what was spent.
        taken: fields beyond the standard that it takes.
    """

    url: str
    model: str = "default"
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    key: str | None = None
    at_once: int = 32
    timeout_s: float = 120.0
    meter: Meter = field(default_factory=Meter)
    taken: Mapping[str, Any] = field(default_factory=lambda: {**OFF, **IDS})
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def ask(self, asked: Ask) -> Answer:
        """One answer.

        Raises:
            EndpointRefused: it does not take such a request.
            EndpointError: it cannot be reached, fails, or answers what is none.
        """
        sent = body(asked, self.model, self.taken, self.extra)
        for attempt in range(TRIES):
            self.meter.count(requests=1)
            try:
                got = answer(self._post(sent), self.url)
            except _BusyError as busy:
                if attempt == TRIES - 1:
                    raise EndpointError(
                        f"{self.url} was busy or failed {TRIES} times ({busy.said}); look into its "
                        "log, or ask for less at once with --at-once"
                    ) from busy
                wait_s = min(LONGEST_WAIT_S, max(busy.wait_s, FIRST_WAIT_S * 2**attempt))
                if self._ended.wait(wait_s):
                    raise EndpointError(f"{self.url} is not waited for any longer") from busy
                continue
            self.meter.count(tokens=got.num_tokens or len(got.ids or got.names or ()))
            return got
        raise AssertionError("the last attempt returns or raises")

    def all(self, asked: Sequence[Ask]) -> list[Answer]:
        """Answers in the order of what was asked.

        Raises:
            EndpointRefused, EndpointError: as of `ask`.
        """
        self._ended.clear()
        pool = ThreadPoolExecutor(self.at_once)
        waiting = [pool.submit(self.ask, one) for one in asked]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            # Answers under way are not waited for, and nothing is asked again.
            self._ended.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _post(self, sent: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, sent, headers)
        return _fetched(request, self.timeout_s)


class _BusyError(Exception):
    def __init__(self, said: str, wait_s: float) -> None:
        super().__init__(said)
        self.said, self.wait_s = said, wait_s


def served_models(url: str, key: str | None, timeout_s: float = 20.0) -> list[str]:
    """The names of a server's models; none where it does not tell them.

    Raises:
        EndpointError: it cannot be reached.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url.removesuffix("/completions") + "/models", headers=headers)
    try:
        told = json.loads(_fetched(request, timeout_s))
        return [str(one["id"]) for one in told["data"]]
    except (_BusyError, EndpointRefused, ValueError, LookupError, TypeError):
        return []


def completions_url(given: str) -> str:
    """The address of /v1/completions that a user means.

    Raises:
        InvalidConfig: no address of a web server.
    """
    parts = urllib.parse.urlsplit(given)
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidConfig(
            f"the address of {parts.hostname!r} holds a name, a key or a query, which reports "
            "would show; give the key as --api-key or OUTRIDER_API_KEY"
        )
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise InvalidConfig(
            f"{given!r} is no address of a server; give one such as http://localhost:8000"
        )
    whole = given.rstrip("/")
    if whole.endswith("/completions"):
        return whole
    return f"{whole}/completions" if whole.endswith("/v1") else f"{whole}/v1/completions"


class _Here(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: keys and questions are for the address that was given."""

    def redirect_request(
        self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_Here)


def _fetched(request: urllib.request.Request, timeout_s: float) -> bytes:
    url = request.full_url
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(1 << 16).decode("utf-8", "replace")
        raise _failure(url, error.code, said, error.headers.get("Retry-After")) from error
    except TimeoutError as error:
        raise EndpointError(
            f"{url} gave no answer in {timeout_s:.0f} s; allow more with --timeout, or ask for "
            "less at once with --at-once"
        ) from error
    except (ConnectionResetError, http.client.HTTPException) as error:
        raise _BusyError(str(error), 0.0) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EndpointError(
            f"{url} cannot be reached: {reason}; start the server, or give its address"
        ) from error


def _failure(url: str, status: int, body: str, wait: str | None) -> Exception:
    said = f"HTTP {status}: {_message(body)}"
    if status in BUSY:
        return _BusyError(said, float(wait) if wait and wait.isdigit() else 0.0)
    if status in REFUSED:
        return EndpointRefused(f"{url} refused the request ({said}); ask for something else")
    if status in (401, 403):
        return EndpointError(f"{url} wants a key ({said}); set OUTRIDER_API_KEY or use --api-key")
    if status == 404:
        return EndpointRefused(
            f"{url} is not there ({said}); give the server's address up to /v1, and the name of "
            "its model with --served"
        )
    return EndpointError(f"{url} failed ({said}); look into the server's log")


def _message(body: str) -> str:
    """What an error's JSON says, or its text."""
    try:
        told = json.loads(body)
        inner = told.get("error", told)
        said = inner.get("message", inner) if isinstance(inner, dict) else inner
    except (ValueError, AttributeError):
        said = body
    return " ".join(str(said).split())[:SAID] or "nothing said"
