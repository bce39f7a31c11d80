"""``fake_vllm.py serve MODEL ... --port N``: answers like vLLM, and after a number of answers misbehaves as FAKE_MODES says.

FAKE_MODES: JSON, the number of the server to MODE or [MODE, answers before it]. MODE: ok, 500, once (one 500), hang, die, null,
empty (no choices), nochoices, abort, long (more tokens than asked), two (answers), late (never there),
other (serves another model), exit (at once). An
"engine" process of its own stands for vLLM's; its id is in FAKE_PIDS/PORT.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

words = sys.argv
if "--version" in words:
    sys.exit(not sys.stdout.write("0.0\n"))
port = int(words[words.index("--port") + 1]) if "--port" in words else 0
given = json.loads(os.environ.get("FAKE_MODES", "{}")).get(str(port), "ok")
mode, good = given if isinstance(given, list) else (given, 0)
delay = float(os.environ.get("FAKE_DELAY", "0"))
numbers = itertools.count(1)

if "FAKE_PIDS" in os.environ:
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAKE_PIDS"], f"{port}").write_text(f"{os.getpid()} {engine.pid}")
if mode == "exit":
    sys.exit("no GPU here")
if not port:  # a follower
    time.sleep(600)


def answer(body):
    """What depends on the prompt alone."""
    prompt = body["prompt"][0]
    if body.get("echo"):
        values = [None, *(-math.sqrt(1 + token % 7) for token in prompt)]
        top = [None, *({"x": 0.0} for _ in prompt)]
        return {"index": 0, "text": "", "finish_reason": "length", "logprobs": {"token_logprobs": values, "top_logprobs": top}}
    return {"index": 0, "text": f"answer {sum(i * token for i, token in enumerate(prompt, 1))}", "finish_reason": "stop"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        model = words[2] if mode != "other" else "/other"
        said = {"/health": {}, "/version": {"version": "0"}, "/v1/models": {"data": [{"id": "model", "root": model}]}}
        self.reply(200 if self.path in said and mode != "late" else 404, said.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = next(numbers)
        time.sleep(delay)
        choice = answer(body)
        right = {"choices": [choice], "usage": {"completion_tokens": 3}}
        if number <= good or mode == "ok" or (mode == "once" and number > good + 1):
            return self.reply(200, right)
        if mode == "hang":
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


ThreadingHTTPServer.request_queue_size = 1024
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
