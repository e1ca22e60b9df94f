//! `redeliver dlq redrive`, `discard`, `restore` and `redrives`, with an endpoint that fails and then works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redeliver_testkit::{CommandOutput, Reply, eventually};
use serde_json::Value;

use crate::support::{DEADLINE, Pipe, PipeBuilder, records};

/// The commands of an inspector.
struct Cli<'p> {
    pipe: &'p Pipe,
    server: String,
}

impl Cli<'_> {
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
    let pipe = PipeBuilder::new("dlq-redrive")
        .with_inspector()
        .behave(move |request| match endpoint_works.load(Ordering::SeqCst) {
            true => Reply::ok(request.body.clone()),
            false => Reply::status(422),
        })
        .create();
    let _services = ["enricher", "retry-tier"].map(|service| pipe.start(service, "a", &[]));
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli {
        pipe: &pipe,
        server: format!("http://{}", inspector.word_after(" api=")),
    };
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
        &["redrive", "--all", "--yes", "--why", "fixed", "--all-at-once"],
    );
    assert_eq!(
        (&redriven["state"], &redriven["done"]),
        (&"succeeded".into(), &38.into())
    );
    let restored = cli.json(0, &["restore", "--all", "--yes"]);
    assert_eq!(restored["done"], 2);
    let rest = cli.json(0, &["redrive", "--all", "--yes", "--all-at-once"]);
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
    inspector.shut_down();
}
