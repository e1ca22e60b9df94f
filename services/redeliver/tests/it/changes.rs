//! Every call that changes something, from Python and with grpcurl: it works for an operator, is in the audit log, and is refused for those who may only
//! read, who cannot do it with the commands either.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use redeliver_testkit::{CommandOutput, Reply, ServiceProcess, binary, eventually, kube_tools, run};
use serde_json::{Value, json};

use crate::polyglot::the_python;
use crate::support::{DEADLINE, Pipe, PipeBuilder, records};

/// The services that change what the inspector serves.
const SERVICES: [&str; 3] = ["RedriveService", "ControlService", "DeadLetterService"];
/// Methods that begin so change nothing.
const READS: [&str; 4] = ["Get", "List", "Read", "Watch"];
const VIEWER: &str = "viewer";
const OPERATOR: &str = "operator";

/// A call that changes something.
struct Change {
    method: &'static str,
    request: Value,
    /// The action in the audit log.
    action: &'static str,
}

/// How calls are made.
#[derive(Clone, Copy)]
enum Client {
    /// Code that is generated from the schemas.
    Python,
    /// It knows the schemas by reflection.
    Grpcurl,
}

struct World {
    pipe: Pipe,
    address: String,
    _services: [ServiceProcess; 2],
}

impl World {
    /// A pipeline with dead letters, and an inspector with tokens.
    fn new(name: &str) -> Self {
        let pipe = PipeBuilder::new(name)
            .with_inspector()
            .set("control.topic", "{name}-control")
            .set("audit.topic", "{name}-audit")
            .set("dlq_inspector.redrive.edit", "true")
            .behave(|_| Reply::status(422))
            .create();
        let tokens = [
            (VIEWER, vec!["dead-letters:read", "control:read"]),
            (OPERATOR, vec!["dead-letters:*", "control:*"]),
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
        let world = Self {
            pipe,
            address,
            _services: [enricher, inspector],
        };
        eventually("all dead letters are listed", DEADLINE, || {
            let listed = world.cli(OPERATOR, &["dlq", "ls", "-o", "json"]);
            let list: Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
            match list["dead_letters"].as_array().map_or(0, Vec::len) {
                40 => Ok(()),
                other => Err(format!("{other} {listed:?}")),
            }
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

    /// Calls a method.
    fn call(&self, client: Client, caller: &str, method: &str, request: &Value) -> CommandOutput {
        let request = request.to_string();
        let command = match client {
            Client::Python => {
                let mut command = the_python().command("call.py", &[&self.address, method, &request]);
                command.env("REDELIVER_TOKEN", self.token(caller));
                command
            }
            Client::Grpcurl => {
                let mut command = Command::new(kube_tools::grpcurl().unwrap());
                let authorization = format!("authorization: Bearer {}", self.token(caller));
                command.args(["-plaintext", "-H", &authorization, "-d", &request, &self.address]);
                command.arg(format!("redeliver.v1.{}", method.replace('.', "/")));
                command
            }
        };
        run(command)
    }

    #[track_caller]
    fn succeeds(&self, client: Client, method: &str, request: &Value) -> Value {
        let answer = self.call(client, OPERATOR, method, request);
        assert_eq!(answer.code, Some(0), "{method} {request}: {answer:?}");
        serde_json::from_str(&answer.stdout).unwrap_or_else(|error| panic!("{error}: {answer:?}"))
    }

    #[track_caller]
    fn is_refused(&self, client: Client, change: &Change) {
        let Change { method, request, .. } = change;
        let answer = self.call(client, VIEWER, method, request);
        let denied = match client {
            Client::Python => "PERMISSION_DENIED",
            Client::Grpcurl => "PermissionDenied",
        };
        assert_ne!(answer.code, Some(0), "{method} {request}: {answer:?}");
        assert!(answer.stderr.contains(denied), "{method} {request}: {answer:?}");
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

    /// A plan that takes so long that it does not end during a test.
    fn plan(&self) -> Change {
        Change {
            method: "RedriveService.PlanRedrive",
            request: json!({ "kind": "REDRIVE_KIND_REDRIVE", "all": true, "ratePerSecond": 1 }),
            action: "redrives.plan",
        }
    }

    /// A plan of an edit.
    fn edit(&self) -> Change {
        let request = json!({ "pageSize": 1, "view": "DEAD_LETTER_VIEW_FULL" });
        let listed = self.succeeds(Client::Python, "DeadLetterService.ListDeadLetters", &request);
        let letter = &listed["deadLetters"][0];
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
        let named = |name: &str| json!({ "name": name, "why": "test" });
        let group = |why: &str| json!({ "id": group, "why": why });
        let mut note = group("");
        note.as_object_mut().unwrap().remove("why");
        note["note"] = "known".into();
        let mut limit = named(&tier);
        limit["rate"] = json!({ "perSecond": 5 });
        vec![
            self.edit(),
            change("RedriveService.StartRedrive", id(), "redrives.start"),
            change(
                "RedriveService.SetRedriveRate",
                json!({ "id": job, "ratePerSecond": 2 }),
                "redrives.rate",
            ),
            change("RedriveService.PauseRedrive", id(), "redrives.pause"),
            change("RedriveService.ResumeRedrive", id(), "redrives.resume"),
            change("RedriveService.CancelRedrive", id(), "redrives.cancel"),
            change("ControlService.PauseControl", named(&pipeline), "control.pause"),
            change("ControlService.ResumeControl", named(&pipeline), "control.resume"),
            change("ControlService.SetControlRate", limit, "control.rate"),
            change("ControlService.ReleaseTier", named(&tier), "control.release"),
            change(
                "ControlService.ReleaseWholeTier",
                named(&self.whole_tier()),
                "control.release",
            ),
            change("ControlService.ResetControl", named(&tier), "control.reset"),
            change("DeadLetterService.MuteGroup", group("known"), "groups.mute"),
            change("DeadLetterService.ReopenGroup", group("again"), "groups.reopen"),
            change("DeadLetterService.ResolveGroup", group("fixed"), "groups.resolve"),
            change("DeadLetterService.AnnotateGroup", note, "groups.annotate"),
        ]
    }

    /// The actions of a caller in the audit log.
    fn audited(&self, caller: &str) -> BTreeSet<String> {
        let topic = format!("{}-audit", self.pipe.name());
        let records = self.pipe.read(&[topic.as_str().into()]);
        let entries = records.iter().map(|record| {
            let value = record.value.clone().unwrap();
            <redeliver_proto::v1::AuditEntry as redeliver_proto::Message>::decode(value).unwrap()
        });
        let of_caller = entries.filter(|entry| entry.by == caller);
        of_caller.map(|entry| entry.action).collect()
    }
}

fn token_file(pipe: &Pipe, caller: &str) -> PathBuf {
    pipe.env.directory().join(format!("token-{caller}"))
}

/// The methods of the schemas that change something.
fn changing_methods() -> BTreeSet<String> {
    let listed = the_python().command("call.py", &["unused"]);
    let listed = run(listed).stdout;
    let methods = listed.lines().filter(|line| {
        let (service, method) = line.split_once('.').unwrap();
        SERVICES.contains(&service) && !READS.iter().any(|read| method.starts_with(read))
    });
    methods.map(str::to_owned).collect()
}

#[track_caller]
fn each_change_is_for_operators_only_and_audited(name: &str, client: Client) {
    let world = World::new(name);
    let plan = world.plan();
    world.is_refused(client, &plan);
    let job = world.succeeds(client, plan.method, &plan.request);
    let job = job["id"].as_str().unwrap();
    let changes = world.changes(job);
    let tested = changes
        .iter()
        .chain([&plan])
        .map(|change| change.method.to_owned());
    assert_eq!(
        tested.collect::<BTreeSet<_>>(),
        changing_methods(),
        "a method without a test, or a test without a method"
    );
    for change in &changes {
        world.is_refused(client, change);
        world.succeeds(client, change.method, &change.request);
    }
    let audited = world.audited(OPERATOR);
    for change in changes.iter().chain([&plan]) {
        assert!(audited.contains(change.action), "{}: {audited:?}", change.method);
    }
    let by_viewer = world.audited(VIEWER);
    assert_eq!(by_viewer, BTreeSet::new());
}

#[test]
fn a_python_client_generated_from_the_schemas_makes_each_change() {
    each_change_is_for_operators_only_and_audited("changes-python", Client::Python);
}

#[test]
#[ignore = "long"]
fn grpcurl_makes_each_change() {
    each_change_is_for_operators_only_and_audited("changes-grpcurl", Client::Grpcurl);
}

#[test]
fn the_commands_change_nothing_for_those_who_may_only_read() {
    let world = World::new("changes-cli");
    let planned = world.cli(
        OPERATOR,
        &["dlq", "redrive", "--all", "--plan", "--rate", "1", "-o", "json"],
    );
    let planned: Value =
        serde_json::from_str(&planned.stdout).unwrap_or_else(|error| panic!("{error}: {planned:?}"));
    let job = planned["id"].as_str().unwrap();
    let (group, pipeline, tier) = (world.group(), world.pipeline(), world.tier());
    let why = ["--why", "test"];
    for command in [
        &["dlq", "redrive", "--all", "--yes"][..],
        &["dlq", "redrive", "--all", "--plan"],
        &["dlq", "discard", "--all", "--yes"],
        &["dlq", "redrives", "start", job],
        &["dlq", "redrives", "rate", job, "5"],
        &["dlq", "redrives", "pause", job],
        &["dlq", "redrives", "resume", job],
        &["dlq", "redrives", "cancel", job],
        &["dlq", "group", "resolve", &group],
        &["dlq", "group", "mute", &group, why[0], why[1]],
        &["dlq", "group", "reopen", &group],
        &["dlq", "group", "note", &group, "a note"],
        &["pause", &pipeline, why[0], why[1]],
        &["resume", &pipeline, why[0], why[1]],
        &["rate", &tier, "5", why[0], why[1]],
        &["release", &tier, why[0], why[1]],
        &["release", &world.whole_tier(), why[0], why[1]],
    ] {
        let refused = world.cli(VIEWER, command);
        assert_eq!(refused.code, Some(1), "{command:?}: {refused:?}");
        assert!(
            refused.stderr.contains("PERMISSION_DENIED"),
            "{command:?}: {refused:?}"
        );
    }
    // Whoever may read sees all of it.
    for command in [
        &["dlq", "redrives", "show", job][..],
        &["dlq", "group", "show", &group],
        &["dlq", "ls"],
    ] {
        let shown = world.cli(VIEWER, command);
        assert_eq!(shown.code, Some(0), "{command:?}: {shown:?}");
    }
    assert_eq!(world.audited(VIEWER), BTreeSet::new());
}
