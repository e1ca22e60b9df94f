//! Releases of what waits in the scheduler: while it is killed, its topics grow, and the topic to which it releases is deleted and
//! created again.

use redeliver_core::SchedulerTopics;
use redeliver_testkit::kafka_request::create_partitions;

use super::*;

/// A pipeline whose records wait in the scheduler until tomorrow after their first attempt, with an enricher and an inspector.
struct Waits {
    pipe: Pipe,
    topics: SchedulerTopics,
    enricher: ServiceProcess,
    inspector: ServiceProcess,
    sent: Vec<Sent>,
}

impl Waits {
    fn of(builder: PipeBuilder) -> Self {
        let pipe = builder
            .tiers(&[300])
            .through_scheduler()
            .with_inspector()
            .pipeline("http.max_retry_after", "1d")
            .behave(|request| match request.earlier_calls_of_key {
                0 => {
                    let headers = vec![("retry-after".to_owned(), "36000".to_owned())];
                    Reply::Status(503, headers, "tomorrow".into())
                }
                _ => Reply::ok(request.body.clone()),
            })
            .create();
        let (_, topics) = pipe.jobs.clone().unwrap();
        Self {
            topics,
            enricher: pipe.enricher("a"),
            inspector: pipe.start("dlq-inspector", "a", &[]),
            sent: Vec::new(),
            pipe,
        }
    }

    fn produce(&mut self, prefix: &str, count: usize) {
        self.sent.extend(self.pipe.produce(drafts(prefix, count)));
    }

    /// Produces more records, and waits until all have been given to the scheduler.
    #[track_caller]
    fn let_wait(&mut self, prefix: &str, count: usize) {
        self.produce(prefix, count);
        let count = self.sent.len();
        until_seen("commands", || self.commands().len(), |&n| n >= count);
    }

    /// What has been given to the scheduler.
    fn commands(&self) -> Vec<redeliver_core::Record> {
        self.pipe.read(std::slice::from_ref(&self.topics.ingest))
    }

    fn name(&self) -> String {
        format!("tier/{}/scheduler", self.pipe.name())
    }

    #[track_caller]
    fn release(&mut self) {
        let name = self.name();
        let cli = Cli::new(&self.pipe, &mut self.inspector);
        let released_at = cli.change(&["release", &name])["released_at"].clone();
        assert!(released_at.is_string(), "{released_at}");
    }

    #[track_caller]
    fn until_more_released(&self, before: usize, enough: usize) {
        let now = || released(&self.pipe);
        until_seen("released", now, |&now| now > before || now >= enough);
    }

    /// Waits until this many records have ended. The others wait.
    #[track_caller]
    fn until_only_these_ended(&self, count: usize) {
        self.pipe.watch().until_ended(count, DEADLINE);
        let waiting = self.sent.len() - count;
        let report = eventually("the others wait", DEADLINE, || {
            let report = self.pipe.audit();
            assert!(report.is_clean(), "{report}");
            match report.waiting.total() {
                now if now == waiting as u64 => Ok(report),
                _ => Err(report.to_string()),
            }
        });
        assert_eq!(report.output, count as u64, "{report}");
    }

    /// Waits until all records have ended: each has one result, and none is dead.
    #[track_caller]
    fn settle(&self) {
        let report = self.pipe.settle(&self.sent, DEADLINE).report;
        assert_eq!(
            (report.output, report.dead),
            (self.sent.len() as u64, 0),
            "{report}"
        );
    }
}

#[test]
fn release_survives_scheduler_kills() {
    const RECORDS: usize = 800;
    let mut waits = Waits::of(PipeBuilder::new("control-waits"));
    let mut scheduler = waits.pipe.scheduler("a");
    waits.let_wait("waits", RECORDS);
    let name = waits.name();
    let cli = Cli::new(&waits.pipe, &mut waits.inspector);
    let refused = cli.run(&["pause", &name, "--reason", "test"]);
    assert!(refused.stderr.contains("can only be released"), "{refused:?}");
    waits.release();
    waits.produce("late", 20);
    for _ in 0..3 {
        scheduler.kill_9();
        let before = released(&waits.pipe);
        scheduler.start_again();
        waits.until_more_released(before, RECORDS);
    }
    waits.until_only_these_ended(RECORDS);
    waits.release();
    waits.settle();
}

#[test]
#[ignore = "long"]
fn release_survives_growing_scheduler_topics() {
    const BEFORE: i32 = 4;
    const AFTER: i32 = 7;
    let mut waits = Waits::of(PipeBuilder::new("control-waits-grow").partitions(BEFORE.unsigned_abs()));
    let mut scheduler = waits.pipe.scheduler("a");
    waits.let_wait("waits", 1_000);
    // Not all commands are jobs yet.
    scheduler.kill_9();
    waits.let_wait("unread", 500);
    waits.release();
    scheduler.start_again();
    waits.until_more_released(0, 1);
    for topic in [&waits.topics.state, &waits.topics.ingest] {
        create_partitions(waits.pipe.env.brokers(), topic, AFTER);
    }
    scheduler.until_not_ready(&format!("has {AFTER} partitions; it had {BEFORE}"));
    // The enricher chooses among the new partitions, too.
    for process in [&mut scheduler, &mut waits.enricher] {
        process.kill_and_restart();
    }
    waits.let_wait("late", 60);
    let commands = waits.commands();
    let is_new = |record: &&redeliver_core::Record| record.position.partition >= BEFORE;
    assert!(commands.iter().any(|record| is_new(&record)));
    waits.until_only_these_ended(1_500);
    waits.release();
    waits.settle();
}

#[test]
fn release_waits_for_recreated_due_topic() {
    let mut waits = Waits::of(PipeBuilder::new("control-waits-due"));
    let mut scheduler = waits.pipe.scheduler("a");
    waits.let_wait("first", 50);
    waits.release();
    waits.pipe.watch().until_ended(50, DEADLINE);
    waits.let_wait("waits", 100);
    let topic = waits.pipe.pipeline.return_topic();
    delete_topic(waits.pipe.env.brokers(), &topic);
    waits.release();
    let until_missing = |scheduler: &mut ServiceProcess, count: u64| {
        scheduler.until_metric("redeliver_scheduler_unavailable_topic_jobs", |missing| {
            missing == count
        });
    };
    until_missing(&mut scheduler, 100);
    eventually("the topic exists again", DEADLINE, || {
        let applied = waits.pipe.redeliver(&["topics", "apply"]);
        let is_created = applied.stdout.contains(&format!("created  {topic}\n"));
        let is_done = applied.code == Some(0) && is_created;
        ensure(is_done, applied.stdout)
    });
    scheduler.kill_and_restart();
    waits.pipe.watch().until_ended(150, DEADLINE);
    until_missing(&mut scheduler, 0);
    waits.settle();
}
