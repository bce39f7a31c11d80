"""HTTP with JSON behind the job's guard, for the programs that stand in vLLM's place."""

import asyncio
import importlib
import itertools
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ThreadingHTTPServer.request_queue_size = 1024
ThreadingHTTPServer.allow_reuse_port = True
"""As vLLM's create_server_socket."""


def middleware(words, app):
    """What vLLM makes of ``--middleware``: the application behind it."""
    for word, value in itertools.pairwise(words):
        if word == "--middleware":
            module, name = value.rsplit(".", 1)
            app = getattr(importlib.import_module(module), name)(app)
    return app


class JsonHandler(BaseHTTPRequestHandler):
    """Answers of JSON, and no line for each on stderr."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def parse_request(self):
        """Ask the middleware first, as vLLM does; it may answer in this handler's place."""
        if not super().parse_request():
            return False
        let_through, sent = [], []

        async def app(*_):
            let_through.append(True)

        async def send(message):
            sent.append(message)

        path, _, query = self.path.partition("?")
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": headers, "method": self.command}
        asyncio.run(middleware(sys.argv, app)(scope, None, send))
        if not let_through:
            self.read_rest()
            self.send_response(sent[0]["status"])
            for name, value in sent[0]["headers"]:
                self.send_header(name.decode(), value.decode())
            self.end_headers()
            self.wfile.write(sent[1]["body"])
        return bool(let_through)

    def read_rest(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def read(self):
        return json.loads(self.read_rest())

    def reply(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(host, port, handler):
    """Until the process is ended."""
    ThreadingHTTPServer((host, int(port)), handler).serve_forever()
