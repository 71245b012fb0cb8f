"""`certify endpoint` over HTTP: faults are found in all three modes, a right server passes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from outrider import SamplingParams
from outrider.certify.endpoint.run import Certifier, Limits
from outrider.certify.endpoint.server import Server, completions_url
from outrider.certify.endpoint.wire import Answer, Ask, answer
from outrider.certify.model.plan import SAMPLED_FROM, Plan
from outrider.certify.model.report import Report
from outrider.errors import EndpointError, EndpointRefused, InvalidConfig
from tests.certify.faulty import END, PARAMS, VOCAB
from tests.certify.served import LETTERS, ids_of, reference, settings
from tests.certify.server import Settings, serving

PROMPTS = [LETTERS[i] for i in range(0, VOCAB, 2) if i != END]
COARSE = Plan(within=0.15, alpha=0.01)
OFF = {"speculate": False}
MODES = "model", "log-probabilities", "pairs"


@contextmanager
def certifier(
    served: Settings, mode: str, params: SamplingParams = PARAMS, **options: Any
) -> Iterator[Certifier]:
    with serving(served) as url:
        options = {"tops": 0 if mode == "pairs" else 20, "plan": COARSE, **options}
        where = completions_url(url)
        yield Certifier(
            Server(where, key=served.key, timeout_s=600),
            [tuple(ids_of(one)) for one in PROMPTS] if mode == "model" else PROMPTS,
            params,
            plain=Server(where, extra=OFF, timeout_s=600) if mode == "pairs" else None,
            reference=reference() if mode == "model" else None,
            near_tie=1e-3,
            **options,
        )


def certified(served: Settings, mode: str, **options: Any) -> Report:
    with certifier(served, mode, **options) as one:
        assert one.mode == mode
        return one.report()


def told(report: Report) -> str:
    return "; ".join(f"{one.name}: {one.verdict}, {one.said}" for one in report.checks)


def verdicts(report: Report) -> dict[str, str]:
    return {check.name: check.verdict for check in report.checks}


@pytest.mark.parametrize("mode", MODES)
def test_a_right_server_is_lossless(mode: str) -> None:
    report = certified(settings(), mode)
    assert (report.verdict, report.exit_code) == ("lossless", 0), told(report)
    assert report.control.verdict == "rule bias"
    # What it does not know is no fault.
    assert verdicts(report)["control top_p"] == "refused"
    assert verdicts(report)["control top_k"] == "lossless"
    json.dumps(report.as_dict())


FOUND = {
    ("model", "temperature ignored"): "control ignored",
    ("log-probabilities", "logprobs of the draft"): "control ignored",
    ("log-probabilities", "likeliest token drafted"): "rule bias",
    ("pairs", "likeliest token drafted"): "rule bias",
    ("pairs", "one seed for all"): "seed ignored",
}
LATER = {
    ("model", "seed ignored"): "seed ignored",
    ("log-probabilities", "min_p ignored"): "control ignored",
    ("log-probabilities", "penalties once a round"): "control ignored",
    ("log-probabilities", "one seed for all"): "seed ignored",
    ("pairs", "min_p ignored"): "control ignored",
}
"""As quick, but many."""


@pytest.mark.parametrize(
    ("mode", "fault"), [*FOUND, *(pytest.param(*one, marks=pytest.mark.slow) for one in LATER)]
)
def test_a_planted_fault_gets_its_verdict(mode: str, fault: str) -> None:
    report = certified(settings(fault), mode)
    assert (report.verdict, report.exit_code) == ((FOUND | LATER)[mode, fault], 1), told(report)
    shown = [check.reproduction for check in report.checks if check.verdict == report.verdict]
    assert any(shown), told(report)
    json.dumps(report.as_dict())


FINE = {
    ("model", "draft in bfloat16"): "numeric drift",
    ("model", "noise used twice"): "rule bias",
    ("model", "end passed over"): "rule bias",
    ("model", "raw law of a truncated draft"): "rule bias",
    ("log-probabilities", "redrawn from the target"): "rule bias",
    ("log-probabilities", "raw law of a truncated draft"): "rule bias",
    ("log-probabilities", "end swallowed"): "rule bias",
    ("pairs", "redrawn from the target"): "rule bias",
    ("pairs", "end passed over"): "rule bias",
    ("pairs", "raw law of a truncated draft"): "rule bias",
}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fault"), FINE)
def test_a_small_fault_gets_its_verdict(mode: str, fault: str) -> None:
    report = certified(settings(fault), mode, plan=Plan(within=0.02))
    assert report.verdict == FINE[mode, fault], told(report)


@pytest.mark.parametrize("style", [pytest.param("llama.cpp", marks=pytest.mark.slow), "text"])
def test_tokens_told_in_other_ways(style: str) -> None:
    report = certified(settings("temperature ignored", style), "log-probabilities")
    assert report.verdict == "control ignored", told(report)


def test_controls_that_a_server_forgets() -> None:
    forgotten = "stop", "max_tokens", "top_k"
    served = settings(faults=tuple(f"{name} ignored" for name in forgotten))
    params = SamplingParams(temperature=0.9)
    report = certified(served, "log-probabilities", params=params, plan=Plan(within=0.5))
    found = verdicts(report)
    for name in forgotten:
        assert found[f"control {name}"] == "control ignored", told(report)
    assert found["control min_p"] == "lossless"
    assert report.verdict == "control ignored"


def test_a_budget_is_kept_and_said_beforehand() -> None:
    plan = Plan(within=0.01)
    with certifier(settings(), "log-probabilities", plan=plan, limits=Limits(260)) as one:
        assert f"at most {one.need.requests} requests" in str(one.need)
        report = one.report()
        assert one.need.requests <= 260
        assert one._server.meter.requests <= 260 + len(PROMPTS)
    assert report.verdict in ("undecided", "void"), told(report)
    assert report.exit_code == 3


def test_too_small_a_budget_is_refused() -> None:
    with (
        pytest.raises(InvalidConfig, match="looking once takes"),
        certifier(settings(), "pairs", limits=Limits(10)),
    ):
        pass


def test_without_anything_to_hold_it_to() -> None:
    with serving(settings(style="silent")) as url:
        server = Server(completions_url(url))
        with pytest.raises(EndpointError, match="--plain-url"):
            Certifier(server, PROMPTS, PARAMS, COARSE)


def test_an_interrupt_leaves_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with certifier(settings(), "pairs", plan=Plan(within=0.01)) as one:
        real, calls = Server.all, list[int]()

        def interrupted(server: Server, asked: list[Ask]) -> list[Answer]:
            calls.append(1)
            if len(calls) > 40:
                raise KeyboardInterrupt
            return real(server, asked)

        monkeypatch.setattr(Server, "all", interrupted)
        report = one.report()
    assert report.verdict in ("undecided", "void"), told(report)
    assert report.checks[-1].evidence["pairs"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_fails_leaves_what_was_seen(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with certifier(settings(), mode, plan=Plan(within=0.05)) as one:
        real, last = Server.all, COARSE.seed + SAMPLED_FROM + 2 * len(PROMPTS)

        def failing(server: Server, asked: list[Ask]) -> list[Answer]:
            if asked[0].seed >= last:
                raise EndpointError("http://x failed (HTTP 500: out of luck)")
            return real(server, asked)

        monkeypatch.setattr(Server, "all", failing)
        report = one.report()
    assert report.exit_code == 3, told(report)
    assert "it ended early: http://x failed (HTTP 500: out of luck)" in told(report)


def test_tokens_bound_the_requests_too() -> None:
    """Every text is counted with all the tokens it may have."""
    plan = Plan(within=0.05)
    with certifier(settings(), "log-probabilities", plan=plan, limits=Limits(tokens=5000)) as one:
        one.report()
        most, spent = 5000 // plan.length, one._server.meter.requests
        # Of a control that is refused as many requests are sent as were under way by then.
        assert most - 2 * len(PROMPTS) <= spent <= most + len(PROMPTS)


@pytest.mark.parametrize(("plain_too", "verdict"), [(False, "undecided"), (True, "numeric drift")])
def test_a_few_texts_that_come_otherwise_again(
    plain_too: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pairs: where plain ones are steady, and where they are not."""
    real, heard = Server.all, set[tuple[bool, int]]()

    def otherwise(server: Server, asked: list[Ask]) -> list[Answer]:
        plain, seed = bool(server.extra), asked[0].seed
        if asked[0].params.temperature and (plain, seed) in heard and (plain_too or not plain):
            asked = [replace(asked[0], seed=seed + 777), *asked[1:]]
        heard.add((plain, seed))
        return real(server, asked)

    monkeypatch.setattr(Server, "all", otherwise)
    report = certified(settings(), "pairs", plan=Plan(within=0.5))
    assert verdicts(report)["seeds"] == verdict, told(report)


ASK = Ask("ab", SamplingParams(max_tokens=4), 3)


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.certify.endpoint.server.FIRST_WAIT_S", 0.01)
    with serving(settings(busy=2)) as url:
        server = Server(completions_url(url))
        assert server.ask(ASK).text
        assert server.meter.requests == 3
    with serving(settings(busy=20)) as url, pytest.raises(EndpointError, match="failed 6 times"):
        Server(completions_url(url)).ask(ASK)


def test_a_key_is_sent_and_missed() -> None:
    with serving(settings(key="secret")) as url:
        assert Server(completions_url(url), key="secret").ask(ASK).text
        with pytest.raises(EndpointError, match="OUTRIDER_API_KEY"):
            Server(completions_url(url)).ask(ASK)


def test_what_a_server_refuses() -> None:
    with serving(settings()) as url:
        asked = Ask("ab", SamplingParams(max_tokens=4, top_p=0.5), 3)
        with pytest.raises(EndpointRefused, match="top_p is not known"):
            Server(completions_url(url)).ask(asked)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EndpointError, match="cannot be reached"):
        Server("http://127.0.0.1:9/v1/completions").ask(ASK)


def test_answers_that_are_none() -> None:
    for raw in (b"<html>", b"{}", b'{"choices": []}', b"[]"):
        with pytest.raises(EndpointError, match="no completion"):
            answer(raw, "http://x")


def test_addresses() -> None:
    due = "http://x:1/v1/completions"
    assert {completions_url(f"http://x:1{end}") for end in ("", "/", "/v1", "/v1/")} == {due}
    assert completions_url(due) == due
    for wrong in ("x:1", "file:///etc/hosts", "localhost"):
        with pytest.raises(InvalidConfig, match="no address"):
            completions_url(wrong)


def test_addresses_that_reports_would_show() -> None:
    for wrong in ("http://me:word@x:1", "http://x:1/v1?api_key=word"):
        with pytest.raises(InvalidConfig, match="--api-key") as told:
            completions_url(wrong)
        assert "word" not in str(told.value)


class Elsewhere(BaseHTTPRequestHandler):
    """Sends everybody on, or breaks an answer off."""

    asked: list[str | None]

    def do_POST(self) -> None:
        self.asked.append(self.headers.get("Authorization"))
        if self.path.startswith("/on"):
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/off")
            self.send_header("Content-Length", "0")
        else:
            self.send_response(200)
            self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_keys_stay_where_they_belong_and_broken_answers_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.certify.endpoint.server.FIRST_WAIT_S", 0.01)
    Elsewhere.asked = []
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(EndpointError, match="302"):
            Server(f"{where}/on", key="secret").ask(ASK)
        assert len(Elsewhere.asked) == 1
        with pytest.raises(EndpointError, match="failed 6 times"):
            Server(f"{where}/off").ask(ASK)
        server.shutdown()


def test_a_switch_that_does_nothing_shows_nothing() -> None:
    """Both sides are the same engine with the same seeds: no text differs, and nothing is shown."""
    with serving(settings()) as url:
        where = completions_url(url)
        both = [Server(where, timeout_s=600) for _ in range(2)]
        report = Certifier(both[0], PROMPTS, PARAMS, COARSE, plain=both[1], tops=0).report()
    assert (report.verdict, report.exit_code) == ("undecided", 3), told(report)
    assert "a switch without effect" in told(report)


def test_controls_that_requests_do_not_have() -> None:
    with pytest.raises(InvalidConfig, match="no_repeat_ngram=2"):
        Server("http://127.0.0.1:9/v1/completions").ask(
            Ask("a", SamplingParams(max_tokens=1, no_repeat_ngram=2), 0)
        )
