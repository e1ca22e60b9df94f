//! A pipeline with a scheduler, whose application `demo` writes to the pipeline's source, and an inspector of the
//! pipeline's dead letters.

use std::path::Path;
use std::sync::Arc;

use redeliver_core::Record;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{CommandOutput, Reply, ServiceProcess, ensure, eventually, free_port};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder};

/// The application of the scheduler.
pub(crate) const APP: &str = "demo";

pub(crate) struct Services {
    pub(crate) pipe: Pipe,
    /// `host:port` of the scheduler.
    pub(crate) scheduler: String,
    /// `host:port` of the inspector.
    pub(crate) inspector: String,
    _data: Scratch,
}

impl Services {
    /// Creates the configuration and the topics. Bodies that contain `hopeless` fail permanently, those with `busy` fail at
    /// each attempt, those with `shaky` fail at the first one, those with `later` must be retried in an hour, and those with `slow`
    /// get no answer.
    pub(crate) fn new(name: &str) -> Self {
        let data = Scratch::new("inspector").unwrap();
        let address = || format!("127.0.0.1:{}", free_port());
        let (scheduler, inspector) = (address(), address());
        let setup = PipeBuilder::new(name).tiers(&[300]).behave(|request| {
            let body = String::from_utf8_lossy(&request.body);
            if body.contains("hopeless") {
                Reply::Status(404, Vec::new(), "no such page".into())
            } else if body.contains("busy") || (body.contains("shaky") && request.earlier_calls_of_body == 0)
            {
                Reply::status(503)
            } else if body.contains("later") {
                let hour = vec![("retry-after".to_owned(), "3600".to_owned())];
                Reply::Status(429, hour, "not now".into())
            } else if body.contains("slow") {
                Reply::Hang
            } else {
                Reply::ok(request.body.clone())
            }
        });
        let (source, dead) = (
            setup.name().to_owned(),
            format!("[{0}-dlq, {0}-*-dlq]", setup.name()),
        );
        let pipe = setup
            .through_scheduler()
            .set("scheduler.listen", &scheduler)
            .set(&format!("scheduler.apps.{APP}.topic"), &source)
            .set("scheduler.max_ahead", "36500d")
            .set("dlq_inspector.listen", &inspector)
            .set("dlq_inspector.topics", &dead)
            .set("dlq_inspector.data_dir", path(data.path()))
            .create();
        Self {
            pipe,
            scheduler,
            inspector,
            _data: data,
        }
    }

    /// Starts an inspector, and waits until it is ready.
    pub(crate) fn inspect(&self) -> ServiceProcess {
        self.pipe.start("dlq-inspector", "a", &[])
    }

    /// The records of the application's topic, once it has this many.
    pub(crate) fn dispatched(&self, count: usize) -> Vec<Record> {
        let topic: Arc<str> = self.pipe.name().into();
        self.until(&topic, count)
    }

    /// Produces bodies that become dead letters, one after the other, and returns the dead letters in this order.
    pub(crate) fn produce_dead_letters(&self, bodies: &[&str]) -> Vec<Record> {
        let before = self.pipe.read(&[self.pipe.pipeline.dead_letter_topic()]).len();
        for (index, body) in bodies.iter().enumerate() {
            let draft = Draft::new(format!("key-{body}"), body.to_string()).header("tenant", b"x");
            self.pipe.produce(vec![draft]);
            self.until(&self.pipe.pipeline.dead_letter_topic(), before + index + 1);
        }
        let dead = self.pipe.read(&[self.pipe.pipeline.dead_letter_topic()]);
        let of = |body: &&str| {
            dead.iter()
                .find(|record| record.value.as_deref() == Some(body.as_bytes()))
        };
        bodies.iter().map(|body| of(body).unwrap().clone()).collect()
    }

    fn until(&self, topic: &Arc<str>, count: usize) -> Vec<Record> {
        eventually(&format!("{count} records in {topic}"), DEADLINE, || {
            let records = self.pipe.read(std::slice::from_ref(topic));
            ensure(records.len() >= count, records.len()).map(|()| records)
        })
    }

    /// Runs a command of the CLI that must succeed without writing to stderr, but for the cluster that it changes, and returns its stdout.
    #[track_caller]
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        let printed = self.pipe.until_taken(arguments);
        let said = printed.stderr.lines().find(|line| !line.starts_with("cluster "));
        assert_eq!((printed.code, said), (Some(0), None), "{arguments:?} {printed:?}");
        printed.stdout
    }

    /// As [`Services::cli`], with JSON output.
    #[track_caller]
    pub(crate) fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let printed = self.cli(&[arguments, &["-o", "json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
    }

    /// Runs a command of the CLI that must fail with this exit status.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, arguments: &[&str]) -> CommandOutput {
        let printed = self.pipe.redeliver(arguments);
        assert_eq!(printed.code, Some(code), "{arguments:?} {printed:?}");
        printed
    }
}

/// The inspector's id of a dead letter.
pub(crate) fn id(record: &Record) -> String {
    let place = &record.position;
    format!("{}/{}/{}", place.topic, place.partition, place.offset)
}

pub(crate) fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}
