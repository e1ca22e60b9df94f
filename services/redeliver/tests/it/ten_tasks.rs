//! What operators do most, each with a few commands as they are typed into a shell, on real services.

use std::path::Path;
use std::process::Command;

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Reply, eventually, free_port};
use serde_json::{Value, json};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder};
use crate::until_idle::programs;

/// The most commands of a task.
const FEW: usize = 3;
/// More than one page of a list.
const JOBS: usize = 1_500;

struct Operator {
    programs: Scratch,
    /// Each task, and the number of its commands.
    tasks: Vec<(&'static str, usize)>,
}

impl Operator {
    fn new(pipe: &Pipe) -> Self {
        Self {
            programs: programs(&pipe.env, &["redeliver"]),
            tasks: Vec::new(),
        }
    }

    /// Runs a command, and returns its exit status and what it prints.
    fn shell(&self, command: &str) -> (Option<i32>, String) {
        let path = [self.programs.path(), Path::new("/usr/bin"), Path::new("/bin")];
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &format!("{{ {command}; }} 2>&1")]);
        shell.env_clear().env("PATH", std::env::join_paths(path).unwrap());
        let output = shell.output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    }

    #[track_caller]
    fn run(&self, command: &str) -> String {
        let (status, printed) = self.shell(command);
        assert_eq!(status, Some(0), "{command}: {printed}");
        printed
    }

    /// Runs commands that change nothing until they show all this.
    #[track_caller]
    fn until(&self, commands: &[&str], shown: &[&str]) {
        eventually(&commands.join("; "), DEADLINE, || {
            let runs = commands.iter().map(|command| self.shell(command));
            let (statuses, printed): (Vec<_>, Vec<_>) = runs.unzip();
            let printed = printed.concat();
            let is_shown = shown.iter().all(|text| printed.contains(text));
            match is_shown && statuses.iter().all(|status| *status == Some(0)) {
                true => Ok(()),
                false => Err(printed),
            }
        });
    }

    fn note(&mut self, task: &'static str, commands: usize) {
        assert!(commands <= FEW, "{task}: {commands} commands");
        self.tasks.push((task, commands));
    }

    /// A task that changes nothing.
    #[track_caller]
    fn asks(&mut self, task: &'static str, commands: &[&str], shown: &[&str]) {
        self.until(commands, shown);
        self.note(task, commands.len());
    }

    /// A task whose commands are run once. The last one exits with this status.
    #[track_caller]
    fn acts(&mut self, task: &'static str, commands: &[&str], status: i32, shown: &[&str]) {
        let mut all = String::new();
        for (number, command) in (1..).zip(commands) {
            let (exited, printed) = self.shell(command);
            let expected = if number == commands.len() { status } else { 0 };
            assert_eq!(exited, Some(expected), "{command}: {printed}");
            all += &printed;
        }
        for text in shown {
            assert!(all.contains(text), "{task}: {text:?} is not in {all}");
        }
        self.note(task, commands.len());
    }
}

/// An order of a tenant, with an id as its key.
fn order(tenant: &str, number: usize, amount: &str) -> Draft {
    let body = format!("{{\"order\": {number}, \"amount\": {amount:?}}}");
    Draft::new(format!("order-{number}"), body).header("tenant", tenant.as_bytes())
}

fn setup() -> Pipe {
    let address = || format!("127.0.0.1:{}", free_port());
    PipeBuilder::new("ten-tasks")
        .tiers(&[300])
        .through_scheduler()
        .with_inspector()
        .set("scheduler.listen", &address())
        .set("dlq_inspector.listen", &address())
        .set("scheduler.apps.sms.topic", "{name}")
        .set("scheduler.apps.mail.topic", "{name}")
        .set("control.topic", "{name}-control")
        .set("audit.topic", "{name}-audit")
        .behave(|request| {
            if !String::from_utf8_lossy(&request.body).contains("bad") {
                return Reply::ok(request.body.clone());
            }
            let kind = vec![("content-type".to_owned(), "application/json".to_owned())];
            let problem = r#"{"type": "wrong-amount", "detail": "column amount has the wrong type"}"#;
            Reply::Status(422, kind, problem.into())
        })
        .create()
}

#[test]
fn ten_tasks_need_few_commands() {
    let pipe = setup();
    let _services =
        ["scheduler", "enricher", "retry-tier", "dlq-inspector"].map(|service| pipe.start(service, "a", &[]));
    let mut operator = Operator::new(&pipe);
    // More than the ten of the first step of a redrive.
    let orders = (1..=15).map(|number| order(if number > 12 { "b" } else { "a" }, number, "bad"));
    let sent = pipe.produce(orders.collect());
    let csv = "headers.tenant,error_code,count\na,http.422,12\nb,http.422,3\n";
    operator.asks(
        "errors by tenant since yesterday",
        &["redeliver dlq count --by headers.tenant,error_code --since yesterday -o csv"],
        &[csv],
    );
    operator.asks(
        "why a pipeline fails, and since when",
        &[
            "redeliver status",
            "redeliver dlq groups --filter 'state = OPEN'",
            "redeliver dlq ls --filter 'state = OPEN' --limit 1",
        ],
        &["answered <number> Unprocessable Entity: wrong-amount", "-dlq/"],
    );
    operator.asks(
        "which dead letters expire soon",
        &["redeliver dlq ls --filter 'state = OPEN' --expires-within 31d --oldest-first"],
        &["http.422"],
    );
    let position = sent[0].position.to_string();
    operator.asks(
        "the life of an order",
        &[
            "redeliver trace --key order-1",
            &format!("redeliver trace {position}"),
        ],
        &[&position, "permanent http.422", "now        dead"],
    );
    operator.acts(
        "redrive one tenant slowly, until its records come back",
        &["redeliver dlq redrive --filter 'state = OPEN AND headers.tenant = \"a\"' --rate 50 --max-returned 0.02 \
           --observe 2s --reason INC-17 --yes"],
        3,
        &["paused (auto)", " of 10"],
    );

    schedule(&mut operator, &pipe);

    let fine = pipe.produce((100..120).map(|number| order("a", number, "1")).collect());
    operator.acts(
        "pause a pipeline, and lose nothing",
        &[
            &format!("redeliver pause pipeline/{} --reason INC-18", pipe.name()),
            "redeliver audit",
            &format!("redeliver resume pipeline/{}", pipe.name()),
        ],
        0,
        &["  clean: "],
    );
    let last = fine.last().unwrap().position.to_string();
    operator.until(&[&format!("redeliver trace {last}")], &["now        succeeded"]);
    assert_eq!(operator.tasks.len(), 10, "{:?}", operator.tasks);
}

/// The tasks with jobs and schedules.
fn schedule(operator: &mut Operator, pipe: &Pipe) {
    operator.run(
        "redeliver schedules create nightly --app mail --cron '30 2 * * *' --zone Europe/Berlin --data '{\"number\": 31}'",
    );
    operator.acts(
        "change the time zone of a schedule",
        &["redeliver schedules set nightly --zone Europe/London"],
        0,
        &["Europe/London"],
    );
    let printed = operator.run("redeliver schedules get nightly -o json 2>/dev/null");
    let schedule: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"));
    assert_eq!(
        (&schedule["cron"]["zone"], &schedule["jobData"]),
        (&json!("Europe/London"), &json!({ "number": 31 }))
    );

    operator.run("redeliver pause app/sms --reason INC-17");
    operator.until(&["redeliver jobs apps"], &["paused"]);
    let job = operator.run("redeliver jobs schedule --app sms --in 1ms --data 1 2>/dev/null");
    operator.asks(
        "why a job did not run",
        &[&format!("redeliver jobs why {}", job.trim_end())],
        &["\nheld up by   app/sms: paused since ", ": INC-17"],
    );

    let jobs = pipe.env.directory().join("jobs.jsonl");
    let lines = (0..JOBS).map(|number| {
        format!(
            "{{\"appName\": \"mail\", \"delay\": \"{}s\", \"jobData\": 1}}\n",
            300 + number
        )
    });
    std::fs::write(&jobs, lines.collect::<String>()).unwrap();
    operator.run(&format!(
        "redeliver jobs schedule --file {} -o jsonl",
        jobs.display()
    ));
    operator.asks(
        "what is due in the next ten minutes",
        &["redeliver upcoming --for 10m"],
        &["mail", "sms", "paused"],
    );
    // As after `--app $APP` without such a variable.
    let (status, refused) = operator.shell("redeliver jobs cancel --app= --all --yes");
    assert!(status != Some(0) && refused.contains("--app"), "{refused}");
    operator.acts(
        "cancel all jobs of an application",
        &[
            "redeliver jobs cancel --app mail --all",
            "redeliver jobs cancel --app mail --all --reason INC-17 --yes",
        ],
        0,
        &[
            &format!("{JOBS} jobs of mail wait; repeat the command with --yes"),
            &format!("{JOBS} of {JOBS} jobs cancelled"),
        ],
    );
    let again = ["redeliver jobs cancel --app mail --all"];
    operator.until(&again, &["\n0 jobs of mail wait; "]);
    operator.until(&["redeliver dlq audit --action jobs.cancel"], &["INC-17"]);
}
