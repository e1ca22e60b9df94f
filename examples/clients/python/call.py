"""Calls a method of the inspector with a request in JSON, and prints the answer in JSON.

    call.py SERVER                                   lists all methods
    call.py SERVER RedriveService.PlanRedrive '{"kind": "REDRIVE_KIND_REDRIVE", "all": true}'
    call.py SERVER RedriveService.StartRedrive '{"id": "019b0c1de5a04c11"}'

If the server requires a token, it is in the environment variable REDELIVER_TOKEN.
"""

import os
import sys

import grpc
from google.protobuf import json_format, message_factory

from redeliver.v1 import access_pb2, access_pb2_grpc
from redeliver.v1 import audit_pb2, audit_pb2_grpc
from redeliver.v1 import control_pb2, control_pb2_grpc
from redeliver.v1 import dead_letters_pb2, dead_letters_pb2_grpc
from redeliver.v1 import overview_pb2, overview_pb2_grpc
from redeliver.v1 import redrive_pb2, redrive_pb2_grpc
from redeliver.v1 import waiting_pb2, waiting_pb2_grpc

SERVICES = [
    (access_pb2.DESCRIPTOR.services_by_name["AccessService"], access_pb2_grpc.AccessServiceStub),
    (audit_pb2.DESCRIPTOR.services_by_name["AuditService"], audit_pb2_grpc.AuditServiceStub),
    (control_pb2.DESCRIPTOR.services_by_name["ControlService"], control_pb2_grpc.ControlServiceStub),
    (dead_letters_pb2.DESCRIPTOR.services_by_name["DeadLetterService"], dead_letters_pb2_grpc.DeadLetterServiceStub),
    (overview_pb2.DESCRIPTOR.services_by_name["OverviewService"], overview_pb2_grpc.OverviewServiceStub),
    (redrive_pb2.DESCRIPTOR.services_by_name["RedriveService"], redrive_pb2_grpc.RedriveServiceStub),
    (waiting_pb2.DESCRIPTOR.services_by_name["WaitingService"], waiting_pb2_grpc.WaitingServiceStub),
]


def methods():
    return {f"{service.name}.{method.name}": (method, stub) for service, stub in SERVICES for method in service.methods}


def call(channel, name, text):
    method, stub = methods()[name]
    request = json_format.Parse(text, message_factory.GetMessageClass(method.input_type)())
    token = os.environ.get("REDELIVER_TOKEN")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    answer = getattr(stub(channel), method.name)(request, metadata=metadata)
    for message in answer if method.server_streaming else [answer]:
        print(json_format.MessageToJson(message, indent=None), flush=True)


if __name__ == "__main__":
    server, *arguments = sys.argv[1:]
    if not arguments:
        print("\n".join(methods()))
        sys.exit()
    with grpc.insecure_channel(server) as channel:
        try:
            call(channel, *arguments)
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")
