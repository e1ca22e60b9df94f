"""Occurrences of cron expressions around each change of a zone's clock, from croniter and zoneinfo.

croniter gives the local times, and zoneinfo (PEP 495) says which of them exist, and how often. Reads a JSON object with `zones`,
`expressions`, `first` and `last` (years), `grace` (seconds) and `limit` from standard input. Writes a list of objects with `zone`, `expression`, `gap`, `overlap`,
`from`, `until` and the occurrences after `from` and not after `until`, all in seconds since the Unix epoch. `dispatched` has, for each misfire policy, what is
dispatched `at` if nothing was decided since `from`.
"""

import json
import sys
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from croniter import croniter

AROUND = timedelta(hours=36)
HOUR = timedelta(hours=1)


def changes(zone, first, last):
    """The hours of UTC in which the offset changes."""
    at = datetime(first, 1, 1, tzinfo=timezone.utc)
    end = datetime(last + 1, 1, 1, tzinfo=timezone.utc)
    offset = at.astimezone(zone).utcoffset()
    while at < end:
        at += HOUR
        now = at.astimezone(zone).utcoffset()
        if now != offset:
            yield at
        offset = now


def instants(local, zone, gap, overlap):
    """The instants of a local time."""
    first = local.replace(tzinfo=zone).astimezone(timezone.utc)
    second = local.replace(tzinfo=zone, fold=1).astimezone(timezone.utc)
    if first.astimezone(zone).replace(tzinfo=None) != local:
        # In a gap, fold 0 has the offset before it.
        return [first] if gap == "shift" else []
    if first != second and overlap == "both":
        return [first, second]
    return [first]


def occurrences(expression, zone, gap, overlap, start, until):
    """The occurrences after `start` and not after `until`."""
    margin = timedelta(days=2)
    local = start.astimezone(zone).replace(tzinfo=None) - margin
    end = until.astimezone(zone).replace(tzinfo=None) + margin
    times = croniter(expression, local)
    found = set()
    while (local := times.get_next(datetime)) < end:
        found.update(instants(local, zone, gap, overlap))
    return sorted(int(at.timestamp()) for at in found if start < at <= until)


def dispatched(due, at, grace, limit):
    """What each misfire policy dispatches of the occurrences that are due `at`: some of those that are late by more than `grace`, and all others."""
    due = [second for second in due if second <= at]
    missed = [second for second in due if at - second > grace]
    late = due[len(missed) :]
    return {"skip": late, "once": missed[-1:] + late, "all": missed[-limit:] + late}


request = json.load(sys.stdin)
answer = []
for name in request["zones"]:
    zone = ZoneInfo(name)
    for change in changes(zone, request["first"], request["last"]):
        start, until = change - AROUND, change + AROUND
        for expression in request["expressions"]:
            for gap in ("shift", "skip"):
                for overlap in ("first", "both"):
                    found = occurrences(expression, zone, gap, overlap, start, until)
                    # Not at a distance of `grace` from any occurrence.
                    at = int((change + 3 * HOUR).timestamp()) + 30
                    answer.append(
                        {
                            "zone": name,
                            "expression": expression,
                            "gap": gap,
                            "overlap": overlap,
                            "from": int(start.timestamp()),
                            "until": int(until.timestamp()),
                            "occurrences": found,
                            "at": at,
                            "dispatched": dispatched(found, at, request["grace"], request["limit"]),
                        }
                    )
json.dump(answer, sys.stdout)
