//! Shared by the tests: a [`LakeEnv`] owns topics and tables that no other test uses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use delta_kernel::arrow::array::{Array as _, AsArray as _, RecordBatch};
use delta_kernel::arrow::datatypes::{Int32Type, Int64Type};
use redeliver_core::headers::{Origin, PROCESS_AFTER, RETURN_TOPIC, write_failure, write_lineage};
use redeliver_core::{ErrorClass, Failure, Headers, HumanDuration, Output, Pipeline, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::survey::Surveyor;
use redeliver_kafka::topology::{self, Cleanup, Role, TopicSpec, TopologySpec};
use redeliver_kafka::transaction::Transactions;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{
    CommandOutput, DEADLINE, EnvBuilder, ServiceProcess, TestEnv, eventually, unique, until_seen,
};
use tokio::runtime::Handle;

/// A row, or a record: topic, partition and offset.
pub(crate) type Key = (String, i32, i64);

#[derive(Clone)]
pub(crate) struct LakeEnv {
    pub(crate) base: TestEnv,
    pub(crate) kafka: KafkaSettings,
    pub(crate) producer: Producer,
}

impl LakeEnv {
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, "retry: { tiers: [5s] }")
    }

    /// A pipeline with these settings.
    pub(crate) fn with(name: &str, pipeline: &str) -> Self {
        Self::build(EnvBuilder::new(name), pipeline)
    }

    /// As [`LakeEnv::new`], with a Kafka of the test.
    pub(crate) fn at(brokers: &str, name: &str) -> Self {
        Self::build(EnvBuilder::new(name).brokers(brokers), "retry: { tiers: [5s] }")
    }

    fn build(builder: EnvBuilder, pipeline: &str) -> Self {
        let base = builder
            .creates_topics()
            .yaml(&format!(
                "pipelines: {{ '{{name}}': {{ output: '{{name}}-out', {pipeline} }} }}\n"
            ))
            .set("dlq_inspector.listen", "127.0.0.1:0")
            .set("dlq_inspector.data_dir", "{dir}/index")
            .set("dlq_inspector.redrive.topic", "{name}-redrives")
            .set("dlq_inspector.topics", "[\"{name}-dlq\"]")
            .set("lake.location", "{dir}/lake")
            .set("lake.flush_interval", "100ms")
            .set("lake.headers", "[\"tenant\"]")
            .set("scheduler.topics.state", "{name}-state")
            .build();
        let kafka = KafkaSettings::new(base.brokers(), format!("{}-test", base.name()));
        Self {
            producer: Producer::new(&kafka).unwrap(),
            base,
            kafka,
        }
    }

    /// The topics of the pipeline that are in tables.
    pub(crate) fn topics(&self) -> [Arc<str>; 3] {
        ["dlq", "out", "retry-5s"].map(|suffix| format!("{}-{suffix}", self.base.name()).into())
    }

    /// Creates the topics, each with two partitions.
    pub(crate) async fn create_topics(&self) {
        self.create(&self.topics()).await;
    }

    pub(crate) async fn create_topic(&self, topic: &Arc<str>) {
        self.create(std::slice::from_ref(topic)).await;
    }

    pub(crate) async fn create(&self, topics: &[Arc<str>]) {
        let surveyor = Surveyor::new(&self.kafka).unwrap();
        eventually("the topics do not exist", DEADLINE, || {
            match surveyor.topics(|name| topics.iter().any(|topic| **topic == *name)) {
                Ok(topics) if topics.is_empty() => Ok(()),
                found => Err(format!("{found:?}")),
            }
        });
        let spec = |topic: &Arc<str>| TopicSpec {
            name: topic.clone(),
            role: Role::DeadLetters,
            records: "records",
            setting: None,
            partitions: 2,
            partitions_as: None,
            replication: -1,
            retention: Some(HumanDuration::from_secs(7 * 86_400)),
            required_retention: Some(HumanDuration::from_secs(3_600)),
            sources: Vec::new(),
            largest: None,
            cleanup: Some(Cleanup::Delete),
        };
        let spec = TopologySpec {
            topics: topics.iter().map(spec).collect(),
        };
        topology::apply(&self.kafka.client(), &spec, DEADLINE)
            .await
            .unwrap();
    }

    /// Writes records to both partitions of a topic.
    pub(crate) async fn put(&self, topic: &Arc<str>, count: usize) {
        for output in outputs(topic, count) {
            self.producer.send(&output).await.unwrap();
        }
    }

    /// Writes records with these values.
    pub(crate) async fn put_values(&self, topic: &Arc<str>, values: &[String]) {
        for value in values {
            let output = Output {
                topic: topic.clone(),
                partition: None,
                key: None,
                value: Some(value.clone().into()),
                headers: Headers::new(),
            };
            self.producer.send(&output).await.unwrap();
        }
    }

    /// Writes the records with these offsets in the source, as the services write them after so many failures, and the last one at `failed_at`.
    pub(crate) async fn put_failed(
        &self,
        topic: &Arc<str>,
        offsets: Range<i64>,
        failures: u32,
        failed_at: i64,
    ) {
        let pipeline = self.base.name();
        for offset in offsets {
            let origin = Origin {
                topic: pipeline.into(),
                partition: 0,
                offset,
                timestamp: Some(Timestamp::from_millis(offset)),
            };
            let failure = Failure::new(
                ErrorClass::Transient,
                "http.503",
                format!("503 for user {offset}"),
            );
            let mut headers = Headers::new();
            headers.push_text("tenant", &format!("t{}", offset % 2));
            write_lineage(&mut headers, pipeline, &origin, failures);
            if failures > 0 {
                write_failure(&mut headers, &failure, Timestamp::from_millis(failed_at));
                let due = Timestamp::from_millis(failed_at + 5_000);
                headers.push_text(PROCESS_AFTER, &due.to_string());
                headers.push_text(RETURN_TOPIC, &Pipeline::new(pipeline).return_topic());
            }
            let output = Output {
                topic: topic.clone(),
                partition: None,
                key: Some(format!("k{offset}").into()),
                value: Some(Bytes::from_static(b"{}")),
                headers,
            };
            self.producer.send(&output).await.unwrap();
        }
    }

    /// Writes the state of a job that was due at `due`, and was dispatched at `ended`.
    pub(crate) async fn put_job(&self, topic: &Arc<str>, due: i64, ended: i64) {
        let job = v1::JobRecord {
            state: v1::JobState::Dispatched.into(),
            due_ms: due,
            ended_ms: Some(ended),
            ..v1::JobRecord::default()
        };
        let output = Output {
            topic: topic.clone(),
            partition: None,
            key: Some(format!("job-{ended}").into()),
            value: Some(job.encode_to_vec().into()),
            headers: Headers::new(),
        };
        self.producer.send(&output).await.unwrap();
    }

    /// Writes records in a transaction, and aborts it after the broker has stored them.
    pub(crate) fn put_and_abort(&self, topic: &Arc<str>, count: usize) {
        let id = unique("aborted");
        let mut transactions = Transactions::new(self.kafka.transactional_producer(&id), &id, DEADLINE);
        let recover = |transactions: &mut Transactions| {
            eventually("a transactional producer", DEADLINE, || {
                let recovered = transactions.recover(Duration::from_secs(5));
                recovered.map_err(|error| error.to_string())
            });
        };
        recover(&mut transactions);
        // The transaction fails because it has no consumer group.
        let written = transactions.write(&outputs(topic, count), &Default::default(), None);
        assert!(written.is_err());
        recover(&mut transactions);
    }

    /// Starts a lake without waiting for it.
    pub(crate) fn spawn(&self, instance: &str) -> ServiceProcess {
        self.base.spawn("redeliver-lake", instance, &[])
    }

    /// What a read_committed consumer sees of topics.
    pub(crate) fn records(&self, topics: &[Arc<str>]) -> Vec<Key> {
        let mut reader = TopicReader::new(&self.kafka, topics).unwrap();
        let mut keys = Vec::new();
        reader
            .read_to_end(DEADLINE, |record| {
                let at = record.position;
                keys.push((at.topic.to_string(), at.partition, at.offset));
            })
            .unwrap();
        keys.sort_unstable();
        keys
    }

    /// The directory of the tables.
    pub(crate) fn lake(&self) -> PathBuf {
        self.base.directory().join("lake")
    }

    /// Writes to a topic until a table has so many files.
    pub(crate) async fn put_files(&self, table: &str, topic: &Arc<str>, count: usize) {
        let files = || {
            let objects = objects(&self.lake().join(table)).into_iter();
            let files = objects.filter(|path| path.extension().is_some_and(|end| end == "parquet"));
            files
                .filter(|path| !path.components().any(|part| part.as_os_str() == "_delta_log"))
                .count()
        };
        let mut before = files();
        while before < count {
            self.put(topic, 2).await;
            before = eventually("there is another file", DEADLINE, || match files() {
                now if now > before => Ok(now),
                now => Err(now),
            });
        }
    }

    /// Makes all objects older.
    pub(crate) fn age(&self, by: Duration) {
        for object in objects(&self.lake()) {
            // The service may be renaming it.
            let Ok(file) = std::fs::File::options().append(true).open(object) else {
                continue;
            };
            let written = file.metadata().unwrap().modified().unwrap();
            file.set_modified(written - by).unwrap();
        }
    }

    /// Maintains the tables, and returns the numbers that are printed about one: files, merged, into, deleted.
    pub(crate) fn maintain(&self, table: &str) -> Vec<usize> {
        let maintained = self.base.run("redeliver-lake", &["maintain"]);
        assert_eq!(maintained.code, Some(0), "{maintained:?}");
        numbers(&maintained, table)
    }

    /// All rows of a table; none while it is missing.
    pub(crate) fn rows(&self, table: &str) -> Vec<RecordBatch> {
        let location = self.lake();
        redeliver_lake::read(location.to_str().unwrap(), table, &Handle::current()).unwrap_or_default()
    }

    /// The records of these topics of which a table has rows: one for each row.
    pub(crate) fn keys(&self, table: &'static str, topics: &[Arc<str>]) -> Vec<Key> {
        let mut keys = Vec::new();
        for rows in self.rows(table) {
            let column = |name: &str| rows.column_by_name(name).unwrap();
            let topic = column("kafka_topic").as_string::<i32>();
            let partition = column("kafka_partition").as_primitive::<Int32Type>();
            let offset = column("kafka_offset").as_primitive::<Int64Type>();
            keys.extend((0..rows.num_rows()).map(|row| {
                (
                    topic.value(row).to_owned(),
                    partition.value(row),
                    offset.value(row),
                )
            }));
        }
        keys.retain(|(topic, _, _)| topics.iter().any(|wanted| **wanted == **topic));
        keys.sort_unstable();
        keys
    }

    /// Waits until a table has so many rows of a topic.
    pub(crate) fn until_rows(&self, table: &'static str, topic: &Arc<str>, count: usize) {
        let found = || self.keys(table, std::slice::from_ref(topic)).len();
        until_seen(&format!("all rows of {topic} are in {table}"), found, |&found| {
            found == count
        });
    }

    /// Waits until the tables have all records of the topics, and panics if they have one twice.
    pub(crate) fn until_complete(&self) {
        let [dead, out, tier] = self.topics();
        for (table, topics) in [
            ("attempts", vec![tier]),
            ("dead_letters", vec![dead.clone()]),
            ("outcomes", vec![dead, out]),
        ] {
            let expected = self.records(&topics);
            let found = eventually(&format!("{table} is complete"), DEADLINE, || {
                let found = self.keys(table, &topics);
                if found.len() >= expected.len() {
                    return Ok(found);
                }
                Err(format!("{} of {} rows", found.len(), expected.len()))
            });
            assert_eq!(found, expected, "{table}");
        }
    }

    /// What did not fit into the rows of a table.
    pub(crate) fn unfit(&self, table: &str) -> Vec<String> {
        let mut unfit = Vec::new();
        for rows in self.rows(table) {
            let column = rows.column_by_name("unfit").unwrap().as_string::<i32>();
            unfit.extend(column.iter().flatten().map(str::to_owned));
        }
        unfit
    }

    /// The rows of `gaps`: how many offsets are missing, by table and cause.
    pub(crate) fn gaps(&self) -> BTreeMap<(String, String), i64> {
        let mut gaps = BTreeMap::new();
        for rows in self.rows("gaps") {
            let column = |name: &str| rows.column_by_name(name).unwrap();
            let text = |name: &str, row| column(name).as_string::<i32>().value(row).to_owned();
            let number = |name: &str, row| column(name).as_primitive::<Int64Type>().value(row);
            for row in 0..rows.num_rows() {
                assert!(column("unfit").is_null(row));
                let missing = number("until_offset", row) - number("kafka_offset", row);
                *gaps
                    .entry((text("table_name", row), text("cause", row)))
                    .or_default() += missing;
            }
        }
        gaps
    }
}

/// The objects in a directory and all directories in it.
pub(crate) fn objects(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(objects(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// The numbers that a command prints about a table; none if it prints nothing about it.
pub(crate) fn numbers(printed: &CommandOutput, table: &str) -> Vec<usize> {
    let mut lines = printed.stdout.lines().map(str::split_whitespace);
    let line = lines.find(|line| line.clone().next() == Some(table));
    let numbers = line.into_iter().flatten().skip(1);
    numbers.map(|number| number.parse().unwrap()).collect()
}

/// Records for both partitions of a topic in turn.
fn outputs(topic: &Arc<str>, count: usize) -> Vec<Output> {
    let output = |(number, partition)| Output {
        topic: topic.clone(),
        partition: Some(partition),
        key: Some(format!("k{number}").into()),
        value: Some(Bytes::from_static(b"{}")),
        headers: Headers::new(),
    };
    (0..count).zip([0, 1].into_iter().cycle()).map(output).collect()
}
