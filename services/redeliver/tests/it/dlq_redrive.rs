//! `redeliver dlq redrive`, `discard`, `restore` and `redrives`, with an endpoint that fails and then works.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::{CommandOutput, Reply, Request, ServiceProcess, eventually};
use serde_json::Value;

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, records};

/// A pipeline with an inspector that accepts edits, and its commands.
struct Cli {
    pipe: Pipe,
    server: String,
    inspector: ServiceProcess,
    _services: [ServiceProcess; 2],
}

impl Cli {
    fn start(name: &str, endpoint: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::of(PipeBuilder::new(name), endpoint)
    }

    fn of(builder: PipeBuilder, endpoint: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let pipe = builder
            .with_inspector()
            .set("dlq_inspector.redrive.edit", "true")
            .behave(endpoint)
            .create();
        let services = ["enricher", "retry-tier"].map(|service| pipe.start(service, "a", &[]));
        let mut inspector = pipe.start("dlq-inspector", "a", &[]);
        Self {
            server: format!("http://{}", inspector.word_after(" api=")),
            pipe,
            inspector,
            _services: services,
        }
    }

    fn dlq(&self, arguments: &[&str]) -> CommandOutput {
        let server = ["--server", &self.server, "-o", "json"];
        self.pipe.redeliver(&[&["dlq"], arguments, &server[..]].concat())
    }

    /// The JSON that a command prints with this exit status.
    #[track_caller]
    fn json(&self, status: i32, arguments: &[&str]) -> Value {
        let printed = self.dlq(arguments);
        assert_eq!(printed.code, Some(status), "{printed:?}");
        serde_json::from_str(&printed.stdout).unwrap_or_else(|error| panic!("{error}: {printed:?}"))
    }

    /// Waits until this many dead letters are in this state.
    #[track_caller]
    fn until(&self, state: &str, count: usize) {
        eventually(&format!("{count} dead letters are {state}"), DEADLINE, || {
            let filter = format!("state = {state}");
            let printed = self.dlq(&["ls", "--filter", &filter, "--limit", "1000"]);
            let list: Value = serde_json::from_str(&printed.stdout).unwrap_or_default();
            match list["dead_letters"].as_array().map_or(0, Vec::len) {
                found if found == count => Ok(()),
                found => Err(format!("{found}\n{printed:?}")),
            }
        });
    }
}

#[test]
fn dead_letters_return_to_their_pipeline_once_the_cause_is_fixed() {
    let works = Arc::new(AtomicBool::new(false));
    let endpoint_works = works.clone();
    let mut cli = Cli::start("dlq-redrive", move |request| {
        match endpoint_works.load(Ordering::SeqCst) {
            true => Reply::ok(request.body.clone()),
            false => Reply::status(422),
        }
    });
    let pipe = &cli.pipe;
    let sent = pipe.produce(records(40));
    pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 40);

    // Without a terminal, nothing is done without --yes.
    let refused = cli.dlq(&["redrive", "--all"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("--yes"), "{refused:?}");
    let plan = cli.json(0, &["redrive", "--all", "--plan"]);
    assert_eq!((&plan["state"], &plan["total"]), (&"planned".into(), &40.into()));

    // The endpoint still fails: the first ten come back, and the brake pauses the rest.
    let braked = cli.json(
        3,
        &[
            "redrive",
            "--all",
            "--yes",
            "--why",
            "too early",
            "--observe",
            "8s",
        ],
    );
    assert_eq!(
        (&braked["state"], &braked["done"]),
        (&"paused".into(), &10.into()),
        "{braked}"
    );
    assert_eq!(braked["returned"], 10, "{braked}");
    let id = braked["id"].as_str().unwrap();
    assert_eq!(cli.json(0, &["redrives", "cancel", id])["state"], "cancelled");
    // Two dead letters are not to be redriven.
    cli.until("OPEN", 40);
    let ids: Vec<String> = (0..2)
        .map(|number| {
            let filter = format!("state = OPEN AND headers.redrive-id = {id}");
            let list = cli.json(0, &["ls", "--filter", &filter]);
            list["dead_letters"][number]["id"].as_str().unwrap().to_owned()
        })
        .collect();
    let discarded = cli.json(
        0,
        &[
            "discard", "--id", &ids[0], "--id", &ids[1], "--yes", "--why", "test",
        ],
    );
    assert_eq!(
        (&discarded["kind"], &discarded["done"]),
        (&"discard".into(), &2.into())
    );
    cli.until("DISCARDED", 2);

    works.store(true, Ordering::SeqCst);
    let redriven = cli.json(
        0,
        &[
            "redrive",
            "--all",
            "--yes",
            "--why",
            "fixed",
            "--all-at-once",
            "--observe",
            "0s",
        ],
    );
    assert_eq!(
        (&redriven["state"], &redriven["done"]),
        (&"succeeded".into(), &38.into())
    );
    let restored = cli.json(0, &["restore", "--all", "--yes"]);
    assert_eq!(restored["done"], 2);
    cli.until("OPEN", 2);
    let rest = cli.json(
        0,
        &["redrive", "--all", "--yes", "--all-at-once", "--observe", "0s"],
    );
    assert_eq!(rest["done"], 2);
    let items = cli.json(0, &["redrives", "items", redriven["id"].as_str().unwrap()]);
    let items = items.as_array().unwrap();
    assert!(
        items.len() == 38 && items.iter().all(|item| item["outcome"] == "done"),
        "{items:?}"
    );
    let is_position = |item: &Value| {
        let written = item["written"].as_str();
        written.is_some_and(|written| written.contains("-retry-due/"))
    };
    assert!(items.iter().all(is_position), "{items:?}");

    // Each has a result, byte for byte, and no second one.
    let ends = pipe.settle(&sent, DEADLINE);
    drop(ends);
    let report = pipe.audit();
    assert!(report.is_clean(), "{report}");
    assert_eq!(
        (report.output, report.dead, report.redriven),
        (40, 0, 40),
        "{report}"
    );
    // An endpoint can tell the calls of each life apart.
    let keys = pipe.endpoint.calls_by_key();
    let lives = |suffix: &str| keys.keys().filter(|key| key.ends_with(suffix)).count();
    assert_eq!((lives("-r1"), lives("-r2"), keys.len()), (40, 10, 90), "{keys:?}");
    let listed = cli.json(0, &["redrives", "ls"]);
    assert_eq!(listed.as_array().unwrap().len(), 6, "{listed}");
    cli.inspector.shut_down();
}

#[test]
fn an_edited_record_has_another_end_and_an_exported_file_redrives_the_others_once() {
    let mut cli = Cli::start("dlq-edit", |request| match request.body.starts_with(b"fixed") {
        true => Reply::ok(request.body.clone()),
        false => Reply::status(422),
    });
    let pipe = &cli.pipe;
    let sent = pipe.produce(records(3));
    pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 3);
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let exported = file("dead.jsonl");
    let export = pipe.redeliver(&[
        "dlq",
        "export",
        "--all",
        "--file",
        &exported,
        "--server",
        &cli.server,
    ]);
    assert_eq!(export.code, Some(0), "{export:?}");
    let list = cli.json(0, &["ls", "--filter", "state = OPEN"]);
    let id = list["dead_letters"][0]["id"].as_str().unwrap();

    let usage = |arguments: &[&str], says: &str| {
        let refused = cli.dlq(arguments);
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains(says), "{refused:?}");
    };
    usage(&["edit", id, "--value", "fixed"], "--yes");
    usage(&["edit", id, "--yes"], "an editor needs a terminal");
    usage(
        &["edit", id, "--yes", "--value", "a", "--null-value"],
        "cannot be used with",
    );
    usage(&["import", &file("missing"), "--yes"], "cannot read");
    let reserved = cli.dlq(&["edit", id, "--yes", "--header", "retry-count=0"]);
    assert_eq!(reserved.code, Some(1), "{reserved:?}");
    assert!(reserved.stderr.contains("`retry-count`"), "{reserved:?}");

    let value = file("value");
    std::fs::write(&value, b"fixed \0\xff").unwrap();
    let edit = [
        "edit",
        id,
        "--value-file",
        &value,
        "--header",
        "fixed-by=ann",
        "--observe",
        "0s",
    ];
    let plan = cli.json(0, &[&edit[..], &["--plan"]].concat());
    assert_eq!(plan["edited"], serde_json::json!(["value", "headers"]));
    let done = cli.json(0, &[&edit[..], &["--yes", "--why", "typo"]].concat());
    assert_eq!((&done["state"], &done["done"]), (&"succeeded".into(), &1.into()));
    cli.until("REDRIVEN", 1);
    let output = eventually("the result of the edited record", DEADLINE, || {
        let results = pipe.read(&pipe.end_topics());
        let mut results = results.into_iter();
        let edited = results.find(|record| record.headers.last("redrive-of").is_some());
        edited.ok_or_else(|| "no result".to_owned())
    });
    assert_eq!(output.value.as_deref(), Some(&b"fixed \0\xff"[..]));
    assert_eq!(output.headers.last("redrive-of"), Some(id.as_bytes()));
    assert_eq!(
        output.headers.last("redrive-edited"),
        Some(&b"value, headers"[..])
    );
    assert_eq!(output.headers.last("fixed-by"), Some(&b"ann"[..]));
    // What was edited may differ.
    let report = pipe.audit();
    assert!(report.is_clean(), "{report}");
    // The original says who has edited it, and its life has one end.
    let trace = pipe.redeliver(&["trace", id, "--server", &cli.server, "-o", "json"]);
    let trace: Value =
        serde_json::from_str(&trace.stdout).unwrap_or_else(|error| panic!("{error}: {trace:?}"));
    // It has one life, that of its pipeline.
    let trace = &trace[0];
    assert_eq!(trace["outcome"], "succeeded", "{trace}");
    let steps = trace["steps"].as_array().unwrap();
    let redriven = steps.iter().find(|step| step["event"] == "redriven").unwrap();
    assert_eq!(redriven["edited"], serde_json::json!(["value", "headers"]));
    let again = cli.dlq(&[&edit[..], &["--yes"]].concat());
    assert_eq!(again.code, Some(1), "{again:?}");
    assert!(again.stderr.contains("REDRIVEN"), "{again:?}");

    // The file has three, one of which was redriven since.
    let imported = cli.json(3, &["import", &exported, "--yes", "--observe", "0s"]);
    assert_eq!(
        (&imported["done"], &imported["total"]),
        (&2.into(), &2.into()),
        "{imported}"
    );
    assert_eq!(imported["refused"][0]["reason"], "redriven", "{imported}");
    // They fail again: other dead letters, which are not in the file.
    cli.until("REDRIVEN", 3);
    cli.until("OPEN", 2);
    let again = cli.dlq(&["import", &exported, "--yes"]);
    assert_eq!(again.code, Some(3), "{again:?}");
    assert!(again.stderr.contains("3 REDRIVEN"), "{again:?}");
    let list = cli.json(0, &["ls", "--filter", "state = OPEN"]);
    let show = pipe.redeliver(&[
        "dlq",
        "show",
        list["dead_letters"][0]["id"].as_str().unwrap(),
        "--server",
        &cli.server,
    ]);
    assert!(!show.stdout.contains("edited"), "{show:?}");
    cli.inspector.shut_down();
}

#[test]
fn a_record_that_was_dead_for_longer_than_max_age_gets_its_attempts_again() {
    let works = Arc::new(AtomicBool::new(false));
    let endpoint_works = works.clone();
    let max_age = Duration::from_secs(5);
    let cli = Cli::of(
        PipeBuilder::new("dlq-age")
            .pipeline("max_age", "5s")
            .tiers(&[500]),
        {
            // Once it works, the first call of each record fails for a while.
            move |request| match endpoint_works.load(Ordering::SeqCst) {
                true if request.earlier_calls_of_key > 0 => Reply::ok(request.body.clone()),
                true => Reply::status(503),
                false => Reply::status(422),
            }
        },
    );
    let sent = cli.pipe.produce(records(5));
    cli.pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 5);
    let dead = SystemClock.now();
    eventually("the records are older than max_age", DEADLINE, || {
        let now = SystemClock.now();
        (now > dead.after(max_age)).then_some(()).ok_or(now)
    });
    works.store(true, Ordering::SeqCst);
    let redriven = cli.json(
        0,
        &["redrive", "--all", "--yes", "--all-at-once", "--observe", "0s"],
    );
    assert_eq!(redriven["done"], 5, "{redriven}");
    cli.pipe.settle(&sent, DEADLINE);
    let report = cli.pipe.audit();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.output, report.dead), (5, 0), "{report}");
    let retried = cli.pipe.read(&[cli.pipe.first_tier()]);
    assert_eq!(retried.len(), 5, "each has waited for a retry");
}

/// Runs a command on a terminal, and answers its question after something else has happened.
fn answered(cli: &Cli, arguments: &[&str], meanwhile: impl FnOnce(), answer: &str) -> CommandOutput {
    let arguments = [&["dlq"], arguments, &["--server", &cli.server]].concat();
    let command = cli.pipe.env.command("redeliver", &arguments);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted = words.map(|word| format!("'{}'", word.to_str().unwrap()));
    let quoted = quoted.collect::<Vec<_>>().join(" ");
    let environment = command
        .get_envs()
        .filter_map(|(name, value): (&OsStr, Option<&OsStr>)| Some((name.to_owned(), value?.to_owned())));
    let mut terminal = Command::new("script")
        .env_clear()
        .envs(environment)
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .args(["--quiet", "--return", "--command", &quoted, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("`script` of util-linux");
    let mut output = terminal.stdout.take().unwrap();
    let mut shown = Vec::new();
    let mut byte = [0];
    while !shown.ends_with(b"[y/N] ") {
        let read = output.read(&mut byte).unwrap();
        assert_eq!(read, 1, "no question: {}", String::from_utf8_lossy(&shown));
        shown.push(byte[0]);
    }
    meanwhile();
    let mut input = terminal.stdin.take().unwrap();
    writeln!(input, "{answer}").unwrap();
    output.read_to_end(&mut shown).unwrap();
    drop(input);
    CommandOutput {
        code: terminal.wait().unwrap().code(),
        stdout: String::from_utf8_lossy(&shown).into_owned(),
        stderr: String::new(),
    }
}

#[test]
fn who_does_not_confirm_a_plan_cancels_what_was_shown_and_not_what_others_have_started_since() {
    let cli = Cli::start("dlq-confirm", |_| Reply::status(422));
    let sent = cli.pipe.produce(records(20));
    cli.pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 20);
    let newest = || cli.json(0, &["redrives", "ls"])[0].clone();
    let redrive = [
        "redrive",
        "--all",
        "--rate",
        "1",
        "--all-at-once",
        "--observe",
        "0s",
    ];

    let declined = answered(&cli, &redrive, || (), "n");
    assert_eq!(declined.code, Some(3), "{declined:?}");
    assert!(declined.stdout.contains("nothing was done"), "{declined:?}");
    assert_eq!(newest()["state"], "cancelled");

    let starts = || {
        let id = newest()["id"].as_str().unwrap().to_owned();
        cli.json(0, &["redrives", "start", &id]);
    };
    let declined = answered(&cli, &redrive, starts, "n");
    assert_eq!(declined.code, Some(1), "{declined:?}");
    assert!(declined.stdout.contains("revision 2"), "{declined:?}");
    assert_eq!(newest()["state"], "running");
    let id = newest()["id"].as_str().unwrap().to_owned();
    let cancelled = cli.json(0, &["redrives", "cancel", &id]);
    assert_eq!(cancelled["state"], "cancelled");
}

#[test]
fn a_start_in_the_past_plans_nothing() {
    let cli = Cli::start("dlq-past", |_| Reply::status(422));
    let sent = cli.pipe.produce(records(1));
    cli.pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 1);
    let refused = cli.dlq(&["redrive", "--all", "--yes", "--start-at", "2020-01-01T00:00:00Z"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("--start-at"), "{refused:?}");
    assert_eq!(cli.json(0, &["redrives", "ls"]), serde_json::json!([]));
}

#[test]
fn who_repeats_or_confirms_a_plan_does_not_move_the_start_that_others_have_chosen() {
    const TODAY: &str = "2126-01-01T00:00:00.000Z";
    const TOMORROW: &str = "2126-01-02T00:00:00.000Z";
    let cli = Cli::start("dlq-moved", |_| Reply::status(422));
    let sent = cli.pipe.produce(records(3));
    cli.pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 3);
    let at = |job: &Value| (job["state"].clone(), job["waits_until"].clone());
    let waits_until = |time: &str| (Value::from("running"), Value::from(time));

    let redrive = ["redrive", "--all", "--yes", "--request-id", "moved"];
    let delayed = [&redrive[..], &["--start-at", TODAY]].concat();
    let job = cli.json(0, &delayed);
    assert_eq!(at(&job), waits_until(TODAY));
    let id = job["id"].as_str().unwrap();
    let moved = cli.json(0, &["redrives", "start", id, "--at", TOMORROW]);
    assert_eq!(at(&moved), waits_until(TOMORROW));
    let repeated = cli.json(0, &delayed);
    assert_eq!(at(&repeated), waits_until(TOMORROW), "{repeated}");
    let at_once = cli.json(0, &[&redrive[..], &["--no-wait"]].concat());
    assert_eq!(at(&at_once), waits_until(TOMORROW), "{at_once}");
    cli.json(0, &["redrives", "cancel", id]);

    // Somebody starts the plan while the question is open.
    let newest = || cli.json(0, &["redrives", "ls"])[0].clone();
    let starts = || {
        let id = newest()["id"].as_str().unwrap().to_owned();
        cli.json(0, &["redrives", "start", &id, "--at", TOMORROW]);
    };
    let confirmed = answered(&cli, &["redrive", "--all", "--no-wait"], starts, "y");
    assert_eq!(confirmed.code, Some(0), "{confirmed:?}");
    assert_eq!(at(&newest()), waits_until(TOMORROW));
}

#[test]
fn audits_of_documented_producers_are_clean() {
    // The endpoint says what it answers with, and the producer has only the header `tenant`, as in docs/producers.md.
    let pipe = PipeBuilder::new("audit-headers")
        .behave(|request| {
            let json = vec![("content-type".to_owned(), "application/json".to_owned())];
            Reply::Status(200, json, request.body.clone())
        })
        .create();
    let _services = ["enricher", "retry-tier"].map(|service| pipe.start(service, "a", &[]));
    let order = |number: usize| Draft::new(format!("k-{number}"), format!("{{\"order\":{number}}}"));
    let orders = (0..30).map(|number| order(number).header("tenant", b"a"));
    let ends = pipe.settle(&pipe.produce(orders.collect()), DEADLINE);
    assert_eq!(ends.report.output, 30);
    for record in &ends.records {
        assert_eq!(
            record.headers.last("content-type"),
            Some(&b"application/json"[..])
        );
    }
    let audited = pipe.redeliver(&["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
}

#[test]
fn redrives_keep_headers_of_other_frameworks() {
    let works = Arc::new(AtomicBool::new(false));
    let endpoint_works = works.clone();
    let cli = Cli::start("dlq-foreign", move |request| {
        match endpoint_works.load(Ordering::SeqCst) {
            true => Reply::ok(request.body.clone()),
            false => Reply::status(422),
        }
    });
    let pipe = &cli.pipe;
    // A record of a pipeline that reads the dead letters of Kafka Connect.
    let headers = [("__connect.errors.topic", &b"orders"[..]), ("tenant", b"a")];
    let draft = Draft::new("k", "v");
    let draft = headers
        .iter()
        .fold(draft, |draft, (name, value)| draft.header(name, value));
    let sent = pipe.produce(vec![draft]);
    pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 1);
    works.store(true, Ordering::SeqCst);
    cli.json(
        0,
        &["redrive", "--all", "--yes", "--why", "fixed", "--all-at-once"],
    );
    let report = eventually("the record has succeeded", DEADLINE, || {
        let report = pipe.audit();
        if report.output == 1 {
            Ok(report)
        } else {
            Err(report.to_string())
        }
    });
    assert!(report.is_clean(), "{report}");
    let results = pipe.read(&pipe.end_topics());
    let result = results
        .iter()
        .find(|record| record.headers.last("redrive-id").is_some());
    for (name, value) in headers {
        assert_eq!(result.unwrap().headers.last(name), Some(value), "{name}");
    }
}
