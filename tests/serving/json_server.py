"""HTTP with JSON, for the programs that stand in vLLM's place."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ThreadingHTTPServer.request_queue_size = 1024


class JsonHandler(BaseHTTPRequestHandler):
    """Answers of JSON, and no line for each on stderr."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def read(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

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
