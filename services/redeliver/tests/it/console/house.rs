//! All services as processes, on the shared Kafka and Redis, with a console that has no sign-in.

use std::net::SocketAddr;

use redeliver_testkit::{Reply, Request, ServiceProcess, free_port};

use crate::raw;
use crate::support::{Draft, Pipe, PipeBuilder, SERVICES};

/// The application of the scheduler, whose jobs are records of the pipeline.
pub(super) const APP: &str = "docs";
/// Markup and other directions, as a command line and an HTTP response can have them.
pub(super) const HOSTILE: &str =
    "<script>alert(1)</script><img src=x onerror=alert(1)> \u{202e}gnp.txt \u{5e9}\u{5dc}\u{5d5}\u{5dd}";
/// Of a record that the dead-letter topic takes.
const MAX_RECORD: &str = "12000000";

pub(super) struct House {
    pub(super) console: SocketAddr,
    pub(super) pipe: Pipe,
    _services: Vec<ServiceProcess>,
}

impl House {
    pub(super) fn start() -> Self {
        let [scheduler, inspector] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
        let pipe = PipeBuilder::new("docs")
            .tiers(&[2_000, 10_000])
            .through_scheduler()
            .with_inspector()
            // The topics that all pipelines of an installation share.
            .set("kafka.id_prefix", "{name}-")
            .set("scheduler.listen", &scheduler)
            .set(&format!("scheduler.apps.{APP}.topic"), "{name}")
            .set("dlq_inspector.listen", &inspector)
            .set("dlq_inspector.redrive.edit", "true")
            .set("dlq_inspector.pipeline_audit.enabled", "true")
            .set("dlq_inspector.pipeline_audit.interval", "5s")
            .behave(reply)
            .create();
        let limit = [("max.message.bytes", MAX_RECORD)];
        raw::configure_topic(pipe.env.brokers(), &pipe.pipeline.dead_letter_topic(), &limit);
        let mut services: Vec<_> = SERVICES.map(|name| pipe.spawn(name, "a", &[])).into();
        services.iter_mut().for_each(ServiceProcess::until_ready);
        let urls = [("inspector", inspector), ("scheduler", scheduler)];
        let [inspector, scheduler] =
            urls.map(|(name, address)| format!("console.{name}.url=http://{address}"));
        let settings = ["console.listen=127.0.0.1:0", &inspector, &scheduler];
        let arguments: Vec<&str> = settings
            .into_iter()
            .flat_map(|setting| ["--set", setting])
            .collect();
        let mut console = pipe.start("console", "a", &arguments);
        let address = console.word_after(" address=").parse().unwrap();
        services.push(console);
        let house = Self {
            console: address,
            pipe,
            _services: services,
        };
        house.fill();
        house
    }

    /// Writes records: a third is rejected until it is redriven, a third always fails.
    pub(super) fn fill(&self) {
        let is = ["rejected", "broken", "fine"];
        let draft = |number: usize| {
            let value = format!("{{\"number\":{number},\"is\":\"{}\"}}", is[number % is.len()]);
            Draft::new(format!("order-{number}"), value)
        };
        self.pipe.produce((0..12).map(draft).collect());
    }

    /// What controls call the tier with the longer delay.
    pub(super) fn last_tier(&self) -> String {
        self.pipe.pipeline.policy.tiers()[1].to_string()
    }

    /// Runs a command of the CLI.
    #[track_caller]
    pub(super) fn command(&self, arguments: &[&str]) {
        let printed = self.pipe.redeliver(arguments);
        assert_eq!(printed.code, Some(0), "{arguments:?} {printed:?}");
    }
}

fn reply(request: &Request) -> Reply {
    let body = String::from_utf8_lossy(&request.body);
    let with = |status, text: &'static str| Reply::Status(status, Vec::new(), text.into());
    let end = request.key.as_deref().and_then(|key| key.rsplit('-').next());
    let is_redriven = end.is_some_and(|end| end.starts_with('r'));
    if body.contains("rejected") && !is_redriven {
        with(422, "rejected")
    } else if body.contains("broken") {
        with(500, "busy")
    } else if body.contains("hostile") {
        with(503, HOSTILE)
    } else {
        Reply::ok(request.body.clone())
    }
}
