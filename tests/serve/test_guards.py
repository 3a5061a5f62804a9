"""Who may come in at all: keys, sizes, pages of other origins, names that lead here; each refusal has its log line."""

import http.client
import logging

import pytest

from tests.serve.scripted import Scripted, says, serving


def test_a_key_guards_everything_but_the_page_and_health() -> None:
    with serving(Scripted(says("hi")), api_key="s3cret") as server:
        good = {"authorization": "Bearer s3cret"}
        assert server.ask("GET", "/").status == server.ask("GET", "/health").status == 200
        for headers in (
            {},
            {"authorization": "Bearer s3cre"},
            {"authorization": "s3cret"},
            {"authorization": "Bearer \xff"},
        ):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("GET", "/metrics"),
                ("GET", "/x"),
            ):
                reply = server.ask(method, path, headers=headers)
                assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
        assert server.ask("GET", "/v1/models", headers=good).status == 200
        assert server.ask("POST", "/v1/completions", {"prompt": "x assistant\n"}, good).status == 200


def test_a_long_body_is_refused_and_not_kept() -> None:
    with serving(Scripted(says("hi")), body_bytes=1000) as server:
        reply = server.chat("x" * 2000)
        assert reply.status == 413 and "1000" in reply.error["message"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        chunks = (b"x" * 600 for _ in range(50))
        connection.request(
            "POST", "/v1/chat/completions", chunks, {"content-type": "application/json"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
        connection.close()
        assert server.chat().text == "hi"


def test_origins() -> None:
    with serving(Scripted(says("hi")), cors=("https://a.example",)) as server:
        ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert server.ask("OPTIONS", "/v1/chat/completions", headers=ask).status == 200
        assert (
            server.ask("GET", "/v1/models", headers=ask).headers["access-control-allow-origin"] == "https://a.example"
        )
        exposed = server.ask("GET", "/v1/models", headers=ask).headers["access-control-expose-headers"]
        assert "retry-after" in exposed and "x-request-id" in exposed
        refused = server.ask("OPTIONS", "/v1/chat/completions", headers={**ask, "origin": "https://b.example"})
        assert (refused.status, refused.error["code"]) == (400, "unknown_origin")
        assert "access-control-allow-origin" not in refused.headers
        other = server.ask("GET", "/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
    with serving(Scripted(says("hi"))) as server:
        assert "access-control-allow-origin" not in server.ask("GET", "/v1/models", headers=ask).headers


def test_pages_of_others_may_not_ask() -> None:
    ask, text = {"origin": "https://b.example"}, b'{"prompt": "x assistant\\n"}'
    with serving(Scripted(says("hi"))) as server:
        here = f"127.0.0.1:{server.port}"
        for origin, status in (
            ("https://b.example", 403), ("null", 403), (f"http://{here}", 200), (f"https://{here}", 200),
            (f"http://{here}.b.example", 403),
        ):  # fmt: skip
            reply = server.ask("POST", "/v1/completions", text, {"origin": origin, "content-type": "text/plain"})
            assert reply.status == status, origin
            assert status == 200 or reply.error["code"] == "unknown_origin"
    for cors, status in ((("https://a.example",), 403), (("https://B.example",), 200), (("*",), 200)):
        with serving(Scripted(says("hi")), cors=cors) as server:
            assert server.ask("POST", "/v1/completions", text, ask).status == status


def test_a_name_that_leads_here_is_not_this_server() -> None:
    names = {
        "b.example": 403, "b.example:8080": 403, "127.0.0.1.b.example": 403, "localhost.b.example": 403, "[::1": 403,
        "localhost:1": 200, "LOCALHOST": 200, "127.0.0.1": 200, "[::1]:80": 200, "page.localhost": 200,
    }  # fmt: skip
    with serving(Scripted(says("hi")), loopback=True) as server:
        for host, status in names.items():
            for path in ("/", "/v1/models"):
                reply = server.ask("GET", path, headers={"host": host})
                assert reply.status == status, host
                assert status == 200 or reply.error["code"] == "unknown_host"
    for settings in ({"api_key": "k"}, {"cors": ("https://b.example:8443",)}, {"cors": ("*",)}, {"loopback": False}):
        with serving(Scripted(says("hi")), **{"loopback": True, **settings}) as server:
            assert server.ask("GET", "/health", headers={"host": "b.example"}).status == 200, settings


def test_nothing_is_sent_on_to_where_the_request_says() -> None:
    with serving(Scripted(says("hi"))) as server:
        for path in ("/v1/completions/", "/health/", "//v1/completions"):
            reply = server.ask("POST", path, {}, {"host": "b.example"})
            assert reply.status == 404 and reply.error["code"] == "unknown_route"


def test_what_is_refused_at_the_door_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "anechain.serve"):
        with serving(Scripted(says("hi")), api_key="k", body_bytes=1000) as server:
            good = {"authorization": "Bearer k"}
            replies = [
                server.ask("POST", "/v1/completions", {}),
                server.ask("POST", "/v1/completions", b"x" * 2000, good),
                server.ask("GET", "/a", headers=good | {"host": "secret"}),
                server.ask("POST", "/v1/completions", {}, {"origin": "http://secret"}),
            ]
        lines = [record.getMessage() for record in caplog.records if record.name == "anechain.serve"]
    outcomes = [line.rpartition("outcome=")[2] for line in lines]
    assert outcomes == ["invalid_api_key", "body_too_long", "unknown_route", "unknown_origin"]
    assert [line.split()[0] for line in lines] == [reply.headers["x-request-id"] for reply in replies]
    assert not any("secret" in line for line in lines)
