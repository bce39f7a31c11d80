"""``fake_vllm.py serve MODEL ... --port N``: answers like vLLM, and after a number of answers misbehaves as FAKE_MODES says.

FAKE_MODES: JSON, the port of the server, or * for any, to MODE or [MODE, answers before it]. MODE: ok, 500, once (one 500),
hang, die, null, empty (no choices), nochoices, abort, long (more tokens than asked), two (answers), late (never there), other
(serves another model), exit (at once). An "engine" process of its own stands for vLLM's; its id is in FAKE_PIDS/PORT.

FAKE_MEET: over several nodes they meet as vLLM's do, at --master-addr: the first one answers when all are there, and hangs when
one is gone. ``alone``: the others do not come.
"""

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serving.json_server import JsonHandler, serve

words = sys.argv
if "--version" in words:
    sys.exit(not sys.stdout.write("0.0\n"))
port = int(words[words.index("--port") + 1]) if "--port" in words else 0
modes = json.loads(os.environ.get("FAKE_MODES", "{}"))
given = modes.get(str(port), modes.get("*", "ok"))
mode, good = given if isinstance(given, list) else (given, 0)
delay = float(os.environ.get("FAKE_DELAY", "0"))
numbers = itertools.count(1)


def say(what):
    """To the log."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if "FAKE_PIDS" in os.environ:
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAKE_PIDS"], f"{port}").write_text(f"{os.getpid()} {engine.pid}")
    signal.signal(signal.SIGTERM, lambda *_: (engine.kill(), os._exit(0)))  # as vLLM's API server ends its engine
if mode == "exit":
    sys.exit("no GPU here")
value = {word: words[i + 1] for i, word in enumerate(words[:-1])}
meeting = os.environ.get("FAKE_MEET", "") if int(value.get("--nnodes", 1)) > 1 else ""
if not port:  # a follower
    while meeting and meeting != "alone":
        try:
            with socket.create_connection((value["--master-addr"], int(value["--master-port"]))) as head:
                say("met")
                head.recv(1)
        except OSError:
            time.sleep(0.1)
    time.sleep(600)
os.makedirs(os.environ.get("VLLM_CACHE_ROOT", "."), exist_ok=True)  # noqa: PTH103 - as vLLM's compiled code
gone = []
if meeting:
    say("waits for the others")
    with socket.create_server(("", int(value["--master-port"]))) as door:
        others = [door.accept()[0] for _ in range(int(value["--nnodes"]) - 1)]
    for other in others:
        threading.Thread(target=lambda other=other: gone.append(other.recv(1)), daemon=True).start()


def answer(body):
    """What depends on the prompt alone."""
    prompt = body["prompt"][0]
    if body.get("echo"):
        values = [None, *(-math.sqrt(1 + token % 7) for token in prompt)]
        top = [None, *({"x": 0.0} for _ in prompt)]
        return {"index": 0, "text": "", "finish_reason": "length", "logprobs": {"token_logprobs": values, "top_logprobs": top}}
    return {"index": 0, "text": f"answer {sum(i * token for i, token in enumerate(prompt, 1))}", "finish_reason": "stop"}


class Handler(JsonHandler):
    def do_GET(self):
        model = words[2] if mode != "other" else "/other"
        answers = {"/health": {}, "/version": {"version": "0"}, "/v1/models": {"data": [{"id": "model", "root": model}]}}
        self.reply(200 if self.path in answers and mode != "late" else 404, answers.get(self.path))

    def do_POST(self):
        body = self.read()
        number = next(numbers)
        time.sleep(delay)
        choice = answer(body)
        right = {"choices": [choice], "usage": {"completion_tokens": 3}}
        if gone:
            time.sleep(600)
        if number <= good or mode == "ok" or (mode == "once" and number > good + 1):
            return self.reply(200, right)
        if mode == "hang":
            say("hangs")
            time.sleep(600)
        if mode == "die":
            os._exit(1)
        if mode in ("500", "once"):
            return self.reply(500, {"error": "boom"})
        wrong = {
            "null": {"choices": [{**choice, "text": None, "logprobs": None}]},
            "empty": {"choices": []},
            "nochoices": {"object": "error", "message": "x"},
            "abort": {"choices": [{**choice, "finish_reason": "abort"}]},
            "long": {**right, "usage": {"completion_tokens": 10_000}},
            "two": {"choices": [choice, {**choice, "index": 1}]},
        }
        return self.reply(200, wrong[mode])


serve("127.0.0.1", port, Handler)
