"""Schedules, lists, moves and cancels jobs with the client that openapi-python-client has generated from the document."""

import datetime
import sys

from generated.api.default import (
    batch_schedule_jobs,
    cancel_job,
    create_schedule,
    get_job,
    list_jobs,
    list_schedules,
    pause_schedule,
    reschedule_job_by_key,
    schedule_job,
)
from generated.client import Client
from generated.models import (
    BatchRequest,
    DueRequest,
    JobRequest,
    NoOptions,
    OnConflict,
    Priority,
    ProblemBody,
    ScheduleRequest,
)

client = Client(base_url=sys.argv[1], raise_on_unexpected_status=True)
due = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0) + datetime.timedelta(days=30)


def job(**fields):
    return JobRequest(app_name="sms", job_data={"n": 1}, scheduled_time=due, **fields)


def ids(**filters):
    return {listed.id for listed in list_jobs.sync(client=client, **filters).jobs}


created = schedule_job.sync(client=client, body=job(idempotency_key="k", priority=Priority.HIGH))
assert created.outcome == "scheduled", created
again = schedule_job.sync_detailed(client=client, body=job(idempotency_key="k", priority=Priority.HIGH))
assert (again.status_code, again.parsed.outcome) == (200, "duplicate"), again
replacing = job(idempotency_key="k", priority=Priority.HIGH, on_conflict=OnConflict.REPLACE, request_id="2")
replaced = schedule_job.sync(client=client, body=replacing)
assert (replaced.id, replaced.outcome) == (created.id, "replaced"), replaced
moved = reschedule_job_by_key.sync(
    client=client, app_name="sms", idempotency_key="k", body=DueRequest(scheduled_time=due)
)
assert moved.outcome == "rescheduled", moved

batch = batch_schedule_jobs.sync(
    client=client,
    body=BatchRequest(jobs=[job(), JobRequest(app_name="unknown", job_data=None, delay="1h")]),
)
one, refused = batch.results
assert (one.status, refused.status) == (201, 422), batch
assert (refused.error.code, refused.error.field) == ("request.appName", "appName"), refused

read = get_job.sync(client=client, id=created.id)
assert (read.scheduled_time, read.job_data) == (due, {"n": 1}), read
assert ids(app="sms") == {created.id, one.id}
assert ids(app="sms", due_until=due) == set()
cancelled = cancel_job.sync(client=client, id=created.id)
assert cancelled.outcome == "cancelled", cancelled
assert ids(app="sms") == {one.id}
unknown = get_job.sync(client=client, id="0" * 26)
assert isinstance(unknown, ProblemBody) and unknown.status == 404, unknown

schedule = create_schedule.sync(
    client=client, body=ScheduleRequest(app_name="sms", id="nightly", cron="30 2 * * *", job_data=None)
)
assert (schedule.state, schedule.cron.gap) == ("active", "shift"), schedule
paused = pause_schedule.sync(client=client, id="nightly", body=NoOptions())
assert paused.state == "paused", paused
assert [listed.id for listed in list_schedules.sync(client=client).schedules] == ["nightly"]
