#!/usr/bin/env python3
"""Writes the Grafana dashboards to dashboards/. With --check, verifies that the files are up to date instead.

A dashboard is a list of rows, and a row a list of panels, which are placed from left to right.
"""

import argparse
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# The schema of Grafana 12.0; later versions migrate it, and Grafana 11 ignores what it does not know.
SCHEMA_VERSION = 41
WIDTH = 24

RATE = "[$__rate_interval]"
RANGE = "[$__range]"
# The labels that the variables of a dashboard select.
INSTANCE = 'instance=~"$instance"'
PIPELINE = f'{INSTANCE}, pipeline=~"$pipeline"'
TIER = f'{PIPELINE}, tier=~"$tier"'
# The lane of a tier has no pipeline if several pipelines have the tier.
WORKER_LANE = f'{PIPELINE}, pipeline!="", tier=""'
TIER_LANE = f'{INSTANCE}, pipeline=~"($pipeline)?", tier=~"$tier", tier!=""'
SCHEDULER_LANE = f'{INSTANCE}, lane=~"scheduler-.+"'
# The standard metrics of a process do not say which program it is.
OURS = "and on (job, instance) redeliver_build_info"
# The lag of what can be processed at once, and of what waits in tiers.
READY = f'{INSTANCE}, tier=""'
WAITING = f'{INSTANCE}, tier!=""'


# Queries


def query(expr, legend="__auto", **options):
    return {"datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "editorMode": "code", **options}


def rate(metric, labels, by=""):
    expr = f"sum{by_clause(by)} (rate({metric}{{{labels}}}{RATE}))"
    return query(expr, legend_of(by))


def total(metric, labels, by="", function="sum"):
    return query(f"{function}{by_clause(by)} ({metric}{{{labels}}})", legend_of(by))


def by_clause(by):
    return f" by ({by})" if by else ""


def legend_of(by):
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")) if by else "__auto"


def quantiles(histogram, labels, by="", of=(0.5, 0.99)):
    """Quantiles of a histogram, one query each."""
    grouping = by_clause(f"le, {by}" if by else "le")
    for quantile in of:
        expr = f"histogram_quantile({quantile}, sum{grouping} (rate({histogram}_bucket{{{labels}}}{RATE})))"
        name = f"p{quantile * 100:g}"
        yield query(expr, f"{legend_of(by)} {name}" if by else name)


def mean(histogram, labels, over=RATE, by=""):
    def added(part):
        return f"sum{by_clause(by)} (rate({histogram}_{part}{{{labels}}}{over}))"
    return f"{added('sum')} / {added('count')}"


def success_rate(labels, by="", over=RATE):
    """The share of successes among the records that are done: a record that is retried is not done yet."""
    return ratio(["redeliver_worker_succeeded_total"],
                 ["redeliver_worker_succeeded_total", "redeliver_worker_dead_total"], labels, by, over)


def retries_per_record(labels, by="", over=RATE):
    return ratio(["redeliver_worker_retried_total"],
                 ["redeliver_worker_succeeded_total", "redeliver_worker_dead_total"], labels, by, over)


def ratio(parts, wholes, labels, by, over):
    def added(metrics):
        return " + ".join(f"sum{by_clause(by)} (increase({metric}{{{labels}}}{over}))" for metric in metrics)
    return f"{added(parts)} / ({added(wholes)})"


# Panels


def panel(kind, title, description, queries, unit, width, height, **defaults):
    options = defaults.pop("options", {})
    for letter, target in zip("ABCDEFGH", queries):
        target["refId"] = letter
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": queries,
        "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
        "options": options,
    }


def stat(title, description, expr, unit="short", red_from=None, green_from=None):
    """A number. It is red from one value on, or below another one. A value of the whole time range has no history."""
    of_range = RANGE in expr
    steps = [{"color": "text", "value": None}]
    if red_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": red_from}]
    if green_from is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": green_from}]
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none" if of_range else "area",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    }
    return panel("stat", title, description, [query(expr, instant=of_range, range=not of_range)], unit, 4, 4, options=options,
                 thresholds={"mode": "absolute", "steps": steps})


def graph(title, description, *queries, unit="short", width=8, stacked=False, most=None):
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    limits = {"min": 0} if most is None else {"min": 0, "max": most}
    return panel("timeseries", title, description, list(queries), unit, width, 8, options=options, custom=custom, **limits)


def heatmap(title, description, histogram, labels, width=8):
    expr = f"sum by (le) (increase({histogram}_bucket{{{labels}}}{RATE}))"
    options = {
        "calculate": False,
        "yAxis": {"unit": "s"},
        "rowsFrame": {"layout": "auto"},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
        "cellGap": 1,
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True},
    }
    return panel("heatmap", title, description, [query(expr, "{{le}}", format="heatmap")], "short", width, 8,
                 options=options)


def table(title, description, expr, columns, width=12):
    """A table of the labels `columns` and, if listed, the value."""
    hidden = {"Time": True} if "Value" in columns else {"Time": True, "Value": True}
    organize = {
        "id": "organize",
        "options": {"excludeByName": hidden, "indexByName": {name: index for index, name in enumerate(columns)}},
    }
    options = {"showHeader": True, "cellHeight": "sm"}
    built = panel("table", title, description, [query(expr, format="table", instant=True, range=False)], "short", width, 8,
                  options=options)
    return {**built, "transformations": [organize]}


# Dashboards


def variable(name, metric):
    return {
        "type": "query",
        "name": name,
        "label": name,
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric}, {name})", "refId": f"variable-{name}", "qryType": 1},
        "definition": f"label_values({metric}, {name})",
        # When the time range changes.
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also matches series without the label.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


VARIABLES = {
    "pipeline": variable("pipeline", "redeliver_worker_succeeded_total"),
    "tier": variable("tier", "redeliver_tier_released_total"),
    "instance": variable("instance", "redeliver_build_info"),
}


def dashboard(name, title, description, variables, rows):
    panels, y = [], 0
    for row_title, row in rows:
        panels.append({"type": "row", "title": row_title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y += 1
        x = height = 0
        for item in row:
            position = item["gridPos"]
            if x + position["w"] > WIDTH:
                x, y, height = 0, y + height, 0
            position.update(x=x, y=y)
            x, height = x + position["w"], max(height, position["h"])
            panels.append(item)
        y += height
    for number, item in enumerate(panels, start=1):
        item["id"] = number
    alerts = {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Redeliver.+", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "step": "60s",
    }
    datasource = {"type": "datasource", "name": "datasource", "label": "data source", "query": "prometheus", "current": {}}
    return {
        "uid": f"redeliver-{name}",
        "title": f"Redeliver / {title}",
        "description": description,
        "tags": ["redeliver"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": [datasource, *(VARIABLES[name] for name in variables)]},
        "annotations": {"list": [alerts]},
        "links": [{"type": "dashboards", "title": "Redeliver", "tags": ["redeliver"], "asDropdown": True,
                   "includeVars": True, "keepTime": True}],
        "panels": panels,
    }


def overview():
    now = [
        stat("Processes", "Processes that Prometheus scrapes.", f"count (redeliver_build_info{{{INSTANCE}}})"),
        stat("Firing alerts", "Alerts of rules.yml; docs/alerts.md describes each of them.",
             'count (ALERTS{alertname=~"Redeliver.+", alertstate="firing"}) or vector(0)', red_from=1),
        stat("Success rate", "Share of successes among the records that succeeded or became dead letters, in the time range.",
             success_rate(INSTANCE, over=RANGE), "percentunit"),
        stat("Retries per record", "Average number of retries of the records that are done, in the time range.",
             retries_per_record(INSTANCE, over=RANGE)),
        stat("Processing time", "Average duration of an attempt, in the time range.",
             mean("redeliver_worker_handling_seconds", INSTANCE, RANGE), "s"),
        stat("Clock held", "1 while a process does not trust its wall clock, and so releases and dispatches nothing.",
             f"max (redeliver_clock_held{{{INSTANCE}}})", red_from=1),
        stat("Backlog", "Records and commands that can be processed now: the lag of source topics, due topics and of the "
             "scheduler.", f"sum (redeliver_lane_lag{{{READY}}})"),
        stat("Waiting for a retry", "Records in the tiers.", f"sum (redeliver_lane_lag{{{WAITING}}})"),
        stat("Open dead letters", "All topics that the inspector indexes.",
             f"sum (max by (topic) (redeliver_dlq_open{{{INSTANCE}}}))"),
        stat("Records overdue", "Age of the earliest due time that a tier has not served.",
             f"max (redeliver_tier_overdue_seconds{{{INSTANCE}}})", "s", red_from=30),
        stat("Jobs overdue", "Age of the earliest due time that the scheduler has not served.",
             f"max (redeliver_scheduler_overdue_seconds{{{INSTANCE}}})", "s", red_from=30),
        stat("Redis memory", "Share of Redis' maxmemory in use; 0 without a limit. From redis.high_water on, jobs are rejected.",
             f"max (redeliver_scheduler_index_memory_share{{{INSTANCE}}})", "percentunit", red_from=0.8),
    ]
    pipelines = [
        graph("Succeeded", "Records per second.", rate("redeliver_worker_succeeded_total", INSTANCE, "pipeline"), unit="cps"),
        graph("Retried", "Failed attempts per second whose record waits for a retry.",
              rate("redeliver_worker_retried_total", INSTANCE, "pipeline, class"), unit="cps"),
        graph("Dead letters", "Records per second that became dead letters.",
              rate("redeliver_worker_dead_total", INSTANCE, "pipeline, class"), unit="cps"),
        graph("Success rate", "Share of successes among the records that succeeded or became dead letters.",
              query(success_rate(INSTANCE, "pipeline"), "{{pipeline}}"), unit="percentunit", most=1),
        graph("Processing time", "Duration of an attempt.",
              *quantiles("redeliver_worker_handling_seconds", INSTANCE, "pipeline"), unit="s"),
        graph("Backlog", "Records that can be processed now: the lag of the source topic and of the due topic.",
              total("redeliver_lane_lag", f'{READY}, pipeline!=""', "pipeline")),
        graph("Paused", "1 while an operator has paused the pipeline or the tier.",
              query(f"max by (pipeline) (redeliver_worker_paused{{{INSTANCE}}})", "{{pipeline}}"),
              query(f"max by (pipeline, tier) (redeliver_tier_paused{{{INSTANCE}}})", "{{pipeline}} {{tier}}")),
    ]
    tiers = [
        graph("Waiting", "Records in each tier.", total("redeliver_lane_lag", WAITING, "tier"), stacked=True),
        graph("Overdue", "Age of the earliest due time that has not been served.",
              total("redeliver_tier_overdue_seconds", INSTANCE, "tier", "max"), unit="s"),
        graph("Lateness", "From the due time to the commit that released the record.",
              *quantiles("redeliver_tier_lateness_seconds", INSTANCE, "tier", of=(0.99,)), unit="s"),
    ]
    jobs = [
        graph("Jobs ended", "Jobs per second.", rate("redeliver_scheduler_jobs_ended_total", INSTANCE, "outcome"), unit="cps"),
        graph("Overdue", "Age of the earliest due time that has not been served.",
              total("redeliver_scheduler_overdue_seconds", INSTANCE, function="max"), unit="s"),
        graph("Lateness", "From the due time to the commit that dispatched the job.",
              *quantiles("redeliver_scheduler_lateness_seconds", INSTANCE), unit="s"),
    ]
    dead_letters = [
        graph("Open", "Dead letters in the state OPEN.", total("redeliver_dlq_open", INSTANCE, "topic", "max"), stacked=True),
        graph("Indexed", "Dead letters per second that were added to the index.",
              rate("redeliver_dlq_indexed_total", INSTANCE, "topic"), unit="cps"),
        graph("Index lag", "Records of dead-letter topics that are not indexed yet.",
              total("redeliver_dlq_index_lag", INSTANCE, "topic", "max")),
        graph("API calls", "Calls of the inspector per second.",
              rate("redeliver_dlq_call_seconds_count", INSTANCE, "method, code"), unit="cps"),
        graph("Refused by limits", "Connections and calls of the inspector's API per second that a limit refused.",
              rate("redeliver_dlq_api_limited_total", INSTANCE, "limit"), unit="cps"),
        graph("Index size", "Size of the inspector's index on disk.",
              total("redeliver_dlq_index_size_bytes", INSTANCE, "instance", "max"), unit="bytes"),
        graph("Watchers", "Clients that watch dead letters.", total("redeliver_dlq_watchers", INSTANCE, "instance")),
        graph("Groups", "Groups of open dead letters that fail for the same reason, by the state of the group.",
              total("redeliver_dlq_groups", INSTANCE, "state", "max"), stacked=True),
        graph("States of groups", "Groups that have a state or a note. From 10,000 on, no others can be resolved, muted or annotated.",
              total("redeliver_dlq_group_states_values", INSTANCE, "instance", "max")),
        graph("Redriven", "Dead letters per second that were redriven, discarded or restored, or tried to be.",
              rate("redeliver_dlq_redrive_items_total", INSTANCE, "kind, outcome"), unit="cps"),
        graph("Redrive jobs", "Redrives, discards and restores that have not ended, by state. Auto-paused: too many records came back.",
              total("redeliver_dlq_redrives", INSTANCE, "state", "max"), stacked=True),
        graph("Scans", "Offsets per second that scans of waiting records and traces read.",
              rate("redeliver_dlq_scanned_offsets_total", INSTANCE, "instance"), unit="cps"),
    ]
    processes = [
        graph("Partitions", "Partitions that the processes own, by consumer group.",
              total("redeliver_lane_partitions", INSTANCE, "group")),
        graph("Setbacks", "Failed transactions, by recovery action.",
              query(f"sum by (remedy) (increase(redeliver_lane_setbacks_total{{{INSTANCE}}}{RATE}))", "{{remedy}}")),
        graph("Commit", "99th percentile of the time from the beginning of a transaction to its commit.",
              *quantiles("redeliver_lane_transaction_seconds", INSTANCE, "group", of=(0.99,)), unit="s"),
        graph("Uptime", "Time since the start of the process.",
              query(f"time() - redeliver_process_start_time_seconds{{{INSTANCE}}}", "{{instance}}"), unit="s"),
        graph("CPU", "CPU seconds per second.",
              query(f"rate(process_cpu_seconds_total{{{INSTANCE}}}{RATE}) {OURS}", "{{instance}}")),
        graph("Memory", "Resident memory.",
              query(f"process_resident_memory_bytes{{{INSTANCE}}} {OURS}", "{{instance}}"), unit="bytes"),
        graph("File descriptors", "Open files and connections, as a share of what the process may have.",
              query(f"process_open_fds{{{INSTANCE}}} / process_max_fds {OURS}", "{{instance}}"), unit="percentunit"),
        graph("Threads", "Threads of the operating system.", query(f"process_threads{{{INSTANCE}}} {OURS}", "{{instance}}")),
        graph("Clock steps", "Steps of the wall clock that exceeded clock.max_step.",
              query(f"sum by (instance, direction) (increase(redeliver_clock_steps_total{{{INSTANCE}}}{RATE}))",
                    "{{instance}} {{direction}}")),
        graph("Problems", "Processes, pipelines or topics with a problem; docs/alerts.md describes each of them.",
              *(query(f"count (redeliver_{metric}{{{INSTANCE}}} {bad}) or vector(0)", legend) for metric, bad, legend in (
                  ("clock_held", "== 1", "clock held"),
                  ("pipeline_refused", "== 1", "pipeline refused"),
                  ("control_readable", "== 0", "control topic unreadable"),
                  ("scheduler_redis_up", "== 0", "no answer of Redis"),
                  ("tls_files_unusable", "== 1", "changed certificate unusable"),
                  ("credentials_stale", "== 1", "changed credentials unusable"),
                  ("dlq_group_states_readable", "== 0", "group states unreadable"),
                  ("dlq_missing_partitions", "> 0", "partitions missing in answers")))),
        graph("Control problems", "Values of the control topic that a process does not know or cannot read. What has an unreadable value is paused.",
              total("redeliver_control_problems", INSTANCE, "instance", "max")),
        table("Builds", "What runs where.",
              f"max by (service, instance, instance_name, version, commit) (redeliver_build_info{{{INSTANCE}}})",
              ["service", "instance", "instance_name", "version", "commit"], width=8),
    ]
    lake = [
        graph("Rows", "Rows per second that the lake appended to its tables.", rate("redeliver_lake_rows_total", INSTANCE, "table"), unit="cps"),
        graph("Not in tables yet", "Records that the lake has not appended, including markers of transactions.",
              total("redeliver_lake_lag_records", INSTANCE, "topic", "max")),
        graph("Appends that failed", "Attempts per second that did not append rows. None of them loses or duplicates rows.",
              rate("redeliver_lake_commits_total", f'{INSTANCE}, outcome!="committed"', "table, outcome"), unit="cps"),
    ]
    return dashboard("overview", "Overview", "The state of all services.", ["instance"], [
        ("Now", now), ("Pipelines", pipelines), ("Tiers", tiers), ("Scheduler", jobs), ("Dead letters", dead_letters),
        ("Processes", processes), ("Lake (optional)", lake)])


def pipeline():
    now = [
        stat("Success rate", "Share of successes among the records that succeeded or became dead letters, in the time range.",
             success_rate(PIPELINE, over=RANGE), "percentunit"),
        stat("Retries per record", "Average number of retries of the records that are done, in the time range.",
             retries_per_record(PIPELINE, over=RANGE)),
        stat("Processing time", "Average duration of an attempt, in the time range.",
             mean("redeliver_worker_handling_seconds", PIPELINE, RANGE), "s"),
        stat("Backlog", "Records that can be processed now: the lag of the source topic and of the due topic.",
             f"sum (redeliver_lane_lag{{{WORKER_LANE}}})"),
        stat("Waiting for a retry", "Records in the tiers.", f"sum (redeliver_lane_lag{{{TIER}, tier!=\"\"}})"),
        stat("Open dead letters", "Of the pipeline's dead-letter topic.",
             f'sum (max by (topic) (redeliver_dlq_open{{topic=~"($pipeline)-dlq"}}))'),
    ]
    attempts = [
        graph("Attempts", "Attempts per second, by outcome.",
              query(f"sum (rate(redeliver_worker_succeeded_total{{{PIPELINE}}}{RATE}))", "succeeded"),
              query(f"sum (rate(redeliver_worker_retried_total{{{PIPELINE}}}{RATE}))", "retried"),
              query(f"sum (rate(redeliver_worker_dead_total{{{PIPELINE}}}{RATE}))", "dead"), unit="cps", stacked=True),
        graph("Failures", "Failed attempts per second, by error class.",
              query(f"sum by (class) (rate(redeliver_worker_retried_total{{{PIPELINE}}}{RATE}))", "retried {{class}}"),
              query(f"sum by (class) (rate(redeliver_worker_dead_total{{{PIPELINE}}}{RATE}))", "dead {{class}}"), unit="cps"),
        graph("Long waits", "Failed attempts per second whose record waits in the scheduler.",
              rate("redeliver_worker_long_waits_total", PIPELINE, "pipeline"), unit="cps"),
        graph("Unusable anchors", "First retries per second that count from the failure, because the record's anchor is missing or not a time.",
              rate("redeliver_worker_unusable_anchors_total", PIPELINE, "pipeline"), unit="cps"),
        graph("Success rate", "Share of successes among the records that succeeded or became dead letters.",
              query(success_rate(PIPELINE, "pipeline"), "{{pipeline}}"), unit="percentunit", most=1),
        graph("Retries per record", "Retries for each record that is done.",
              query(retries_per_record(PIPELINE, "pipeline"), "{{pipeline}}")),
        graph("Processing time", "Duration of an attempt.",
              *quantiles("redeliver_worker_handling_seconds", PIPELINE, "pipeline", of=(0.5, 0.9, 0.99)), unit="s"),
        heatmap("Processing time", "Attempts by duration.", "redeliver_worker_handling_seconds", PIPELINE),
        graph("Processing time by outcome", "Duration of an attempt that succeeded, or failed with this class.",
              *quantiles("redeliver_worker_handling_seconds", PIPELINE, "outcome", of=(0.99,)), unit="s"),
        graph("Attempts per record", "How many attempts records took, on average, until they succeeded or became dead letters.",
              query(mean("redeliver_worker_attempts", PIPELINE, by="outcome"), "{{outcome}}")),
        graph("Records without an attempt in progress", "Records in flight by what they wait for.",
              total("redeliver_worker_waiting_records", PIPELINE, "reason"), stacked=True),
        graph("In flight", "Records that are read and not yet committed, by lane. in_flight limits the sum of the two lanes "
              "with the same number.", total("redeliver_worker_in_flight", PIPELINE, "instance, lane")),
        graph("Circuit breaker", "1 while the breaker of a process is open or half open, because the endpoint fails. Records wait meanwhile.",
              total("redeliver_worker_breaker_open", PIPELINE, "instance, pipeline")),
        graph("Forgotten attempts", "Failed attempts per second that do not count, because the endpoint failed for others too.",
              rate("redeliver_worker_forgotten_total", PIPELINE, "pipeline"), unit="cps"),
        graph("Results that wait for an unavailable topic", "If it is missing, they become dead letters after kafka.topics.missing_timeout.",
              total("redeliver_worker_unavailable_topic_records", PIPELINE, "topic")),
    ]
    calls = [
        graph("Calls", "Calls of the endpoint per second, by the status of the response or the error.",
              rate("redeliver_http_calls_total", PIPELINE, "status"), unit="cps", stacked=True),
        graph("Call duration", "From the start of a call to the end of its response.",
              *quantiles("redeliver_http_call_seconds", PIPELINE, "pipeline"), unit="s"),
        graph("Quick retries", "Calls per second that repeated a failed call of the same attempt.",
              rate("redeliver_http_quick_retries_total", PIPELINE, "pipeline"), unit="cps"),
    ]
    backlog = [
        graph("Backlog by topic", "Records that can be processed now.", total("redeliver_lane_lag", WORKER_LANE, "topic"),
              width=12, stacked=True),
        graph("Backlog by partition", "The ten partitions with the greatest lag.",
              query(f"topk(10, redeliver_lane_lag{{{WORKER_LANE}}})", "{{topic}}/{{partition}}"), width=12),
    ]
    tiers = [
        graph("Waiting", "Records in each tier, including those that are not due yet.",
              query(f"sum by (topic) (redeliver_lane_lag{{{TIER}, tier!=\"\"}})", "{{topic}}"), stacked=True),
        graph("Due", "Due records in the look-ahead that are not released yet: at least this many are due.",
              total("redeliver_tier_due", TIER, "pipeline, tier")),
        graph("Overdue", "Age of the earliest due time that has not been served. Autoscaling uses this signal.",
              total("redeliver_tier_overdue_seconds", TIER, "pipeline, tier", "max"), unit="s"),
        graph("Next due", "Time until the next record in the look-ahead is due. No value: none waits.",
              query(f"min by (pipeline, tier) (redeliver_tier_next_due_seconds{{{TIER}}}) < +Inf", "{{pipeline}} {{tier}}"),
              unit="s"),
        graph("Lateness", "From the due time to the commit that released the record.",
              *quantiles("redeliver_tier_lateness_seconds", TIER, "pipeline, tier"), unit="s"),
        heatmap("Lateness", "Released records by lateness.", "redeliver_tier_lateness_seconds", TIER),
        graph("Released", "Records per second that were released when due.",
              rate("redeliver_tier_released_total", TIER, "pipeline, tier"), unit="cps"),
        graph("Moved and rejected", "Records per second that were moved to a tier that fits the remaining wait, and that became "
              "dead letters, because they are malformed or too large for their return topic.",
              query(f"sum by (tier) (rate(redeliver_tier_moved_total{{{TIER}}}{RATE}))", "{{tier}} moved"),
              query(f"sum by (tier) (rate(redeliver_tier_rejected_total{{{TIER}}}{RATE}))", "{{tier}} rejected"), unit="cps"),
        graph("Look-ahead", "Waiting records in memory.", total("redeliver_tier_held", TIER, "tier, lane")),
    ]

    def lanes(labels):
        return [
            graph("Partitions", "Partitions that the lanes own.", total("redeliver_lane_partitions", labels, "instance, lane")),
            graph("Completed", "Records per second that were completed.",
                  rate("redeliver_lane_completed_total", labels, "instance, lane"), unit="cps"),
            graph("Outputs per transaction", "Records written in a transaction, on average.",
                  query(f"sum by (group) (rate(redeliver_lane_outputs_total{{{labels}}}{RATE})) / "
                        f"sum by (group) (rate(redeliver_lane_transactions_total{{{labels}}}{RATE}))", "{{group}}")),
            graph("Commit", "From the beginning of a transaction to its commit.",
                  *quantiles("redeliver_lane_transaction_seconds", labels, "group"), unit="s"),
            graph("Setbacks", "Failed transactions, by recovery action.",
                  query(f"sum by (lane, remedy) (increase(redeliver_lane_setbacks_total{{{labels}}}{RATE}))",
                        "{{lane}} {{remedy}}")),
            graph("Lost or blocked", "Offsets that were deleted before they were read; partitions whose topic was created again, and "
                  "the records in flight that were dropped; how often a partition was blocked by one record.",
                  query(f"sum (increase(redeliver_lane_deleted_unread_records_total{{{labels}}}{RATE}))", "deleted unread"),
                  query(f"sum (increase(redeliver_lane_dropped_records_total{{{labels}}}{RATE}))", "dropped"),
                  query(f"sum (increase(redeliver_lane_recreated_partitions_total{{{labels}}}{RATE}))", "recreated"),
                  query(f"sum (increase(redeliver_lane_window_full_total{{{labels}}}{RATE}))", "blocked")),
        ]

    return dashboard(
        "pipeline", "Pipeline", "Attempts, retries and dead letters of pipelines.", ["pipeline", "tier", "instance"],
        [("Now", now), ("Attempts", attempts), ("Calls of endpoints", calls), ("Backlog", backlog), ("Tiers", tiers),
         ("Lanes of workers", lanes(WORKER_LANE)), ("Lanes of tiers", lanes(TIER_LANE))])


def scheduler():
    now = [
        stat("Due", "Due jobs in memory that are not dispatched yet: at least this many are due.",
             f"sum (redeliver_scheduler_due{{{INSTANCE}}})"),
        stat("Overdue", "Age of the earliest due time that has not been served.",
             f"max (redeliver_scheduler_overdue_seconds{{{INSTANCE}}})", "s", red_from=30),
        stat("Lateness", "99th percentile of the time from the due time to the commit that dispatched the job, in the time range.",
             f"histogram_quantile(0.99, sum by (le) (rate(redeliver_scheduler_lateness_seconds_bucket{{{INSTANCE}}}{RANGE})))",
             "s"),
        stat("Live shards", "Share of the assigned partitions whose shard dispatches jobs.",
             f"sum (redeliver_scheduler_live_shards{{{INSTANCE}}}) / sum (redeliver_lane_partitions{{{SCHEDULER_LANE}}})",
             "percentunit", green_from=1),
        stat("Not in Redis", "Committed changes that the index does not contain yet.",
             f"sum (redeliver_scheduler_index_behind{{{INSTANCE}}})"),
        stat("Redis memory", "Share of Redis' maxmemory in use; 0 without a limit. From redis.high_water on, jobs are rejected.",
             f"max (redeliver_scheduler_index_memory_share{{{INSTANCE}}})", "percentunit", red_from=0.8),
    ]
    commands = [
        graph("Commands", "Commands per second, by outcome. conflict, rejected, no_room and over_quota become dead letters.",
              rate("redeliver_scheduler_commands_total", INSTANCE, "outcome"), unit="cps"),
        graph("Received", "Records per second that were read from the ingest topic.",
              rate("redeliver_scheduler_received_total", INSTANCE, "instance"), unit="cps", stacked=True),
        graph("Unread commands", "Lag of the ingest topic.",
              query(f'sum by (topic) (redeliver_lane_lag{{{READY}, pipeline=""}})', "{{topic}}")),
        graph("Too old timestamps", "Commands per second whose timestamp is older than kafka.topics.retention. A delay in them counts from now.",
              rate("redeliver_scheduler_too_old_timestamps_total", INSTANCE), unit="cps"),
        graph("Refused by limits", "Connections and requests of the job API per second that a limit refused.",
              rate("redeliver_scheduler_api_limited_total", INSTANCE, "limit"), unit="cps"),
    ]
    jobs = [
        graph("Ended", "Jobs per second. Dead jobs became dead letters, because their topic did not exist.",
              rate("redeliver_scheduler_jobs_ended_total", INSTANCE, "outcome"), unit="cps"),
        graph("Forgotten", "Ended jobs per second that were forgotten after scheduler.keep_ended.",
              rate("redeliver_scheduler_jobs_forgotten_total", INSTANCE), unit="cps"),
        graph("Next due", "Time until the next job in memory is due. No value: none is due within scheduler.window.",
              query(f"min (redeliver_scheduler_next_due_seconds{{{INSTANCE}}}) < +Inf", "next due"), unit="s"),
        graph("Due", "Due jobs in memory that are not dispatched yet: at least this many are due.",
              total("redeliver_scheduler_due", INSTANCE, "instance"), stacked=True),
        graph("Overdue", "Age of the earliest due time that has not been served.",
              total("redeliver_scheduler_overdue_seconds", INSTANCE, "instance", "max"), unit="s"),
        graph("Lateness", "From the due time to the commit that dispatched the job.",
              *quantiles("redeliver_scheduler_lateness_seconds", INSTANCE, of=(0.5, 0.99, 0.999)), unit="s"),
        heatmap("Lateness", "Dispatched jobs by lateness.", "redeliver_scheduler_lateness_seconds", INSTANCE),
        graph("Jobs that wait for an unavailable topic", "If it is missing, they become dead letters after kafka.topics.missing_timeout.",
              total("redeliver_scheduler_unavailable_topic_jobs", INSTANCE, "app, topic")),
        graph("Unavailable topics", "How long the topic of an application has been missing or unwritable.",
              total("redeliver_scheduler_unavailable_topic_seconds", INSTANCE, "app, topic", "max"), unit="s"),
        graph("Occurrences", "Occurrences of recurring schedules per second. The job of a postponed one cannot be created; it is tried again within a minute.",
              rate("redeliver_scheduler_occurrences_total", INSTANCE, "outcome"), unit="cps"),
        graph("Rate-limited jobs", "Due jobs in memory that exceed the rate of their application: at least this many.",
              total("redeliver_scheduler_rate_limited_jobs", INSTANCE, "app")),
        graph("Jobs of paused applications", "Due jobs that wait because their application is paused.",
              total("redeliver_scheduler_paused_jobs", INSTANCE, "app")),
    ]
    index = [
        graph("Jobs in memory", "Jobs that are due within scheduler.window.",
              total("redeliver_scheduler_window_jobs", INSTANCE, "instance, lane"), stacked=True),
        graph("Not in Redis", "Committed changes that the index does not contain yet.",
              total("redeliver_scheduler_index_behind", INSTANCE, "instance, lane"), stacked=True),
        graph("Shards", "Assigned partitions, and those whose shard dispatches jobs.",
              query(f"sum by (instance) (redeliver_lane_partitions{{{SCHEDULER_LANE}}})", "{{instance}} assigned"),
              query(f"sum by (instance) (redeliver_scheduler_live_shards{{{INSTANCE}}})", "{{instance}} live")),
        graph("Redis memory", "Share of Redis' maxmemory in use; 0 without a limit. From redis.high_water on, jobs are rejected.",
              total("redeliver_scheduler_index_memory_share", INSTANCE, function="max"), unit="percentunit", most=1),
    ]
    lanes = [
        graph("Commit", "From the beginning of a transaction to its commit.",
              *quantiles("redeliver_lane_transaction_seconds", SCHEDULER_LANE), unit="s"),
        graph("Outputs per transaction", "Records written in a transaction, on average.",
              query(f"sum (rate(redeliver_lane_outputs_total{{{SCHEDULER_LANE}}}{RATE})) / "
                    f"sum (rate(redeliver_lane_transactions_total{{{SCHEDULER_LANE}}}{RATE}))", "outputs")),
        graph("Setbacks", "Failed transactions, by recovery action.",
              query(f"sum by (remedy) (increase(redeliver_lane_setbacks_total{{{SCHEDULER_LANE}}}{RATE}))", "{{remedy}}")),
    ]
    return dashboard("scheduler", "Scheduler", "Jobs, their commands, and the index in Redis.", ["instance"], [
        ("Now", now), ("Commands", commands), ("Jobs", jobs), ("Index", index), ("Lanes", lanes)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="verify that the files are up to date; write nothing")
    arguments = parser.parse_args()
    outdated = []
    for build in (overview, pipeline, scheduler):
        path = FOLDER / f"{build.__name__}.json"
        text = json.dumps(build(), indent=2) + "\n"
        if not arguments.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            outdated.append(path)
    for path in outdated:
        print(f"{path} is not up to date; run {Path(__file__).name}", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
