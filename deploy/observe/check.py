#!/usr/bin/env python3
"""Checks the alert rules and dashboards.

- Every metric and label that they name exists in a scrape of the services. Pass the scrapes as files or as URLs of
  /metrics; together they must cover all services. Call the inspector before: it counts its calls from the first one on.
  Metrics that only some configurations have may be missing.
- Every alert has a section in docs/alerts.md, with a row for each value of its label `cause`, a test in which it fires and
  one in which it does not.
- The dashboards are up to date with dashboards.py, and promtool can parse their queries.
- With --prometheus, every query of the dashboards returns data from that Prometheus, and it evaluates the rules without
  errors.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
RULES = HERE / "rules.yml"
TESTS = HERE / "rules_test.yml"
DASHBOARDS = sorted((HERE / "dashboards").glob("*.json"))
RUNBOOKS = HERE.parent.parent / "docs" / "alerts.md"

METRIC = re.compile(r"\b((?:redeliver[_:]|process_)[a-zA-Z0-9_:]+)\s*(\{[^}]*\})?")
GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")
# Prometheus adds these labels.
TARGET_LABELS = {"job", "instance"}
# Processes expose these only with kafka.login.
CONDITIONAL = {"redeliver_kafka_token_expiry_timestamp_seconds", "redeliver_kafka_token_failures_total"}
VARIABLES = {"__rate_interval": "2m", "__interval": "1m", "__range": "15m"}
# What the variables of the dashboards are without a selection.
ALL = ".*"


# The files


def rules():
    """The alerts, each with its expression and the link to its runbook, and the recording rules."""
    alerts, records = {}, {}
    for text in re.split(r"^      - (?=alert:|record:)", RULES.read_text(), flags=re.MULTILINE)[1:]:
        kind, name = re.match(r"(alert|record): (\S+)", text).groups()
        expr = re.search(r"^        expr: (?:[>|]-\n((?:^(?: {10}.*)?\n)+)|(.+)\n)", text, flags=re.MULTILINE)
        if expr is None:
            sys.exit(f"{RULES}: {name} has no expression in a form that this program understands")
        expr = expr[1] or expr[2]
        if kind == "alert":
            runbook = re.search(r"^          runbook_url: (\S+)$", text, flags=re.MULTILINE)
            alerts[name] = expr, runbook and runbook[1]
        else:
            records[name] = expr
    return alerts, records


def tested_alerts():
    """The alerts that fire in a test, and those that do not fire in a test."""
    firing, silent = set(), set()
    for text in TESTS.read_text().split("alertname: ")[1:]:
        name = re.match(r"\w+", text)[0]
        (firing if re.search(r"^\s+exp_alerts:\s*$", text, flags=re.MULTILINE) else silent).add(name)
    return firing, silent


def dashboard_queries():
    """The queries of all dashboards, each with its place and whether it may return nothing."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.name}: variable {variable['name']}", variable["definition"], False
        for annotation in dashboard["annotations"]["list"]:
            yield f"{path.name}: annotation {annotation['name']}", annotation["expr"], True
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"], False


def without_strings(expr):
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)


def selectors(expr):
    """The metrics of an expression, each with the labels that it selects."""
    for name, labels in METRIC.findall(without_strings(expr)):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))


def grouping_labels(expr):
    for labels in GROUPING.findall(without_strings(expr)):
        yield from (label.strip() for label in labels.split(",") if label.strip())


# Scrapes


class Scrape:
    """The metrics of some processes and their labels."""

    def __init__(self):
        self.labels = {}
        self.empty = set()

    def add(self, source):
        for line in fetch(source).splitlines():
            if line.startswith("# TYPE "):
                family, kind = line.split()[2:4]
                for name in series_of(family, kind):
                    self.labels.setdefault(name, set())
            elif line and not line.startswith("#"):
                name = re.match(r"[a-zA-Z_:][a-zA-Z0-9_:]*", line)[0]
                labels = re.search(r"\{(.*)\}", line)
                found = re.findall(r'(\w+)="', labels[1]) if labels else []
                self.labels.setdefault(name, set()).update(found, TARGET_LABELS)


def series_of(family, kind):
    if kind == "histogram":
        return [f"{family}_bucket", f"{family}_sum", f"{family}_count"]
    if kind == "counter" and not family.endswith("_total"):
        return [f"{family}_total"]
    return [family]


def fetch(source):
    if "://" not in source:
        return Path(source).read_text()
    with urllib.request.urlopen(source, timeout=10) as answer:
        return answer.read().decode()


# Checks


def check_texts(alerts):
    sections = {text.split("\n", 1)[0].strip(): text for text in re.split(r"^#+ ", RUNBOOKS.read_text(), flags=re.MULTILINE)}
    headings = set(sections)
    firing, silent = tested_alerts()
    for name, (expr, runbook) in alerts.items():
        if name not in headings:
            yield f"{name} has no section in {RUNBOOKS.name}"
        causes = set(re.findall(r'"cause", "([^"]+)"', expr))
        rows = set(re.findall(r"^\| `([^`]+)`", sections.get(name, ""), flags=re.MULTILINE))
        for cause in sorted(causes ^ rows):
            yield f"{name}: {RUNBOOKS.name} and {RULES.name} differ in the cause {cause}"
        if runbook is None or not runbook.endswith(f"docs/alerts.md#{name.lower()}"):
            yield f"{name} has the runbook_url {runbook}; expected docs/alerts.md#{name.lower()}"
        if name not in firing:
            yield f"{name} fires in no test"
        if name not in silent:
            yield f"{name} is silent in no test"
    for name in sorted(headings | firing | silent):
        if name.startswith("Redeliver") and name.isalpha() and name not in alerts and name != "Redeliver":
            yield f"{name} has a section or a test, but is not an alert"


def check_names(scrape, records, queries):
    """`scrape` is None if none was given: then only the names of recording rules are checked."""
    without_samples = set()
    for place, expr in queries:
        known = set(TARGET_LABELS)
        for name, labels in selectors(expr):
            if ":" in name:
                if name not in records:
                    yield f"{place}: no rule records {name}"
                else:
                    known |= set(grouping_labels(records[name]))
                continue
            if scrape is None:
                continue
            if name not in scrape.labels and name in CONDITIONAL:
                print(f"note: no process exposes {name}; some configurations do not have it")
                known |= labels
                continue
            if name not in scrape.labels:
                yield f"{place}: no process exposes {name}"
                continue
            existing = scrape.labels[name]
            if not existing:
                without_samples.add(name)
                known |= labels | set(grouping_labels(expr))
                continue
            known |= existing
            for label in sorted(labels - existing):
                yield f"{place}: {name} has no label {label}"
        if scrape is not None and "redeliver" in without_strings(expr):
            for label in sorted(set(grouping_labels(expr)) - known):
                yield f"{place}: no metric of the query has the label {label}"
    for name in sorted(without_samples):
        print(f"note: {name} has no samples in the scrapes, so its labels were not checked")


def check_syntax(queries):
    exprs = [re.sub(r"^label_values\((.+), \w+\)$", r"\1", expr) for _, expr, _ in queries]
    rules = [{"record": f"query_{number}", "expr": interpolated(expr)} for number, expr in enumerate(exprs)]
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump({"groups": [{"name": "queries", "rules": rules}]}, file)
        file.flush()
        command = ["promtool", "check", "rules", "--lint=none", file.name]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode:
        yield f"a query of the dashboards: {checked.stderr.strip()}"


def check_prometheus(url, queries):
    def get(path, **parameters):
        address = f"{url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"], None
        except urllib.error.HTTPError as error:
            return None, json.load(error)["error"]

    for place, expr, may_be_empty in queries:
        variable = re.fullmatch(r"label_values\((.+), (\w+)\)", expr)
        if variable:
            data, error = get(f"label/{variable[2]}/values", **{"match[]": variable[1]})
            values = data
        else:
            data, error = get("query", query=interpolated(expr))
            values = data and [sample["value"][1] for sample in data["result"]]
        if error:
            yield f"{place}: {error}: {expr}"
        elif not values and not may_be_empty:
            yield f"{place}: no data: {expr}"
        elif values and all(value == "NaN" for value in values):
            yield f"{place}: only NaN: {expr}"
    data, error = get("rules")
    if error:
        yield f"rules: {error}"
        return
    for group in data["groups"]:
        for rule in group["rules"]:
            if rule.get("lastError"):
                yield f"rule {rule['name']}: {rule['lastError']}"


def interpolated(expr):
    def value(match):
        return VARIABLES.get(match[1], ALL)
    return re.sub(r"\$\{?(\w+)\}?", value, expr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scrapes", nargs="*", metavar="SCRAPE", help="a file, or a URL such as http://localhost:9464/metrics")
    parser.add_argument("--prometheus", metavar="URL", help="run the queries of the dashboards, such as http://localhost:9090")
    arguments = parser.parse_args()

    alerts, records = rules()
    queries = list(dashboard_queries())
    scrape = Scrape() if arguments.scrapes else None
    for source in arguments.scrapes:
        try:
            scrape.add(source)
        except OSError as error:
            sys.exit(f"error: cannot read {source}: {error}")

    problems = list(check_texts(alerts))
    named = [(f"{RULES.name}: {name}", expr) for name, (expr, _) in alerts.items()]
    named += [(f"{RULES.name}: {name}", expr) for name, expr in records.items()]
    named += [(place, expr) for place, expr, _ in queries]
    problems += check_names(scrape, records, named)
    if subprocess.run([sys.executable, HERE / "dashboards.py", "--check"], check=False).returncode:
        problems.append("the dashboards are not up to date")
    problems += check_syntax(queries)
    if arguments.prometheus:
        try:
            problems += check_prometheus(arguments.prometheus, queries)
        except OSError as error:
            sys.exit(f"error: cannot query {arguments.prometheus}: {error}")

    for problem in problems:
        print(problem, file=sys.stderr)
    checked = f"{len(alerts)} alerts, {len(records)} recording rules, {len(queries)} queries of {len(DASHBOARDS)} dashboards"
    print(f"{checked}: {len(problems)} problems" if problems else f"{checked}: OK")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
