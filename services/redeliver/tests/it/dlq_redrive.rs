//! `redeliver dlq redrive`, `discard`, `restore` and `redrives`, with an endpoint that fails and then works.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::{CommandOutput, Reply, Request, ServiceProcess, ensure, eventually};
use serde_json::Value;

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, records, words};

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
        self.pipe
            .until_taken(&[&["dlq"], arguments, &server[..]].concat())
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
            let found = list["dead_letters"].as_array().map_or(0, Vec::len);
            ensure(found == count, format!("{found}\n{printed:?}"))
        });
    }
}

#[test]
fn dead_letters_return_once_fixed() {
    let works = Arc::new(AtomicBool::new(false));
    let endpoint_works = works.clone();
    let mut cli = Cli::start("dlq-redrive", move |request| {
        match endpoint_works.load(Ordering::SeqCst) {
            true => Reply::ok(request.body.clone()),
            false => Reply::status(422),
        }
    });
    let pipe = &cli.pipe;
    // As of a pipeline that reads the dead letters of Kafka Connect.
    let foreign = |draft: Draft| draft.header("__connect.errors.topic", b"orders");
    let sent = pipe.produce(records(20).into_iter().map(foreign).collect());
    pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 20);

    // Without a terminal, nothing is done without --yes.
    let refused = cli.dlq(&["redrive", "--all"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("--yes"), "{refused:?}");
    let plan = cli.json(0, &["redrive", "--all", "--plan"]);
    assert_eq!((&plan["state"], &plan["total"]), (&"planned".into(), &20.into()));
    let samples = plan["preview"].as_array().unwrap();
    assert_eq!(samples.len(), 3, "{plan}");
    for sample in samples {
        let headers = sample["headers"].as_array().unwrap().iter();
        let mut kinds = headers.map(|header| (&header["name"], &header["kind"]));
        let is_removed = kinds
            .clone()
            .any(|of| of == (&"error-code".into(), &"removed".into()));
        let is_kept = kinds.any(|of| of == (&"__connect.errors.topic".into(), &"kept".into()));
        assert!(is_removed && is_kept, "{sample}");
        assert_eq!(sample["destination"], plan["destinations"][0]["topic"]);
    }
    // Two dead letters are not to be redriven.
    let list = cli.json(0, &words("ls --limit 2"));
    let ids = [0, 1].map(|number| list["dead_letters"][number]["id"].as_str().unwrap());
    let discard = [
        "discard", "--id", ids[0], "--id", ids[1], "--yes", "--reason", "test",
    ];
    let discarded = cli.json(0, &discard);
    assert_eq!(
        (&discarded["kind"], &discarded["done"]),
        (&"discard".into(), &2.into())
    );
    cli.until("DISCARDED", 2);

    works.store(true, Ordering::SeqCst);
    let redrive = words("redrive --all --yes --reason fixed --all-at-once --observe 0s");
    let redriven = cli.json(0, &redrive);
    assert_eq!(
        (&redriven["state"], &redriven["done"]),
        (&"succeeded".into(), &18.into())
    );
    let restored = cli.json(0, &["restore", "--all", "--yes"]);
    assert_eq!(restored["done"], 2);
    cli.until("OPEN", 2);
    assert_eq!(cli.json(0, &redrive)["done"], 2);
    let items = cli.json(0, &["redrives", "items", redriven["id"].as_str().unwrap()]);
    let items = items.as_array().unwrap();
    assert_eq!(items.len(), 18);
    for item in items {
        assert_eq!(item["outcome"], "done", "{item}");
        let written = item["written"].as_str().unwrap();
        assert!(written.contains("-retry-due/"), "{item}");
    }

    // Each has a result, byte for byte, and no second one.
    pipe.settle(&sent, DEADLINE);
    let report = pipe.audit();
    assert!(report.is_clean(), "{report}");
    let ended = (report.output, report.dead, report.redriven);
    assert_eq!(ended, (20, 0, 20), "{report}");
    for result in pipe.read(&[pipe.pipeline.output.clone().unwrap()]) {
        let header = result.headers.last("__connect.errors.topic");
        assert_eq!(header, Some(&b"orders"[..]), "{result:?}");
    }
    // An endpoint can tell the calls of each life apart.
    let keys = pipe.endpoint.calls_by_key();
    let second = keys.keys().filter(|key| key.ends_with("-r1")).count();
    assert_eq!((second, keys.len()), (20, 40), "{keys:?}");
    let listed = cli.json(0, &["redrives", "ls"]);
    assert_eq!(listed.as_array().unwrap().len(), 5, "{listed}");
    cli.inspector.shut_down();
}

#[test]
fn edits_and_imports_redrive_once() {
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
    let export = format!("dlq export --all --file {exported} --server {}", cli.server);
    let export = pipe.redeliver(&words(&export));
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
    usage(&["import", &file("missing"), "--yes"], "cannot read");
    let reserved = cli.dlq(&["edit", id, "--yes", "--header", "retry-count=0"]);
    assert_eq!(reserved.code, Some(1), "{reserved:?}");
    assert!(reserved.stderr.contains("`retry-count`"), "{reserved:?}");

    let value = file("value");
    std::fs::write(&value, b"fixed \0\xff").unwrap();
    let edit = format!("edit {id} --value-file {value} --header fixed-by=ann --observe 0s");
    let edit = words(&edit);
    let plan = cli.json(0, &[&edit[..], &["--plan"]].concat());
    assert_eq!(plan["edited"], serde_json::json!(["value", "headers"]));
    let done = cli.json(0, &[&edit[..], &["--yes", "--reason", "typo"]].concat());
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
    // Edited parts may differ.
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
    let id = list["dead_letters"][0]["id"].as_str().unwrap();
    let show = pipe.redeliver(&["dlq", "show", id, "--server", &cli.server]);
    assert!(!show.stdout.contains("edited"), "{show:?}");
    cli.inspector.shut_down();
}

#[test]
fn redriven_record_gets_new_max_age() {
    let works = Arc::new(AtomicBool::new(false));
    let endpoint_works = works.clone();
    let max_age = Duration::from_secs(20);
    let cli = Cli::of(
        PipeBuilder::new("dlq-age")
            .pipeline("max_age", "20s")
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
        ensure(now > dead.after(max_age), now)
    });
    works.store(true, Ordering::SeqCst);
    let redriven = cli.json(0, &words("redrive --all --yes --all-at-once --observe 0s"));
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

/// Others may start a plan, or move its start, after it was shown.
#[test]
fn shown_plan_respects_changes_of_others() {
    const TODAY: &str = "2126-01-01T00:00:00.000Z";
    const TOMORROW: &str = "2126-01-02T00:00:00.000Z";
    let cli = Cli::start("dlq-confirm", |_| Reply::status(422));
    let sent = cli.pipe.produce(records(5));
    cli.pipe.settle(&sent, DEADLINE);
    cli.until("OPEN", 5);
    let newest = || cli.json(0, &["redrives", "ls"])[0].clone();
    let newest_id = || newest()["id"].as_str().unwrap().to_owned();
    let at = |job: &Value| (job["state"].clone(), job["waits_until"].clone());
    let waits_until = |time: &str| (Value::from("running"), Value::from(time));

    let past = cli.dlq(&words("redrive --all --yes --start-at 2020-01-01T00:00:00Z"));
    assert_eq!(past.code, Some(2), "{past:?}");
    assert!(past.stderr.contains("--start-at"), "{past:?}");
    assert_eq!(cli.json(0, &["redrives", "ls"]), serde_json::json!([]));

    // Declining cancels the plan that was shown, and not what others have started since.
    let redrive = words("redrive --all --rate 1 --all-at-once --observe 0s");
    let declined = answered(&cli, &redrive, || (), "n");
    assert_eq!(declined.code, Some(3), "{declined:?}");
    assert!(declined.stdout.contains("nothing was done"), "{declined:?}");
    assert_eq!(newest()["state"], "cancelled");
    let starts = || drop(cli.json(0, &["redrives", "start", &newest_id(), "--at", TODAY]));
    let declined = answered(&cli, &redrive, starts, "n");
    assert_eq!(declined.code, Some(1), "{declined:?}");
    assert!(declined.stdout.contains("revision 2"), "{declined:?}");
    assert_eq!(at(&newest()), waits_until(TODAY));
    let cancelled = cli.json(0, &["redrives", "cancel", &newest_id()]);
    assert_eq!(cancelled["state"], "cancelled");

    // Repeating or confirming does not move the start.
    let redrive = words("redrive --all --yes --request-id moved");
    let delayed = [&redrive[..], &["--start-at", TODAY]].concat();
    let job = cli.json(0, &delayed);
    assert_eq!(at(&job), waits_until(TODAY));
    let id = job["id"].as_str().unwrap();
    let moved = cli.json(0, &["redrives", "start", id, "--at", TOMORROW]);
    assert_eq!(at(&moved), waits_until(TOMORROW));
    for repeated in [&delayed, &[&redrive[..], &["--no-wait"]].concat()] {
        let job = cli.json(0, repeated);
        assert_eq!(at(&job), waits_until(TOMORROW), "{job}");
    }
    cli.json(0, &["redrives", "cancel", id]);
    let starts = || drop(cli.json(0, &["redrives", "start", &newest_id(), "--at", TOMORROW]));
    let confirmed = answered(&cli, &words("redrive --all --no-wait"), starts, "y");
    assert_eq!(confirmed.code, Some(0), "{confirmed:?}");
    assert_eq!(at(&newest()), waits_until(TOMORROW));
}
