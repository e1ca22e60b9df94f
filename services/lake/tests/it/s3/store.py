"""An object store with a bucket `lake`: moto's S3 on a free port, which it prints. The argument is the share of the requests that fail.

A third of these do not arrive, the answer of a third is lost, and the others are late. With a second argument, it replaces any object,
as stores do that do not know If-None-Match."""

import random
import sys
import threading
import time

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

share = 0.0
replaces_any = len(sys.argv) > 2
store = DomainDispatcherApplication(create_backend_app)
# moto looks whether an object exists and writes it in two steps.
one_at_a_time = threading.Lock()


def lost(start_response):
    start_response("503 Service Unavailable", [("Content-Length", "0")])
    return []


def application(environ, start_response):
    if replaces_any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
    fault = random.randrange(3) if random.random() < share else None
    if fault == 0:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        return lost(start_response)
    if fault == 2:
        time.sleep(random.random())
    with one_at_a_time:
        if fault != 1:
            return store(environ, start_response)
        store(environ, lambda *_: None)
    return lost(start_response)


server = make_server("127.0.0.1", 0, application, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{server.server_port}"
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
client.create_bucket(Bucket="lake")
share = float(sys.argv[1])
print(f"endpoint {endpoint}", flush=True)
threading.Event().wait()
