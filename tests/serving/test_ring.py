"""A rank's client of its servers: what takes their place learns nothing, and what is no answer is never learnt from."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.evaluate import client
from clustertune.evaluate.client import ServersLM
from clustertune.evaluate.servers import hold_ports
from clustertune.launch import server_requests
from clustertune.launch.guard.vllm_guard import PATH, prove
from clustertune.training.rollouts import ServerRing, read_answer
from tests.refusal import problems
from tests.serving.conftest import job
from tests.serving.test_client import prompts

KEY = "the-key-of-the-job"
GOOD: dict[str, Any] = {
    "choices": [{"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, 0.0]}}]
}
SAMPLING = {"max_tokens": 4}
Answer = bytes | Callable[[socket.socket], None]


def http(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def with_choice(**values: Any) -> bytes:
    return http(json.dumps({"choices": [GOOD["choices"][0] | values]}).encode())


class Peer:
    """Answers as told, byte for byte; ``proves``: as a server of the job does before. Keeps what it is sent."""

    def __init__(self, answer: Answer, *, proof: Callable[[str, str], bytes] | None = None) -> None:
        self._answer, self._proof = answer, proof or (lambda address, nonce: http(prove(KEY, address, nonce).encode()))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._door.getsockname())
        self.url, self.seen, self._open = f"http://{self.address}", b"", True
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._open:
            with suppress(OSError):
                connection = self._door.accept()[0]
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as lines:
            while head := lines.readline():
                length, read = 0, head
                while (line := lines.readline()).strip():
                    length = int(line.split(b":")[1]) if line.lower().startswith(b"content-length") else length
                    read += line
                self.seen += read + lines.read(length)
                path = head.split()[1].decode()
                if path.startswith(PATH):
                    connection.sendall(self._proof(self.address, path.partition("?")[2]))
                elif path == "/v1/completions":
                    self._answer(connection) if callable(self._answer) else connection.sendall(self._answer)
                    if self._answer not in (http(json.dumps(GOOD).encode()), TEXT):
                        return  # the end of the connection is the end of an answer without a length
                else:
                    connection.sendall(http(b"{}"))

    def close(self) -> None:
        self._open = False
        self._door.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    with ExitStack() as stack:

        def make(answer: Answer | None = None, **more: Any) -> Peer:
            made = Peer(http(json.dumps(GOOD).encode()) if answer is None else answer, **more)
            stack.callback(made.close)
            return made

        yield make


def ring_of(folder: Path, *peers: Peer) -> ServerRing:
    (folder / "ring.json").write_text(json.dumps({"urls": [peer.url for peer in peers], "key": KEY}))
    ring = ServerRing(folder / "ring.json", lambda: None, vocabulary=10)
    ring.use("adapter-1-1")
    return ring


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


def slow(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" ")
        threading.Event().wait(0.1)


def slow_head(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        threading.Event().wait(0.1)


BAD: dict[str, Answer] = {
    "endless": endless,
    "slow": slow,
    "slow-head": slow_head,
    "no-json": http(b"<html>"),
    "not-utf-8": http(b'{"choices": "\xff\xfe"}'),
    "nested": http(b"[" * 100_000),
    "a-list": http(b"[]"),
    "null": http(b"null"),
    "empty": http(b""),
    "no-choices": http(b"{}"),
    "choices-null": http(b'{"choices": null}'),
    "choices-object": http(b'{"choices": {"0": {}}}'),
    "choice-null": http(b'{"choices": [null]}'),
    "choice-text": http(b'{"choices": ["answer"]}'),
    "two": http(json.dumps({"choices": GOOD["choices"] * 2}).encode()),
    "ids-null": with_choice(token_ids=None),
    "ids-text": with_choice(token_ids="12"),  # noqa: S106
    "ids-of-text": with_choice(token_ids=["1", "2"]),
    "ids-nested": with_choice(token_ids=[[1], [2]]),
    "ids-of-floats": with_choice(token_ids=[1.0, 2.0]),
    "ids-of-booleans": with_choice(token_ids=[True, False]),
    "id-negative": with_choice(token_ids=[-1, 2]),
    "id-beyond": with_choice(token_ids=[10, 2]),
    "id-huge": with_choice(token_ids=[10**30, 2]),
    "id-of-5000-digits": http(b'{"choices": [{"token_ids": [' + b"1" * 5000 + b"]}]}"),
    "too-many": with_choice(token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5}),
    "none": with_choice(token_ids=[], logprobs={"token_logprobs": []}),
    "fewer-values": with_choice(logprobs={"token_logprobs": [-1.0]}),
    "values-null": with_choice(logprobs=None),
    "values-text": with_choice(logprobs="x"),
    "value-null": with_choice(logprobs={"token_logprobs": [None, -1.0]}),
    "value-nan": with_choice(logprobs={"token_logprobs": [float("nan"), -1.0]}),
    "value-infinite": with_choice(logprobs={"token_logprobs": [-float("inf"), -1.0]}),
    "value-above-0": with_choice(logprobs={"token_logprobs": [0.5, -1.0]}),
    "value-huge": with_choice(logprobs={"token_logprobs": [-(10**400), -1.0]}),
    "value-of-text": with_choice(logprobs={"token_logprobs": ["-1", -1.0]}),
    "value-boolean": with_choice(logprobs={"token_logprobs": [False, -1.0]}),
    "reason-list": with_choice(finish_reason=["stop"]),
    "reason-other": with_choice(finish_reason="\x1b[2J"),
    "gzip": http(b"\x1f\x8b\x08\x00\x00\x00", "200 OK", "Content-Encoding: gzip"),
    "length-huge": b"HTTP/1.1 200 OK\r\nContent-Length: 1" + b"0" * 18 + b"\r\n\r\n{}",
    "length-text": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "chunk-garbage": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunk-negative": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-9\r\n{}\r\n0\r\n\r\n",
    "chunk-huge": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 15 + b"\r\n{}",
    "no-http": b"SSH-2.0-OpenSSH\r\n",
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
    "nothing": lambda connection: connection.close(),
    "headers-endless": lambda connection: [connection.sendall(b"X: y\r\n") for _ in range(10**6)],
    "status-102": b"HTTP/1.1 102 Processing\r\n\r\n",
    "status-204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status-400": http(b"{}", "400 Bad Request"),
    "status-404": http(b"{}", "404 Not Found"),
    "status-500": http(b"\xff\x1b[2J", "500 Oh"),
    "status-999": http(b"{}", "999 What"),
}


@pytest.mark.parametrize("form", BAD)
def test_what_is_no_answer_takes_its_server_out_of_the_ring(
    form: str, peer: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other server answers all prompts; where there is no other, the rank ends as when no server is left."""
    monkeypatch.setattr(server_requests, "REST_SECONDS", 1.0)
    bad, good = peer(BAD[form]), peer()
    both = ring_of(tmp_path, bad, good)
    for _ in range(3):  # as often as a server may be silent
        assert both.answer([[1, 2]] * 2, [1] * 2, SAMPLING) == [([1, 2], [-0.5, 0.0])] * 2
    assert bad.url in capsys.readouterr().err
    before = len(bad.seen)
    assert len(both.answer([[1, 2]] * 2, [1] * 2, SAMPLING)) == 2 and len(bad.seen) == before
    with pytest.raises(UserError) as caught:
        ring_of(tmp_path, bad).answer([[1, 2]], [1], SAMPLING)
    assert caught.value.code == ExitCode.AGAIN and bad.url in str(caught.value)


def stolen(address: str, nonce: str) -> bytes:
    return http(prove("another key", address, nonce).encode())


@pytest.mark.parametrize(
    "proof", [stolen, lambda *_: http(b"{}"), lambda *_: http(b"", "404 Not Found"), lambda *_: b"SSH-2.0\r\n"]
)
def test_who_has_the_port_and_not_the_key_learns_nothing(
    proof: Callable[[str, str], bytes], peer: Callable[..., Peer], tmp_path: Path
) -> None:
    stranger = peer(proof=proof)
    ring = ring_of(tmp_path, stranger)
    with pytest.raises(UserError):
        ring.answer([[7, 7, 7]], [1], SAMPLING)
    for secret in (KEY, "7, 7", "adapter", str(tmp_path), "Bearer"):
        assert secret.encode() not in stranger.seen
    with_good = ring_of(tmp_path, stranger, peer())
    assert len(with_good.answer([[7, 7, 7]] * 4, [1] * 4, SAMPLING)) == 4
    assert KEY.encode() not in stranger.seen


def test_another_server_s_proof_is_none(peer: Callable[..., Peer], tmp_path: Path) -> None:
    """Who has taken one server's port may ask the next server of the same job."""
    other = peer()
    stranger = peer(proof=lambda _, nonce: http(prove(KEY, other.address, nonce).encode()))
    with pytest.raises(UserError):
        ring_of(tmp_path, stranger).answer([[7, 7, 7]], [1], SAMPLING)
    assert KEY.encode() not in stranger.seen


def test_no_redirect_and_no_proxy_is_followed(
    peer: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = peer()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, elsewhere.url)
    moved = peer(http(b"", "307 Temporary Redirect", f"Location: {elsewhere.url}/v1/completions"))
    with pytest.raises(UserError):
        ring_of(tmp_path, moved).answer([[1]], [1], SAMPLING)
    assert len(ring_of(tmp_path, peer()).answer([[1]], [1], SAMPLING)) == 1
    assert elsewhere.seen == b""


def test_a_server_s_port_is_held_before_it_listens(tmp_path: Path) -> None:
    described, held = hold_ports(job(tmp_path, servers=2), 0)
    with ExitStack() as stack:
        for one in held:
            stack.enter_context(one)
        for i in range(2):
            stranger = stack.enter_context(socket.socket())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", described.port + i))
            ours = stack.enter_context(socket.socket())  # as vLLM binds
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            ours.bind(("127.0.0.1", described.port + i))
            ours.listen()


def test_a_port_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    described = job(tmp_path)
    with socket.create_server(("127.0.0.1", described.port)):
        other, held = hold_ports(described, 0)
        for one in held:
            one.close()
        assert other.port != described.port


def test_a_port_where_nodes_meet_that_is_taken_ends_the_step_with_a_sentence(tmp_path: Path) -> None:
    """A stranger who listens there would be taken for the first node by the others."""
    described = replace(job(tmp_path), nodes=("127.0.0.1", "n2"), shape=replace(job(tmp_path).shape, pipeline_parallel=2))
    assert described.over_several
    with socket.create_server(("127.0.0.1", described.port + 1)):
        (problem,) = problems(hold_ports, described, 0)
    assert "another program" in problem.message and str(described.port + 1) in str(problem.file)
    for one in hold_ports(described, 0)[1]:
        one.close()


def test_a_whole_answer_is_read() -> None:
    assert read_answer(json.dumps(GOOD).encode(), 2, 3) == ([1, 2], [-0.5, 0.0])


# --- the client of an evaluation ----------------------------------------------------------------------------------------

TEXT = http(json.dumps({"choices": [{"index": 0, "text": "an answer", "finish_reason": "stop"}]}).encode())
FORMS = ["endless", "slow", "no-json", "not-utf-8", "nested", "a-list", "choices-object", "choice-null", "two", "gzip"]
FORMS += ["length-huge", "chunk-garbage", "no-http", "cut", "nothing", "status-102", "status-204", "status-404", "status-500"]


def scorer(model: Path, *peers: Peer) -> ServersLM:
    urls = [peer.url for peer in peers]
    return ServersLM(urls, model, model="model", concurrent=4, max_length=2048, key=KEY, stall_seconds=20)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_answer_is_not_scored_and_the_others_are_asked(
    form: str, peer: Callable[..., Peer], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REST_SECONDS", 1.0)
    bad = peer(BAD[form])
    lm = scorer(tiny_model, bad, peer(TEXT))
    assert lm.generate_until(prompts(6), disable_tqdm=True) == ["an answer"] * 6
    with pytest.raises(UserError, match=bad.url):
        scorer(tiny_model, bad).generate_until(prompts(1), disable_tqdm=True)


def test_an_evaluation_tells_a_stranger_nothing(
    peer: Callable[..., Peer], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = peer(TEXT)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, elsewhere.url)
    moved = peer(http(b"", "307 Temporary Redirect", f"Location: {elsewhere.url}/v1/completions"))
    stranger = peer(TEXT, proof=stolen)
    for one in (moved, stranger):
        with pytest.raises(UserError, match=one.url):
            scorer(tiny_model, one).generate_until(prompts(1), disable_tqdm=True)
    assert elsewhere.seen == b"" and KEY.encode() not in stranger.seen and b"completions" not in stranger.seen
