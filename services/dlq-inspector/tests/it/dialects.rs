//! Dead letters that the frameworks themselves have written (`tests/frameworks`): what is read of them, and what a redrive gives back.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Headers, Record, Timestamp, redrive};
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::v1;
use redeliver_testkit::languages::{Libraries, java_with, run};
use redeliver_testkit::local_kafka::kafka_tool;
use redeliver_testkit::{LocalKafka, Process, brokers, eventually_async};

use crate::redrive::{done, plan, read};
use crate::support::{Client, DEADLINE, Dead, Inspector, InspectorEnv, get_letter, get_stats, list_groups};

/// The first version of Kafka whose share groups have dead-letter topics.
const KAFKA_WITH_SHARE_GROUP_DEAD_LETTERS: &str = "4.4.0";
/// The partition of the records.
const PARTITION: i32 = 1;

/// A source topic whose records fail in a framework, and the dead-letter topic that it writes.
struct World {
    env: InspectorEnv,
    source: Arc<str>,
    dlq: Arc<str>,
    /// What the source contains.
    records: Vec<Record>,
}

impl World {
    async fn new(env: InspectorEnv, dlq: &str) -> Self {
        let source: Arc<str> = format!("{}-orders", env.base.name()).into();
        let dlq: Arc<str> = dlq.into();
        env.recreate_topic(&source, 2).await;
        env.recreate_topic(&dlq, 2).await;
        let headers: Headers = [
            ("tenant", Some(&b"a\0\xff"[..])),
            ("tenant", None),
            ("tenant", Some(b"")),
        ]
        .into_iter()
        .collect();
        let values: [Option<&[u8]>; 3] = [Some(b"\xff\0v"), Some(b"!\xfe"), None];
        let dead = |(key, value): (u8, Option<&[u8]>)| Dead {
            key: Some(Bytes::copy_from_slice(&[0, 0xfe, key])),
            value: value.map(Bytes::copy_from_slice),
            headers: headers.clone(),
        };
        let records = (0..).zip(values).map(dead).collect();
        env.put(&source, PARTITION, records).await;
        let records = read(&env, &source);
        Self {
            env,
            source,
            dlq,
            records,
        }
    }

    async fn on_shared_kafka(name: &str) -> Self {
        let mut env = InspectorEnv::new(name);
        allow_redrives(&mut env);
        let dlq = format!("{}-orders-dlq", env.base.name());
        Self::new(env, &dlq).await
    }

    /// Starts a program, which needs the name of its consumer group or connector, and an empty directory or another argument.
    fn program(&self, name: &str, libraries: Libraries<'_>, brokers: &str, last: &str) -> Process {
        let mut command = java_with(&frameworks().join(format!("{name}.java")), libraries).unwrap();
        command.args([brokers, &*self.source, &*self.dlq, &*self.group(), last]);
        Process::spawn(command).unwrap()
    }

    /// The dead letters that a program writes, in the order of their origins. The program has ended.
    async fn written_by(&self, mut program: Process, inspector: &mut Inspector) -> Vec<v1::DeadLetter> {
        let filter = format!("topic = \"{}\"", self.dlq);
        let letters = eventually_async("a dead letter of each record", DEADLINE * 2, async || {
            let listed = inspector.list(&filter).await;
            if listed.len() == self.records.len() {
                return Ok(listed);
            }
            let output = program.output();
            let end = output.char_indices().rev().nth(3_000).map_or(0, |(at, _)| at);
            let (found, all) = (listed.len(), self.records.len());
            Err(format!("{found} of {all}\n{}", &output[end..]))
        })
        .await;
        program.kill_9();
        self.are_counted(&mut inspector.client().await, &filter).await;
        let times: Vec<Timestamp> = letters.iter().map(dead_at).collect();
        assert!(times.is_sorted_by(|one, other| one >= other), "{times:?}");
        let mut whole = Vec::new();
        for letter in letters {
            let got = get_letter(&mut inspector.client().await, &letter.id).await;
            whole.push(got.unwrap());
        }
        whole.sort_by_key(|letter| letter.origin.as_ref().unwrap().offset);
        whole
    }

    /// The counts and rates of the dead letters.
    async fn are_counted(&self, client: &mut Client, filter: &str) {
        let count = self.records.len() as u64;
        let topic = &get_stats(client, filter).await.topics[0];
        let found = (topic.total, topic.open, topic.last_hour);
        assert_eq!(found, (count, Some(count), count));
        let groups = list_groups(client, filter).await.groups;
        assert_eq!(groups.iter().map(|group| group.count).sum::<u64>(), count);
    }

    /// The name of the consumer group, application or connector.
    fn group(&self) -> String {
        format!("{}-billing", self.env.base.name())
    }

    /// What is the same in all dialects.
    #[track_caller]
    fn check(&self, letters: &[v1::DeadLetter], dialect: v1::HeaderDialect) {
        for (letter, record) in letters.iter().zip(&self.records) {
            assert_eq!(letter.dialect(), dialect, "{letter:?}");
            let origin = letter.origin.as_ref().unwrap();
            assert_eq!(
                (&*origin.topic, origin.partition, origin.offset),
                (&*self.source, PARTITION, record.position.offset)
            );
            assert_eq!((&letter.key, &letter.value), (&record.key, &record.value));
        }
    }

    /// Redrives all dead letters, and returns the records that were written to the source.
    async fn redriven(&self, inspector: &mut Inspector) -> Vec<Record> {
        let all = plan(v1::RedriveKind::Redrive, &format!("topic = \"{}\"", self.dlq));
        let job = done(inspector, all).await;
        assert_eq!(job.destinations[0].topic, &*self.source);
        assert_eq!(job.state(), v1::RedriveState::Succeeded, "{job:?}");
        let mut all = read(&self.env, &self.source);
        let is_redriven = |record: &Record| redrive::count(&record.headers) > 0;
        all.retain(is_redriven);
        all.sort_by_key(|record| record.key.clone());
        all
    }

    /// A redrive gives the records back byte for byte.
    async fn give_back(&self, inspector: &mut Inspector) {
        self.are_back(&self.redriven(inspector).await, |record| record.headers.clone());
    }

    #[track_caller]
    fn are_back(&self, redriven: &[Record], headers: impl Fn(&Record) -> Headers) {
        assert_eq!(redriven.len(), self.records.len());
        for (back, record) in redriven.iter().zip(&self.records) {
            assert_eq!((&back.key, &back.value), (&record.key, &record.value));
            let kept = back.headers.filtered(|name| !redrive::is_redrive_header(name));
            assert_eq!(kept, headers(record));
        }
    }

    /// When the records were written to the source.
    fn sent_at(&self) -> Vec<Timestamp> {
        self.records
            .iter()
            .map(|record| record.timestamp.unwrap())
            .collect()
    }
}

fn frameworks() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks")
}

/// Every topic of the test may be a destination.
fn allow_redrives(env: &mut InspectorEnv) {
    let pattern = format!("[\"{}-*\"]", env.base.name());
    env.base.set("dlq_inspector.redrive.destinations", &pattern);
}

fn dead_at(letter: &v1::DeadLetter) -> Timestamp {
    from_timestamp(letter.dead_at.as_ref().unwrap()).unwrap()
}

/// When the original records were written, as the dead letters say.
fn origin_timestamps(letters: &[v1::DeadLetter]) -> Vec<Option<Timestamp>> {
    let times = letters.iter().map(|letter| letter.origin_timestamp.as_ref());
    times.map(|time| time.and_then(from_timestamp)).collect()
}

/// The pipelines, error codes, error messages and attempts.
fn failures(letters: &[v1::DeadLetter]) -> Vec<(&str, &str, &str, u32)> {
    letters
        .iter()
        .map(|letter| {
            (
                &*letter.pipeline,
                &*letter.error_code,
                &*letter.error_message,
                letter.retry_count,
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_spring() {
    let world = World::on_shared_kafka("spring").await;
    let mut inspector = world.env.start().await;
    let libraries = frameworks().join("pom.xml");
    let program = world.program("Spring", Libraries::Pom(&libraries), &brokers(), "");
    let letters = world.written_by(program, &mut inspector).await;
    world.check(&letters, v1::HeaderDialect::Spring);
    let group = world.group();
    let failed = "java.lang.IllegalStateException";
    assert_eq!(
        failures(&letters),
        [
            (&*group, failed, "Listener failed; no customer [0, -2, 0]", 3),
            (
                &*group,
                "org.springframework.kafka.support.serializer.DeserializationException",
                "failed to deserialize",
                1
            ),
            (&*group, failed, "Listener failed; no customer [0, -2, 2]", 3),
        ]
    );
    let sent_at = world.sent_at();
    assert_eq!(
        origin_timestamps(&letters),
        sent_at.iter().copied().map(Some).collect::<Vec<_>>()
    );
    assert!(letters.iter().all(|letter| dead_at(letter) > sent_at[2]));
    world.give_back(&mut inspector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_connect() {
    let world = World::on_shared_kafka("connect").await;
    // Otherwise, they have the timestamps of the original records.
    let mut tool = kafka_tool("kafka.admin.ConfigCommand").unwrap();
    tool.args(["--bootstrap-server", &*brokers(), "--alter"]);
    tool.args(["--entity-type", "topics", "--entity-name", &*world.dlq]);
    tool.args(["--add-config", "message.timestamp.type=LogAppendTime"]);
    run(&mut tool).unwrap();
    let mut inspector = world.env.start().await;
    let directory = world.env.base.directory().join("connect");
    std::fs::create_dir(&directory).unwrap();
    let libraries = frameworks().join("pom.xml");
    let directory = directory.display().to_string();
    let program = world.program("Connect", Libraries::Pom(&libraries), &brokers(), &directory);
    let letters = world.written_by(program, &mut inspector).await;
    world.check(&letters, v1::HeaderDialect::Connect);
    let connector = world.group();
    let failure = (
        &*connector,
        "org.apache.kafka.connect.errors.DataException",
        "Converting byte[] to Kafka Connect data failed due to serialization error: ",
        0,
    );
    assert_eq!(failures(&letters), [failure; 3]);
    let sent_at = world.sent_at();
    for letter in &letters {
        assert_eq!(letter.timestamp_type(), v1::TimestampType::LogAppendTime);
        assert!(dead_at(letter) > sent_at[2]);
    }
    world.give_back(&mut inspector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_streams() {
    let world = World::on_shared_kafka("streams").await;
    let mut inspector = world.env.start().await;
    let libraries = frameworks().join("pom.xml");
    let directory = world.env.base.directory().join("streams").display().to_string();
    let program = world.program("Streams", Libraries::Pom(&libraries), &brokers(), &directory);
    let letters = world.written_by(program, &mut inspector).await;
    world.check(&letters, v1::HeaderDialect::Streams);
    let failed = "java.lang.IllegalStateException";
    assert_eq!(
        failures(&letters),
        [
            // Streams does not write the name of the application.
            ("", failed, "no customer [0, -2, 0]", 0),
            (
                "",
                "org.apache.kafka.common.errors.SerializationException",
                "no order",
                0
            ),
            ("", failed, "no customer [0, -2, 2]", 0),
        ]
    );
    // The topic keeps the timestamps that Streams gives them: those of the original records.
    assert_eq!(letters.iter().map(dead_at).collect::<Vec<_>>(), world.sent_at());
    world.give_back(&mut inspector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_smallrye() {
    let world = World::on_shared_kafka("smallrye").await;
    let mut inspector = world.env.start().await;
    let libraries = frameworks().join("pom.xml");
    let program = world.program("SmallRye", Libraries::Pom(&libraries), &brokers(), "");
    let letters = world.written_by(program, &mut inspector).await;
    world.check(&letters, v1::HeaderDialect::Smallrye);
    // Class and message are of the same exception, and not of its cause. SmallRye does not write the consumer group.
    let failed = ("", "java.lang.IllegalStateException", "no such customer", 0);
    let malformed = "org.apache.kafka.common.errors.RecordDeserializationException";
    assert_eq!(
        failures(&letters),
        [failed, ("", malformed, "no order", 0), failed]
    );
    assert!(letters.iter().all(|letter| dead_at(letter) > world.sent_at()[2]));
    world.give_back(&mut inspector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_share_groups() {
    let kafka = LocalKafka::start_version(KAFKA_WITH_SHARE_GROUP_DEAD_LETTERS).unwrap();
    let brokers = kafka.brokers();
    let libraries = Libraries::KafkaOf(KAFKA_WITH_SHARE_GROUP_DEAD_LETTERS);
    for is_copied in [true, false] {
        let mut env = InspectorEnv::on("share", &brokers);
        allow_redrives(&mut env);
        // Brokers require this prefix by default.
        let dlq = format!("dlq.{}", env.base.name());
        env.base.set("dlq_inspector.topics", &format!("[\"{dlq}\"]"));
        // If they are not copied, they are read at their origins.
        let sources = format!("{{\"{dlq}\":[\"{}-orders\"]}}", env.base.name());
        env.base.set("dlq_inspector.share_group_sources", &sources);
        let world = World::new(env, &dlq).await;
        let mut inspector = world.env.start().await;
        let program = world.program("ShareGroup", libraries, &brokers, &is_copied.to_string());
        let letters = world.written_by(program, &mut inspector).await;
        let group = world.group();
        let failure = (&*group, "", "Offset rejected by client.", 1);
        assert_eq!(failures(&letters), [failure; 3]);
        assert!(letters.iter().all(|letter| dead_at(letter) > world.sent_at()[2]));
        world.check(&letters, v1::HeaderDialect::ShareGroup);
        let at_origin = match is_copied {
            true => v1::PayloadAtOrigin::Unspecified,
            false => v1::PayloadAtOrigin::NotVerified,
        };
        assert!(
            letters
                .iter()
                .all(|letter| letter.payload_at_origin() == at_origin)
        );
        let redriven = world.redriven(&mut inspector).await;
        // A broker copies no headers.
        world.are_back(&redriven, |record| match is_copied {
            true => Headers::new(),
            false => record.headers.clone(),
        });
    }
}
