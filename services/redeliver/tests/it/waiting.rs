//! `redeliver waiting` and `redeliver trace` of pipelines that run.

use std::collections::BTreeSet;

use redeliver_core::HumanDuration;
use redeliver_testkit::{Reply, ensure, eventually, until_seen};
use serde_json::{Value, json};

use crate::services::Services;
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent, words};

/// Produces records, and returns them in order.
fn produce(services: &Services, bodies: &[&str]) -> Vec<Sent> {
    let drafts = bodies
        .iter()
        .map(|body| Draft::new(format!("key-{body}"), body.to_string()).header("tenant", b"x"));
    services.pipe.produce(drafts.collect())
}

/// Waits until the audit counts this many records in tiers and with the scheduler.
#[track_caller]
fn until_waiting(services: &Services, in_tiers: u64, in_scheduler: u64) {
    eventually("the audit counts the records", DEADLINE, || {
        let report = services.pipe.audit();
        let waiting = (
            report.waiting.in_tiers,
            report.waiting.in_scheduler,
            report.waiting.in_source + report.waiting.in_due,
        );
        ensure(waiting == (in_tiers, in_scheduler, 0), report.to_string())
    });
}

/// The numbers of records by place.
fn places(stats: &Value) -> Vec<(String, u64)> {
    let places = stats["places"].as_array().unwrap().iter();
    let place = |place: &Value| {
        let name = place["place"].as_str().unwrap();
        (name.to_owned(), place["records"].as_u64().unwrap())
    };
    places.map(place).collect()
}

#[test]
fn scan_counts_what_audit_counts() {
    let services = Services::new("waiting");
    let _inspector = services.inspect();
    let _enricher = services.pipe.enricher("a");
    let bodies = ["busy-1", "later-1", "busy-2", "later-2", "busy-3", "fine"];
    let sent = produce(&services, &bodies);
    // Neither a retry tier nor a scheduler runs, so that long waits are commands.
    until_waiting(&services, 3, 2);
    let tier = services.pipe.pipeline.policy.tiers()[0].to_string();
    let stats = |arguments: &[&str]| services.json(&[&["waiting", "stats"], arguments].concat());
    let all = stats(&[]);
    let expected = [(tier.clone(), 3), ("scheduler".to_owned(), 2)];
    assert_eq!(places(&all), expected, "{all}");
    assert_eq!(all["total"]["records"], 5);
    assert_eq!(all["total"]["max_attempts"], 1);
    // Records that are throttled have no failed attempt.
    let average = all["total"]["average_attempts"].as_f64().unwrap();
    assert!((average - 0.6).abs() < 1e-9, "{all}");
    let codes = json!([
        { "error_code": "http.503", "records": 3 },
        { "error_code": "http.429", "records": 2 },
    ]);
    assert_eq!(all["total"]["codes"], codes);
    assert_eq!(
        places(&stats(&["--error-code", "http.429"])),
        [("scheduler".to_owned(), 2)]
    );
    assert_eq!(
        places(&stats(&["--more-attempts-than", "0"])),
        [(tier.clone(), 3)]
    );
    assert_eq!(places(&stats(&["--older-than", "1h"])), []);
    assert_eq!(places(&stats(&["--older-than", "1ms"])), expected);
    assert_eq!(places(&stats(&["--place", &tier])), [(tier.clone(), 3)]);
    assert_eq!(
        places(&stats(&["--origin", &sent[1].position.to_string()])),
        [("scheduler".to_owned(), 1)]
    );

    let list = services.json(&["waiting", "ls"]);
    let records = list["records"].as_array().unwrap();
    let dues: Vec<&str> = records
        .iter()
        .map(|record| record["due_at"].as_str().unwrap())
        .collect();
    assert_eq!((dues.len(), list["matching"].as_u64()), (5, Some(5)));
    assert!(dues.is_sorted(), "{dues:?}");
    assert!(!list.to_string().contains("tenant"), "{list}");
    let listed = [
        "waiting",
        "ls",
        "--place",
        &tier,
        "--pipeline",
        services.pipe.name(),
    ];
    let table = services.cli(&listed);
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(
        table.contains("http.503") && table.contains("key-busy-1"),
        "{table}"
    );
    let attempts = |sort: &str| -> Vec<u64> {
        let list = services.json(&["waiting", "ls", "--sort", sort]);
        let records = list["records"].as_array().unwrap().iter();
        records
            .map(|record| record["attempts"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(attempts("attempts"), [1, 1, 1, 0, 0]);
    let list = services.json(&["waiting", "ls", "--sort", "age"]);
    let records = list["records"].as_array().unwrap();
    assert!(
        records.is_sorted_by_key(|record| record["origin_timestamp"].as_str()),
        "{list}"
    );
    let lines = services.cli(&["waiting", "stats", "-o", "jsonl"]);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    let limited = services.pipe.redeliver(&["waiting", "ls", "--limit", "2"]);
    assert_eq!(limited.stdout.lines().count(), 3);
    assert_eq!(
        limited.stderr,
        "5 records match; these are the 2 that are due first\n"
    );
    services.fails(1, &["waiting", "stats", "--pipeline", "unknown"]);

    // As jobs, they still are the same records.
    let _scheduler = services.pipe.scheduler("a");
    let (_, topics) = services.pipe.jobs.as_ref().unwrap();
    let states = || services.pipe.read(std::slice::from_ref(&topics.state)).len();
    until_seen("the long waits are jobs", states, |&count| count >= 2);
    until_waiting(&services, 3, 2);
    assert_eq!(places(&stats(&[])), expected);
    // Released records do not wait any more, although the tier still contains them.
    let _tier = services.pipe.retry_tier("a");
    until_waiting(&services, 0, 2);
    assert_eq!(places(&stats(&[])), [("scheduler".to_owned(), 2)]);
}

#[test]
fn upcoming_shows_all_that_waits() {
    let services = Services::new("upcoming");
    let (_scheduler, _inspector) = (services.pipe.scheduler("a"), services.inspect());
    let _enricher = services.pipe.enricher("a");
    services.cli(&words("pause app/demo --reason test"));
    services.cli(&words("jobs schedule --app demo --at 20m"));
    services.cli(&words("jobs schedule --app demo --in 5h"));
    services.cli(&words(
        "schedules create weekly --app demo --every 7d --start 100m",
    ));
    produce(&services, &["later", "busy"]);
    // No retry tier runs.
    until_waiting(&services, 1, 1);
    let [scheduler, tier] = ["scheduler", &services.pipe.pipeline.policy.tiers()[0].to_string()]
        .map(|place| format!("{}/{place}", services.pipe.name()));
    let expected = json!([
        ["retries", tier, 1, 0, null],
        ["jobs", "demo", 0, 1, "paused"],
        ["retries", scheduler, 0, 1, null],
        ["schedule", "weekly", 0, 1, null]
    ]);
    eventually("all is upcoming", DEADLINE, || {
        let rows = services.json(&words("upcoming --for 2h"));
        let row = |row: &Value| ["what", "name", "due", "upcoming", "problem"].map(|name| row[name].clone());
        let shown = json!(rows.as_array().unwrap().iter().map(row).collect::<Vec<_>>());
        ensure(shown == expected, rows.to_string())
    });
    let table = services.cli(&words("upcoming --for 30m"));
    assert_eq!(table.lines().count(), 3, "{table}");
}

#[test]
fn trace_shows_life_of_record() {
    let services = Services::new("trace");
    let _inspector = services.inspect();
    let (_enricher, _tier) = (services.pipe.enricher("a"), services.pipe.retry_tier("a"));
    let _scheduler = services.pipe.scheduler("a");
    let sent = produce(&services, &["hopeless", "shaky", "later"]);
    until_waiting(&services, 0, 1);
    let tier = services.pipe.pipeline.policy.tiers()[0].to_string();
    let trace = |position: &str| {
        let traces = services.json(&["trace", position]);
        let traces = traces.as_array().unwrap();
        assert_eq!(traces.len(), 1, "{traces:?}");
        traces[0].clone()
    };
    let steps = |trace: &Value| -> Vec<(String, String, u64)> {
        let steps = trace["steps"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        steps
            .map(|step| {
                (
                    text(&step["event"]),
                    text(&step["place"]),
                    step["attempts"].as_u64().unwrap(),
                )
            })
            .collect()
    };
    let step = |event: &str, place: &str, attempts| (event.to_owned(), place.to_owned(), attempts);

    let recovered = trace(&sent[1].position.to_string());
    let expected = [
        step("entered", "source", 0),
        step("waits", &tier, 1),
        step("released", "due", 1),
        step("succeeded", "output", 1),
    ];
    assert_eq!(steps(&recovered), expected, "{recovered}");
    assert_eq!(recovered["outcome"], "succeeded");

    let waits = trace(&sent[2].position.to_string());
    let expected = [step("entered", "source", 0), step("waits", "scheduler", 0)];
    assert_eq!(steps(&waits), expected, "{waits}");
    assert_eq!(waits["outcome"], "waits");
    assert_eq!(waits["next_due"], waits["steps"][1]["due_at"]);
    assert_eq!(waits["steps"][1]["error_class"], "throttled");
    // The answer of the endpoint is the least; jitter is added.
    let wait: HumanDuration = waits["steps"][1]["wait"].as_str().unwrap().parse().unwrap();
    assert!(wait >= HumanDuration::from_secs(3_600), "{waits}");
    let listed = services.json(&["waiting", "ls"]);
    let position = listed["records"][0]["position"].as_str().unwrap();
    assert_eq!(trace(position), waits, "from the position in the state topic");

    // An offset that was never written was not removed by retention.
    let source = &sent[0].position.topic;
    for (position, says) in [
        ("99/1", "the topic has"),
        ("0/999999999", "the partition ends at"),
    ] {
        let never = services.fails(1, &["trace", &format!("{source}/{position}")]);
        assert!(never.stderr.contains(says), "{never:?}");
    }

    let text = services.cli(&["trace", &sent[0].position.to_string()]);
    assert!(
        text.contains("permanent http.404") && text.contains("now        dead"),
        "{text}"
    );
    assert!(!text.contains("tenant"), "{text}");

    // By what is in them.
    let find = |arguments: &[&str]| {
        let printed = services
            .pipe
            .redeliver(&[&["trace", "-o", "json"], arguments].concat());
        assert_eq!(printed.code, Some(0), "{printed:?}");
        let found = json_of(&printed.stdout);
        let record = |record: &Value| {
            ["outcome", "place", "origin"].map(|name| record[name].as_str().unwrap_or_default().to_owned())
        };
        let records = found["records"].as_array().unwrap();
        records.iter().map(record).collect::<BTreeSet<_>>()
    };
    let record = |outcome: &str, place: &str, sent: &Sent| {
        [outcome, place, &sent.position.to_string()].map(str::to_owned)
    };
    let all = BTreeSet::from([
        record("dead", "dead-letters", &sent[0]),
        record("succeeded", "output", &sent[1]),
        record("waits", "scheduler", &sent[2]),
    ]);
    let found = || find(&["--header", "tenant=x", "-p", services.pipe.name()]);
    until_seen("all records are found", found, |found| *found == all);
    for (key, record) in ["key-hopeless", "key-shaky", "key-later"].into_iter().zip(&all) {
        assert_eq!(
            find(&["--key", key, "--since", "1h"]),
            BTreeSet::from([record.clone()])
        );
    }
    assert!(find(&["--field", "/id=1"]).is_empty());
    let table = services.pipe.redeliver(&["trace", "--key", "key-later"]).stdout;
    assert!(
        table.contains("waits") && table.contains("\nsearched since "),
        "{table}"
    );

    let unknown = services.fails(1, &["trace", "no-such-topic/0/0"]);
    assert!(
        unknown.stderr.contains("no pipeline reads or writes the topic"),
        "{unknown:?}"
    );
    let beyond = format!("{}/0/999999", services.pipe.pipeline.dead_letter_topic());
    let gone = services.fails(1, &["trace", &beyond]);
    assert!(gone.stderr.contains("there is no record at"), "{gone:?}");
}

#[track_caller]
fn json_of(printed: &str) -> Value {
    serde_json::from_str(printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

/// A pipeline with an inspector that redrives.
struct Redriven {
    pipe: Pipe,
    server: String,
}

impl Redriven {
    #[track_caller]
    fn run(&self, arguments: &[&str]) -> String {
        self.run_for(arguments, &[0])
    }

    #[track_caller]
    fn run_for(&self, arguments: &[&str], codes: &[i32]) -> String {
        let printed = self
            .pipe
            .redeliver(&[arguments, &["--server", &self.server]].concat());
        assert!(
            printed.code.is_some_and(|code| codes.contains(&code)),
            "{printed:?}"
        );
        printed.stdout
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        json_of(&self.run(&[arguments, &["-o", "json"]].concat()))
    }

    /// Waits until the trace of a record has this outcome and number of steps.
    #[track_caller]
    fn until(&self, position: &str, outcome: &str, steps: usize) -> Value {
        eventually(&format!("{position} is {outcome}"), DEADLINE, || {
            let trace = self.json(&["trace", position])[0].clone();
            let count = trace["steps"].as_array().map_or(0, Vec::len);
            ensure(trace["outcome"] == outcome && count == steps, trace.clone()).map(|()| trace)
        })
    }

    /// Waits until the index has exactly this open dead letter, the last step of a trace.
    #[track_caller]
    fn until_open(&self, trace: &Value) -> String {
        let steps = trace["steps"].as_array().unwrap();
        let id = steps.last().unwrap()["position"].as_str().unwrap();
        eventually(&format!("{id} is open"), DEADLINE, || {
            let list = self.json(&["dlq", "ls", "--filter", "state = OPEN"]);
            let letters = list["dead_letters"].as_array().unwrap();
            match &letters[..] {
                [letter] if letter["id"] == id => Ok(id.to_owned()),
                _ => Err(list),
            }
        })
    }
}

#[test]
fn trace_follows_record_through_redrives() {
    let pipe = PipeBuilder::new("redriven")
        .with_inspector()
        .tiers(&[300])
        // The first life begins with an error that is worth a retry.
        .behave(|request| match request.earlier_calls_of_body {
            0 => Reply::status(503),
            1 | 2 => Reply::status(422),
            _ => Reply::ok(request.body.clone()),
        })
        .create();
    let _services = ["enricher", "retry-tier"].map(|service| pipe.start(service, "a", &[]));
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let server = format!("http://{}", inspector.word_after(" api="));
    let redriven = Redriven { pipe, server };
    let (pipe, name) = (&redriven.pipe, redriven.pipe.name());
    let draft = Draft::new("key-secret", "body-secret").header("tenant", b"user-secret");
    let sent = pipe.produce(vec![draft]);
    let position = sent[0].position.to_string();
    let tier = pipe.pipeline.policy.tiers()[0].to_string();
    let redrive = |died: &Value, reason: &str, more: &[&str]| {
        redriven.until_open(died);
        let command = words("dlq redrive --all --yes --all-at-once --observe 0s --reason");
        // The job may know already that its record has come back.
        let printed = redriven.run_for(
            &[&command[..], &[reason], more, &["-o", "json"]].concat(),
            &[0, 3],
        );
        let job = json_of(&printed);
        assert_eq!(job["done"], 1, "{job}");
        job["id"].as_str().unwrap().to_owned()
    };
    let first = redriven.until(&position, "dead", 4);
    let one = redrive(&first, "too early", &[]);
    let second = redriven.until(&position, "dead", 6);
    // To the source, in which nothing but new records would be otherwise.
    let other = redrive(&second, "INC-17 is over", &["--destination", name]);
    let last = redriven.until(&position, "succeeded", 8);

    let steps = last["steps"].as_array().unwrap();
    let shown: Vec<Value> = steps
        .iter()
        .map(|step| {
            let names = words("event place attempts redrives error_code redrive_id reason");
            Value::from_iter(names.into_iter().map(|name| step[name].clone()))
        })
        .collect();
    let expected = json!([
        ["entered", "source", 0, 0, null, null, null],
        ["waits", tier, 1, 0, "http.503", null, null],
        ["released", "due", 1, 0, null, null, null],
        ["died", "dead-letters", 2, 0, "http.422", null, null],
        ["redriven", "due", 0, 1, null, one, "too early"],
        ["died", "dead-letters", 1, 1, "http.422", null, null],
        ["redriven", "source", 0, 2, null, other, "INC-17 is over"],
        ["succeeded", "output", 0, 2, null, null, null],
    ]);
    assert_eq!(Value::from(shown), expected, "{last}");
    assert!(steps.iter().all(|step| step["time"].is_string()), "{last}");
    assert_eq!(last["gaps"], json!([]));
    assert!(
        steps[1]["due_at"].is_string() && steps[1]["wait"] == *tier,
        "{last}"
    );
    // From the copy of another life, it is the same record.
    let copy = steps[5]["position"].as_str().unwrap();
    assert_eq!(redriven.json(&["trace", copy])[0], last, "{copy}");

    let text = redriven.run(&["trace", &position]);
    let events: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with("TIME"))
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    let expected = words("entered waits released died redriven died redriven succeeded");
    assert_eq!(events[..8], expected, "{text}");
    for part in [
        "now        succeeded".to_owned(),
        format!("job {one} by "),
        ": too early".to_owned(),
        format!("job {other} by "),
        ": INC-17 is over".to_owned(),
        "permanent http.422".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}\n{text}");
    }
    assert!(![text, last.to_string()].concat().contains("secret"), "{last}");
    inspector.shut_down();
}
