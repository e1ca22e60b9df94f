"""A tiny endpoint to try Redeliver with: it greets numbers.

Every fifth number finds it busy (503) the first time, every seventh is refused for good (422). It prints the
status and the Idempotency-Key of each call. Usage: endpoint.py [ADDRESS], by default 127.0.0.1; port 8080.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

calls = {}


class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        key = self.headers["idempotency-key"]
        calls[key] = calls.get(key, 0) + 1
        try:
            number = int(json.loads(body)["number"])
        except (ValueError, KeyError, TypeError):
            return self.answer(400, key, {"problem": 'expected {"number": 1}'})
        if number % 7 == 0:
            return self.answer(422, key, {"problem": "no greetings for sevens"})
        if number % 5 == 0 and calls[key] == 1:
            return self.answer(503, key, {"problem": "busy"})
        return self.answer(200, key, {"number": number, "greeting": f"hello {number}"})

    def answer(self, status, key, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        sys.stdout.write(f"{status} {key}\n")
        sys.stdout.flush()

    def log_message(self, *_):
        """Says nothing: `answer` does."""


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    server = ThreadingHTTPServer((address, 8080), Endpoint)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
