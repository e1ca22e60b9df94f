"""Schedules, shows and cancels a job over gRPC.

    jobs.py SERVER APP schedule TEXT SECONDS   prints the job's id and state
    jobs.py SERVER APP cancel ID               prints the outcome
"""

import sys

import grpc
from google.protobuf.duration_pb2 import Duration

from redeliver.v1 import jobs_pb2, jobs_pb2_grpc


def schedule(jobs, app, text, seconds):
    spec = jobs_pb2.JobSpec(app=app, delay=Duration(seconds=int(seconds)), data=text.encode())
    spec.headers.add(name="sent-by", value=b"python")
    answer = jobs.ScheduleJob(jobs_pb2.ScheduleJobRequest(job=spec))
    job = jobs.GetJob(jobs_pb2.GetJobRequest(id=answer.id))
    print(job.id, jobs_pb2.JobState.Name(job.state))


def cancel(jobs, _app, id):
    answer = jobs.CancelJob(jobs_pb2.CancelJobRequest(id=id))
    print(id, jobs_pb2.Outcome.Name(answer.outcome))


if __name__ == "__main__":
    server, app, verb, *arguments = sys.argv[1:]
    with grpc.insecure_channel(server) as channel:
        verbs = {"schedule": schedule, "cancel": cancel}
        verbs[verb](jobs_pb2_grpc.JobServiceStub(channel), app, *arguments)
