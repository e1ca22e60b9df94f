//! Every call of the inspector, from Python: it works for an operator. Each that changes something is in the audit log, and is refused
//! for those who may only read, who cannot do it with the commands either.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use redeliver_testkit::{CommandOutput, Process, Reply, ServiceProcess, binary, ensure, eventually, run};
use serde_json::{Value, json};

use crate::polyglot::the_python;
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, records};

/// Methods that begin so change nothing.
const READS: [&str; 6] = ["Find", "Get", "List", "Read", "Trace", "Watch"];
/// It does not end.
const WATCHES: [(&str, &str); 2] = [
    ("DeadLetterService.WatchDeadLetters", "deadLetter"),
    ("OverviewService.WatchOverview", "pipelines"),
];
const VIEWER: &str = "viewer";
const OPERATOR: &str = "operator";

/// A call that changes something.
struct Change {
    method: &'static str,
    request: Value,
    /// The action in the audit log.
    action: &'static str,
}

struct World {
    pipe: Pipe,
    address: String,
    _services: [ServiceProcess; 2],
}

impl World {
    /// A pipeline with dead letters and a record that waits, and an inspector with tokens.
    fn new(name: &str) -> Self {
        let pipe = PipeBuilder::new(name)
            .with_inspector()
            .set("control.topic", "{name}-control")
            .set("audit.topic", "{name}-audit")
            .set("dlq_inspector.redrive.edit", "true")
            .behave(|request| Reply::status(if *request.body == *b"busy" { 503 } else { 422 }))
            .create();
        let tokens = [
            (VIEWER, vec!["dead-letters:read", "control:read"]),
            (OPERATOR, vec!["dead-letters:*", "control:*", "audit:read"]),
        ];
        let mut entries = String::from("tokens:\n");
        for (caller, scopes) in tokens {
            let mut command = binary("redeliver");
            command.args(["tokens", "new", "--name", caller]);
            for scope in scopes {
                command.args(["--scope", scope]);
            }
            let printed = run(command).stdout;
            let line = |start: &str| printed.lines().find(|line| line.starts_with(start)).unwrap();
            std::fs::write(token_file(&pipe, caller), line("redeliver_")).unwrap();
            entries += &format!("{}\n", line("  - {"));
        }
        let file = pipe.env.directory().join("tokens");
        std::fs::write(&file, entries).unwrap();
        let enricher = pipe.enricher("a");
        let tokens = format!("dlq_inspector.auth.tokens_file={}", file.display());
        let mut inspector = pipe.start("dlq-inspector", "a", &["--set", &tokens]);
        let address = inspector.word_after(" api=");
        let sent = pipe.produce(records(40));
        pipe.settle(&sent, DEADLINE);
        // No retry tier runs.
        pipe.produce(vec![Draft::new("k", "busy")]);
        pipe.until_waiting(1);
        let world = Self {
            pipe,
            address,
            _services: [enricher, inspector],
        };
        eventually("all dead letters are listed", DEADLINE, || {
            let listed = world.cli(OPERATOR, &["dlq", "ls", "-o", "json"]);
            let list: Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
            let count = list["dead_letters"].as_array().map_or(0, Vec::len);
            ensure(count == 40, format!("{count} {listed:?}"))
        });
        // Tiers of other tests share their topic.
        eventually("actions are known", DEADLINE, || {
            let asked = world.cli(OPERATOR, &["waiting", "actions", "none"]);
            let is_known = !asked.stderr.contains("(UNAVAILABLE)");
            ensure(is_known, asked.stderr)
        });
        world
    }

    fn token(&self, caller: &str) -> String {
        std::fs::read_to_string(token_file(&self.pipe, caller)).unwrap()
    }

    /// Runs a command of the CLI.
    fn cli(&self, caller: &str, arguments: &[&str]) -> CommandOutput {
        let server = format!("http://{}", self.address);
        let file = token_file(&self.pipe, caller);
        let common = ["--server", &server, "--token-file", file.to_str().unwrap()];
        self.pipe.redeliver(&[arguments, &common[..]].concat())
    }

    /// The program that calls a method, with code that is generated from the schemas.
    fn calling(&self, caller: &str, method: &str, request: &Value) -> Command {
        let request = request.to_string();
        let mut command = the_python().command("call.py", &[&self.address, method, &request]);
        command.env("REDELIVER_TOKEN", self.token(caller));
        command
    }

    /// The answer to an operator, or the last one of a stream.
    #[track_caller]
    fn succeeds(&self, method: &str, request: &Value) -> Value {
        let answer = run(self.calling(OPERATOR, method, request));
        assert_eq!(answer.code, Some(0), "{method} {request}: {answer:?}");
        let answers = serde_json::Deserializer::from_str(&answer.stdout).into_iter();
        let last = answers.last().expect("an answer");
        last.unwrap_or_else(|error| panic!("{error}: {answer:?}"))
    }

    #[track_caller]
    fn is_refused(&self, change: &Change) {
        let Change { method, request, .. } = change;
        let answer = run(self.calling(VIEWER, method, request));
        assert_ne!(answer.code, Some(0), "{method} {request}: {answer:?}");
        let is_denied = answer.stderr.contains("PERMISSION_DENIED");
        assert!(is_denied, "{method} {request}: {answer:?}");
    }

    /// The id of the group of all dead letters.
    fn group(&self) -> String {
        let listed = self.cli(OPERATOR, &["dlq", "groups", "-o", "json"]);
        let groups: Value = serde_json::from_str(&listed.stdout).unwrap();
        groups["groups"][0]["id"].as_str().unwrap().to_owned()
    }

    fn pipeline(&self) -> String {
        format!("pipeline/{}", self.pipe.name())
    }

    fn tier(&self) -> String {
        let tier = self.pipe.pipeline.policy.tiers()[0];
        format!("tier/{}/{tier}", self.pipe.name())
    }

    fn whole_tier(&self) -> String {
        format!("tier/{}", self.pipe.pipeline.policy.tiers()[0])
    }

    /// The position of the record that waits.
    fn waiting(&self) -> Value {
        let waiting = self.pipe.read(&[self.pipe.first_tier()]);
        let position = &waiting[0].position;
        json!({ "topic": *position.topic, "partition": position.partition, "offset": position.offset })
    }

    /// A plan that takes so long that it does not end during a test.
    fn plan(&self) -> Change {
        Change {
            method: "RedriveService.PlanRedrive",
            request: json!({ "kind": "REDRIVE_KIND_REDRIVE", "all": true, "ratePerSecond": 1 }),
            action: "redrives.plan",
        }
    }

    /// The newest dead letter.
    fn letter(&self) -> Value {
        let request = json!({ "pageSize": 1, "view": "DEAD_LETTER_VIEW_FULL" });
        let listed = self.succeeds("DeadLetterService.ListDeadLetters", &request);
        listed["deadLetters"][0].clone()
    }

    /// A plan of an edit.
    fn edit(&self) -> Change {
        let letter = self.letter();
        let edit = json!({ "value": { "bytes": "e30=" } });
        Change {
            method: "RedriveService.PlanEdit",
            request: json!({ "id": letter["id"], "contentHash": letter["contentHash"], "edit": edit }),
            action: "redrives.plan",
        }
    }

    /// All calls that change something, in an order in which each has an effect. `job` was planned.
    fn changes(&self, job: &str) -> Vec<Change> {
        let (group, pipeline, tier) = (self.group(), self.pipeline(), self.tier());
        let change = |method, request, action| Change {
            method,
            request,
            action,
        };
        let id = || json!({ "id": job });
        let named = |name: &str| json!({ "name": name, "reason": "test" });
        let group = |reason: &str| json!({ "id": group, "reason": reason });
        let mut note = group("");
        note.as_object_mut().unwrap().remove("reason");
        note["note"] = "known".into();
        let mut limit = named(&tier);
        limit["rate"] = json!({ "perSecond": 5 });
        let rate = json!({ "id": job, "ratePerSecond": 2 });
        let whole = named(&self.whole_tier());
        let act = json!({
            "positions": [self.waiting()], "action": "WAITING_ACTION_RETRY", "reason": "test", "requestId": self.pipe.name(),
        });
        vec![
            self.edit(),
            change("WaitingService.ActOnWaitingRecords", act, "waiting.act"),
            change("RedriveService.StartRedrive", id(), "redrives.start"),
            change("RedriveService.SetRedriveRate", rate, "redrives.rate"),
            change("RedriveService.PauseRedrive", id(), "redrives.pause"),
            change("RedriveService.ResumeRedrive", id(), "redrives.resume"),
            change("RedriveService.CancelRedrive", id(), "redrives.cancel"),
            change("ControlService.PauseControl", named(&pipeline), "control.pause"),
            change("ControlService.ResumeControl", named(&pipeline), "control.resume"),
            change("ControlService.SetControlRate", limit, "control.rate"),
            change("ControlService.ReleaseTier", named(&tier), "control.release"),
            change("ControlService.ReleaseWholeTier", whole, "control.release"),
            change("ControlService.ResetControl", named(&tier), "control.reset"),
            change("DeadLetterService.MuteGroup", group("known"), "groups.mute"),
            change("DeadLetterService.ReopenGroup", group("again"), "groups.reopen"),
            change("DeadLetterService.ResolveGroup", group("fixed"), "groups.resolve"),
            change("DeadLetterService.AnnotateGroup", note, "groups.annotate"),
        ]
    }

    /// All calls that change nothing and end. `job` was planned.
    fn reads(&self, job: &str) -> Vec<(&'static str, Value)> {
        let (group, letter) = (self.group(), self.letter());
        let id = || json!({ "id": letter["id"] });
        vec![
            ("AccessService.GetAccess", json!({})),
            ("AuditService.ListAuditEntries", json!({})),
            ("ControlService.GetControl", json!({ "name": self.pipeline() })),
            ("ControlService.ListControls", json!({})),
            ("DeadLetterService.GetDeadLetter", id()),
            ("DeadLetterService.GetDeadLetterStats", json!({})),
            ("DeadLetterService.GetGroup", json!({ "id": group })),
            ("DeadLetterService.ListDeadLetters", json!({})),
            ("DeadLetterService.ListGroups", json!({})),
            ("DeadLetterService.ReadPayload", id()),
            ("OverviewService.GetOverview", json!({})),
            ("RedriveService.GetRedrive", json!({ "id": job })),
            ("RedriveService.GetRedrivePreview", json!({ "id": job })),
            ("RedriveService.ListRedriveItems", json!({ "id": job })),
            ("RedriveService.ListRedrives", json!({})),
            (
                "WaitingService.GetJobOutcomes",
                json!({ "id": "01KAJQ6Z2B0003000000000A7X" }),
            ),
            (
                "WaitingService.GetWaitingActions",
                json!({ "requestId": self.pipe.name() }),
            ),
            (
                "WaitingService.GetWaitingRecord",
                json!({ "position": self.waiting() }),
            ),
            ("WaitingService.GetWaitingStats", json!({})),
            ("WaitingService.ListWaiting", json!({})),
            ("WaitingService.FindRecords", json!({ "key": "a" })),
            (
                "WaitingService.TraceRecord",
                json!({ "position": letter["origin"] }),
            ),
        ]
    }

    /// Discards a dead letter and restores it. Those who may only read cannot.
    #[track_caller]
    fn discard_and_restore(&self) {
        let ids = json!([self.letter()["id"]]);
        for (kind, action) in [
            ("REDRIVE_KIND_DISCARD", "dead-letters.discard"),
            ("REDRIVE_KIND_RESTORE", "dead-letters.restore"),
        ] {
            let plan = Change {
                method: "RedriveService.PlanRedrive",
                request: json!({ "kind": kind, "ids": ids }),
                action: "redrives.plan",
            };
            self.is_refused(&plan);
            let job = self.succeeds(plan.method, &plan.request);
            let id = json!({ "id": job["id"] });
            self.succeeds("RedriveService.StartRedrive", &id);
            eventually(&format!("{kind} ends"), DEADLINE, || {
                let job = self.succeeds("RedriveService.GetRedrive", &id);
                match (&job["state"], &job["done"]) {
                    (state, done) if state == "REDRIVE_STATE_SUCCEEDED" && *done == 1 => Ok(()),
                    _ => Err(job.to_string()),
                }
            });
            let audited = self.audited(OPERATOR);
            assert!(audited.contains(action), "{audited:?}");
        }
    }

    /// The actions of a caller in the audit log.
    fn audited(&self, caller: &str) -> BTreeSet<String> {
        let topic = format!("{}-audit", self.pipe.name());
        let records = self.pipe.read(&[topic.as_str().into()]);
        let entries = records.iter().map(|record| {
            let value = record.value.clone().unwrap();
            <redeliver_proto::v1::AuditEntry as redeliver_proto::Message>::decode(value).unwrap()
        });
        let of_caller = entries.filter(|entry| entry.by == format!("token:{caller}"));
        of_caller.map(|entry| entry.action).collect()
    }
}

fn token_file(pipe: &Pipe, caller: &str) -> PathBuf {
    pipe.env.directory().join(format!("token-{caller}"))
}

/// The methods of the schemas: those that change something, and the others.
fn methods() -> [BTreeSet<String>; 2] {
    let listed = run(the_python().command("call.py", &["unused"])).stdout;
    let is_change = |method: &&str| {
        let (_, name) = method.split_once('.').unwrap();
        !READS.iter().any(|read| name.starts_with(read))
    };
    let (changes, reads): (Vec<&str>, Vec<&str>) = listed.lines().partition(is_change);
    [changes, reads].map(|methods| methods.into_iter().map(str::to_owned).collect())
}

fn names<'m>(methods: impl IntoIterator<Item = &'m str>) -> BTreeSet<String> {
    methods.into_iter().map(str::to_owned).collect()
}

#[test]
#[ignore = "long"]
fn python_client_makes_each_call() {
    let world = World::new("changes-python");
    let plan = world.plan();
    world.is_refused(&plan);
    let job = world.succeeds(plan.method, &plan.request);
    let job = job["id"].as_str().unwrap();
    let (changes, reads) = (world.changes(job), world.reads(job));
    let changing = changes.iter().chain([&plan]);
    assert_eq!(
        [
            names(changing.map(|change| change.method)),
            names(
                reads
                    .iter()
                    .map(|(method, _)| *method)
                    .chain(WATCHES.map(|(method, _)| method))
            ),
        ],
        methods(),
        "a method without a test, or a test without a method"
    );
    world.discard_and_restore();
    for change in &changes {
        world.is_refused(change);
        world.succeeds(change.method, &change.request);
    }
    for (method, request) in &reads {
        let answer = world.succeeds(method, request);
        // No pipeline is of an application.
        let has_answer = *method != "WaitingService.GetJobOutcomes";
        assert_eq!(answer != json!({}), has_answer, "{method} {request}");
    }
    for (method, field) in WATCHES {
        let watch = world.calling(OPERATOR, method, &json!({}));
        let mut watch = Process::spawn(watch).unwrap();
        watch.wait_for_output(field, DEADLINE);
        watch.kill_9();
    }
    let audited = world.audited(OPERATOR);
    for change in changes.iter().chain([&plan]) {
        assert!(audited.contains(change.action), "{}: {audited:?}", change.method);
    }
    let by_viewer = world.audited(VIEWER);
    assert_eq!(by_viewer, BTreeSet::new());
}
