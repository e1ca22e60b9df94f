"""A demo endpoint that greets numbers.

Multiples of 7 fail permanently (422). Other multiples of 5 fail transiently (500) on the first call. The endpoint prints
the status and the Idempotency-Key of each call. Usage: endpoint.py [ADDRESS[:PORT]], by default 127.0.0.1:8080.
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
            return self.respond(400, key, {"problem": 'expected {"number": 1}'})
        if number % 7 == 0:
            return self.respond(422, key, {"problem": "no greetings for sevens"})
        if number % 5 == 0 and calls[key] == 1:
            return self.respond(500, key, {"problem": "busy"})
        return self.respond(200, key, {"number": number, "greeting": f"hello {number}"})

    def respond(self, status, key, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        sys.stdout.write(f"{status} {key}\n")
        sys.stdout.flush()

    def log_message(self, *_):
        """Disabled: `respond` prints a line for each call."""


if __name__ == "__main__":
    address, _, port = (sys.argv[1] if len(sys.argv) > 1 else "").partition(":")
    server = ThreadingHTTPServer((address or "127.0.0.1", int(port or 8080)), Endpoint)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
