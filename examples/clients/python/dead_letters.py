"""Lists, reads and watches dead letters over gRPC.

    dead_letters.py SERVER list [FILTER]    prints one line each, newest first
    dead_letters.py SERVER read ID          prints headers and the whole value
    dead_letters.py SERVER watch [FILTER]   prints existing dead letters, then new ones as they arrive
"""

import sys

import grpc

from redeliver.v1 import dead_letters_pb2 as api
from redeliver.v1 import dead_letters_pb2_grpc


def line(letter):
    return f"{letter.id} {letter.error_class} {letter.error_code} {letter.error_message}"


def list_all(inspector, filter=""):
    request = api.ListDeadLettersRequest(filter=filter, page_size=100)
    while True:
        page = inspector.ListDeadLetters(request)
        for letter in page.dead_letters:
            print(line(letter))
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def read(inspector, id):
    letter = inspector.GetDeadLetter(api.GetDeadLetterRequest(id=id))
    for header in letter.headers:
        print(f"{header.name}: {header.value.decode(errors='replace') if header.HasField('value') else 'null'}")
    pieces = inspector.ReadPayload(api.ReadPayloadRequest(id=id))
    print()
    print(b"".join(piece.chunk for piece in pieces).decode(errors="replace"))


def watch(inspector, filter=""):
    for answer in inspector.WatchDeadLetters(api.WatchDeadLettersRequest(filter=filter)):
        event = answer.WhichOneof("event")
        if event == "dead_letter":
            print(line(answer.dead_letter), flush=True)
        elif event == "synced":
            print("-- caught up", flush=True)


if __name__ == "__main__":
    server, verb, *arguments = sys.argv[1:]
    with grpc.insecure_channel(server) as channel:
        verbs = {"list": list_all, "read": read, "watch": watch}
        verbs[verb](dead_letters_pb2_grpc.DeadLetterServiceStub(channel), *arguments)
