//! Shared by the tests: an [`InspectorEnv`] owns dead-letter topics that no other test uses, and starts inspectors that
//! read only these; an [`Inspector`] is one process.
//!
//! ```text
//! let env = InspectorEnv::new("list");
//! let topic = env.create_topic("a", 2).await;
//! env.put(&topic, 0, vec![dead("k", "v", &[("error-class", "permanent")])]).await;
//! let mut inspector = env.start().await;
//! let listed = inspector.list("error_class = permanent").await;
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Clock as _, Headers, HumanDuration, Output, Position, Record, SystemClock};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::topology::{self, Cleanup, Role, TopicSpec, TopologySpec};
use redeliver_kafka::transaction::Transactions;
use redeliver_proto::auth::SendToken;
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::{Message as _, error, v1};
use redeliver_service::identity::{NewToken, new_token};
use redeliver_testkit::{
    EnvBuilder, ServiceProcess, TestEnv, brokers, ensure, eventually, eventually_async, unique,
};
use serde_json::json;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

pub(crate) use redeliver_testkit::DEADLINE;

/// A connection with which the token of a caller, or none, is sent.
pub(crate) type Sending = InterceptedService<Channel, SendToken>;
pub(crate) type Client = DeadLetterServiceClient<Sending>;

/// The dead-letter topics of one test, and the configuration of inspectors that read them.
pub(crate) struct InspectorEnv {
    pub(crate) base: TestEnv,
    pub(crate) kafka: KafkaSettings,
    producer: Producer,
}

pub(crate) struct Inspector {
    pub(crate) process: ServiceProcess,
}

/// A record to write.
#[derive(Clone, Debug)]
pub(crate) struct Dead {
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    pub(crate) headers: Headers,
}

impl From<Record> for Dead {
    fn from(record: Record) -> Self {
        Self {
            key: record.key,
            value: record.value,
            headers: record.headers,
        }
    }
}

impl From<Output> for Dead {
    fn from(output: Output) -> Self {
        Self {
            key: output.key,
            value: output.value,
            headers: output.headers,
        }
    }
}

/// A dead letter with text headers.
pub(crate) fn dead(key: &str, value: impl Into<Bytes>, headers: &[(&str, &str)]) -> Dead {
    let headers = headers
        .iter()
        .map(|(name, value)| (*name, Some(value.as_bytes())));
    Dead {
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        value: Some(value.into()),
        headers: headers.collect(),
    }
}

pub(crate) async fn get_page(
    client: &mut Client,
    filter: &str,
) -> Result<v1::ListDeadLettersResponse, Status> {
    let request = v1::ListDeadLettersRequest {
        filter: filter.to_owned(),
        ..v1::ListDeadLettersRequest::default()
    };
    let page = client.list_dead_letters(request).await;
    page.map(Response::into_inner)
}

pub(crate) async fn get_letter(client: &mut Client, id: &str) -> Result<v1::DeadLetter, Status> {
    let request = v1::GetDeadLetterRequest { id: id.to_owned() };
    let letter = client.get_dead_letter(request).await;
    letter.map(Response::into_inner)
}

pub(crate) async fn get_payload(client: &mut Client, id: &str) -> Result<Vec<u8>, Status> {
    let request = v1::ReadPayloadRequest { id: id.to_owned() };
    let mut chunks = client.read_payload(request).await?.into_inner();
    let mut value = Vec::new();
    while let Some(chunk) = chunks.message().await? {
        value.extend(chunk.chunk);
    }
    Ok(value)
}

pub(crate) async fn get_stats(client: &mut Client, filter: &str) -> v1::DeadLetterStats {
    let request = v1::GetDeadLetterStatsRequest {
        filter: filter.to_owned(),
        ..v1::GetDeadLetterStatsRequest::default()
    };
    client.get_dead_letter_stats(request).await.unwrap().into_inner()
}

pub(crate) async fn get_group(client: &mut Client, id: &str) -> Result<v1::Group, Status> {
    let request = v1::GetGroupRequest { id: id.to_owned() };
    client.get_group(request).await.map(Response::into_inner)
}

pub(crate) async fn list_groups(client: &mut Client, filter: &str) -> v1::ListGroupsResponse {
    let request = v1::ListGroupsRequest {
        filter: filter.to_owned(),
        ..v1::ListGroupsRequest::default()
    };
    client.list_groups(request).await.unwrap().into_inner()
}

/// Watches dead letters that match and come from now on.
pub(crate) async fn watch_new(client: &mut Client, filter: &str) -> Streaming<v1::WatchDeadLettersResponse> {
    let request = v1::WatchDeadLettersRequest {
        filter: filter.to_owned(),
        only_new: true,
        ..v1::WatchDeadLettersRequest::default()
    };
    client.watch_dead_letters(request).await.unwrap().into_inner()
}

#[track_caller]
pub(crate) fn assert_refused(status: &Status, code: Code, why: &str) {
    let found = (status.code(), error::reason(status).unwrap_or_default());
    assert_eq!(found, (code, why.to_owned()), "{status:?}");
}

impl InspectorEnv {
    pub(crate) fn new(name: &str) -> Self {
        Self::of(EnvBuilder::new(name), &brokers())
    }

    /// On another broker than the shared one.
    pub(crate) fn on(name: &str, brokers: &str) -> Self {
        Self::of(EnvBuilder::new(name).brokers(brokers), brokers)
    }

    /// On the broker, with this in its configuration file.
    pub(crate) fn with_yaml_on(name: &str, yaml: &str, brokers: &str) -> Self {
        Self::of(EnvBuilder::new(name).brokers(brokers).yaml(yaml), brokers)
    }

    fn of(builder: EnvBuilder, brokers: &str) -> Self {
        let base = builder
            .creates_topics()
            .set("dlq_inspector.listen", "127.0.0.1:0")
            .set("audit.topic", "{name}-audit")
            .set("dlq_inspector.redrive.topic", "{name}-redrives")
            .set("dlq_inspector.topics", "[\"{name}-*-dlq\"]")
            .set("dlq_inspector.data_dir", "{dir}/data")
            .build();
        let kafka = KafkaSettings::new(brokers, format!("{}-test", base.name()));
        Self {
            producer: Producer::new(&kafka).unwrap(),
            base,
            kafka,
        }
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.base.directory().join("data")
    }

    /// Creates a dead-letter topic with a name that no other test uses.
    pub(crate) async fn create_topic(&self, name: &str, partitions: i32) -> Arc<str> {
        let topic: Arc<str> = format!("{}-{name}-dlq", self.base.name()).into();
        self.recreate_topic(&topic, partitions).await;
        topic
    }

    /// Creates a topic with this name, also one that was deleted.
    pub(crate) async fn recreate_topic(&self, topic: &Arc<str>, partitions: i32) {
        let spec = TopologySpec {
            topics: vec![TopicSpec {
                name: topic.clone(),
                role: Role::DeadLetters,
                records: "dead letters",
                setting: None,
                partitions,
                partitions_as: None,
                // As the brokers have it: some tests have three of them.
                replication: -1,
                retention: Some(HumanDuration::from_secs(7 * 86_400)),
                required_retention: Some(HumanDuration::from_secs(3_600)),
                sources: Vec::new(),
                largest: None,
                cleanup: Some(Cleanup::Delete),
            }],
        };
        topology::apply(&self.kafka.client(), &spec, DEADLINE)
            .await
            .unwrap();
    }

    /// Compresses what is written from now on.
    pub(crate) fn compress(&mut self, codec: &str) {
        let property = ("compression.type".to_owned(), codec.to_owned());
        self.kafka.properties.extend([property]);
        self.producer = Producer::new(&self.kafka).unwrap();
    }

    /// Writes records to a partition, and returns their positions.
    pub(crate) async fn put(&self, topic: &Arc<str>, partition: i32, records: Vec<Dead>) -> Vec<Position> {
        let outputs = outputs(topic, partition, records);
        let sending = outputs.iter().map(|output| self.producer.send(output));
        let written = futures::future::try_join_all(sending).await.unwrap();
        written.into_iter().map(|written| written.position).collect()
    }

    /// Writes records in a transaction, and aborts it after the broker has stored them.
    pub(crate) fn put_and_abort(&self, topic: &Arc<str>, partition: i32, records: Vec<Dead>) {
        let id = unique("aborted");
        let mut transactions = Transactions::new(self.kafka.transactional_producer(&id), &id, DEADLINE);
        let recover = |transactions: &mut Transactions| {
            eventually("a transactional producer", DEADLINE, || {
                let recovered = transactions.recover(Duration::from_secs(5));
                recovered.map_err(|error| error.to_string())
            });
        };
        recover(&mut transactions);
        let outputs = outputs(topic, partition, records);
        // The transaction fails because it has no consumer group, which is noticed once records are delivered.
        let error = transactions
            .write(&outputs, &Default::default(), None)
            .unwrap_err();
        assert!(error.to_string().contains("adding offsets"), "{error}");
        // Otherwise, it is open until it times out.
        recover(&mut transactions);
    }

    /// Writes a ledger entry.
    pub(crate) async fn put_ledger(&self, id: &str, entry: Option<v1::LedgerEntry>) {
        let value = entry.map(|entry| entry.encode_to_vec().into());
        self.write(redeliver_dlq_inspector::ledger::TOPIC, id, value)
            .await;
    }

    /// Writes a record.
    pub(crate) async fn write(&self, topic: &str, key: &str, value: Option<Bytes>) {
        let output = Output {
            topic: topic.into(),
            partition: None,
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value,
            headers: Headers::new(),
        };
        self.producer.send(&output).await.unwrap();
    }

    /// The configuration of the next inspectors has another directory.
    pub(crate) fn use_data_dir(&mut self, name: &str) {
        let directory = self.base.directory().join(name);
        self.base
            .set("dlq_inspector.data_dir", &directory.display().to_string());
    }

    /// Tokens for callers with these names and scopes, which inspectors accept that start afterwards.
    pub(crate) fn set_tokens<'n>(
        &mut self,
        callers: impl IntoIterator<Item = (&'n str, Vec<String>)>,
    ) -> BTreeMap<&'n str, NewToken> {
        let (mut tokens, mut entries) = (BTreeMap::new(), Vec::new());
        for (name, scopes) in callers {
            let token = new_token().unwrap();
            entries.push(json!({ "name": name, "sha256": token.sha256.to_string(), "scopes": scopes }));
            tokens.insert(name, token);
        }
        let file = self.base.directory().join("tokens");
        std::fs::write(&file, json!({ "tokens": entries }).to_string()).unwrap();
        self.base
            .set("dlq_inspector.auth.tokens_file", &file.display().to_string());
        tokens
    }

    /// Starts an inspector without waiting for it. Its instance has the name of its directory: several inspectors need different ones.
    pub(crate) fn spawn(&self) -> Inspector {
        Inspector {
            process: self.base.spawn("dlq-inspector", &self.instance(), &[]),
        }
    }

    fn instance(&self) -> String {
        let directory = PathBuf::from(&self.base.settings()["dlq_inspector.data_dir"]);
        let name = directory.file_name().and_then(|name| name.to_str());
        name.expect("a directory").to_owned()
    }

    /// Starts an inspector, and waits until it serves and has read the jobs.
    pub(crate) async fn start(&self) -> Inspector {
        let mut inspector = self.spawn();
        inspector.until_serving().await;
        inspector.until_jobs_read().await;
        inspector
    }
}

fn outputs(topic: &Arc<str>, partition: i32, records: Vec<Dead>) -> Vec<Output> {
    let output = |dead: Dead| Output {
        topic: topic.clone(),
        partition: Some(partition),
        key: dead.key,
        value: dead.value,
        headers: dead.headers,
    };
    records.into_iter().map(output).collect()
}

impl Inspector {
    /// Waits until it has read the jobs of redrives.
    pub(crate) async fn until_jobs_read(&mut self) {
        let process = &mut self.process;
        eventually_async("the jobs are read", DEADLINE, async || {
            let readable = process.metric("redeliver_dlq_redrives_readable");
            ensure(readable == 1, readable)
        })
        .await;
    }

    pub(crate) async fn channel(&mut self) -> Channel {
        let url = format!("http://{}", self.process.word_after(" api="));
        let endpoint = tonic::transport::Endpoint::from_shared(url).unwrap();
        endpoint.connect().await.unwrap()
    }

    pub(crate) async fn client(&mut self) -> Client {
        let channel = self.channel().await;
        DeadLetterServiceClient::with_interceptor(channel, SendToken::default())
            .max_decoding_message_size(64 << 20)
    }

    /// The health of the server and of its service.
    pub(crate) async fn health(&mut self) -> [Result<ServingStatus, Status>; 2] {
        let mut health = HealthClient::new(self.channel().await);
        let mut states = Vec::new();
        for service in ["", "redeliver.v1.DeadLetterService"] {
            let request = HealthCheckRequest {
                service: service.to_owned(),
            };
            let response = health.check(request).await;
            states.push(response.map(|response| response.into_inner().status()));
        }
        states.try_into().unwrap()
    }

    pub(crate) async fn until_serving(&mut self) {
        let serving = [Some(ServingStatus::Serving); 2];
        eventually_async("the inspector serves", DEADLINE, async || {
            let health = self.health().await.map(Result::ok);
            let holds = health == serving;
            ensure(holds, format!("{health:?}\n{}", self.process.output()))
        })
        .await;
    }

    /// All dead letters that match, newest first.
    pub(crate) async fn list(&mut self, filter: &str) -> Vec<v1::DeadLetter> {
        let request = v1::ListDeadLettersRequest {
            filter: filter.to_owned(),
            page_size: 1000,
            ..v1::ListDeadLettersRequest::default()
        };
        let mut client = self.client().await;
        let page = client.list_dead_letters(request).await.unwrap().into_inner();
        assert_eq!(page.next_page_token, "", "there are more pages");
        page.dead_letters
    }

    /// Waits until `count` dead letters match.
    pub(crate) async fn until_listed(&mut self, filter: &str, count: usize) -> Vec<v1::DeadLetter> {
        eventually_async("the expected number of dead letters", DEADLINE, async || {
            let listed = self.list(filter).await;
            ensure(listed.len() == count, format!("{} of {count}", listed.len())).map(|()| listed)
        })
        .await
    }

    /// Waits until answers are complete as of a time that is this far from now.
    pub(crate) async fn until_surveyed_after(&mut self, time: Duration) {
        let later = SystemClock.now().after(time);
        let mut client = self.client().await;
        eventually_async("a later survey", DEADLINE, async || {
            let completeness = get_stats(&mut client, "").await.completeness.unwrap();
            let as_of = completeness.as_of.as_ref().and_then(from_timestamp);
            let holds = completeness.complete && as_of.is_some_and(|as_of| as_of > later);
            ensure(holds, format!("{completeness:?}"))
        })
        .await;
    }

    /// The page `/metrics` of the admin listener.
    pub(crate) fn metrics(&mut self) -> String {
        self.process.get("/metrics").1
    }
}

/// The ids of dead letters.
pub(crate) fn ids(letters: &[v1::DeadLetter]) -> Vec<&str> {
    letters.iter().map(|letter| letter.id.as_str()).collect()
}
