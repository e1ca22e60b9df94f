//! What the tests share: a [`Setup`] owns dead-letter topics that no other test has, and starts inspectors that
//! see these alone; an [`Inspector`] is one process.
//!
//! ```text
//! let setup = Setup::new("list");
//! let topic = setup.topic("a", 2).await;
//! setup.put(&topic, 0, vec![dead("k", "v", &[("error-class", "permanent")])]).await;
//! let mut inspector = setup.start();
//! inspector.until_serving().await;
//! let listed = inspector.list("error_class = permanent").await;
//! ```

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Headers, Output, Position, Span};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::topology::{self, Cleanup, Role, TopicSpec, TopologySpec};
use redeliver_kafka::transaction::Transactions;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Process, binary, brokers, eventually, eventually_async, unique};
use tonic::Status;
use tonic::transport::Channel;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

/// How long anything may take on a machine that is busy with other tests.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) type Client = DeadLetterServiceClient<Channel>;

/// Dead-letter topics of one test, and what inspectors of them need.
pub(crate) struct Setup {
    /// What all names of the test begin with.
    pub(crate) name: String,
    pub(crate) kafka: KafkaSettings,
    pub(crate) scratch: Scratch,
    pub(crate) settings: Vec<(String, String)>,
    producer: Producer,
}

/// A process of ours; killed when it is dropped.
pub(crate) struct Inspector {
    pub(crate) process: Process,
    address: Option<String>,
}

/// A record to be written.
#[derive(Clone, Debug)]
pub(crate) struct Dead {
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    pub(crate) headers: Headers,
}

/// A dead letter with headers of text.
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

impl Setup {
    pub(crate) fn new(name: &str) -> Self {
        Self::on(name, &brokers())
    }

    /// On a broker of the test's own.
    pub(crate) fn on(name: &str, brokers: &str) -> Self {
        let name = unique(name);
        let kafka = KafkaSettings::new(brokers, format!("{name}-test"));
        let scratch = Scratch::new("dlq-inspector").unwrap();
        let data = scratch.path().join("data").display().to_string();
        let pattern = format!("[\"{name}-*-dlq\"]");
        let settings = [
            ("kafka.brokers", brokers),
            ("kafka.topics.create", "true"),
            ("kafka.topics.replication", "1"),
            ("admin.listen", "127.0.0.1:0"),
            ("dlq_inspector.listen", "127.0.0.1:0"),
            ("dlq_inspector.topics", &pattern),
            ("dlq_inspector.data_dir", &data),
        ];
        let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        Self {
            producer: Producer::new(&kafka).unwrap(),
            settings: settings.map(owned).to_vec(),
            name,
            kafka,
            scratch,
        }
    }

    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.settings.push((key.to_owned(), value.to_owned()));
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    /// Makes a dead-letter topic of this test.
    pub(crate) async fn topic(&self, name: &str, partitions: i32) -> Arc<str> {
        let topic: Arc<str> = format!("{}-{name}-dlq", self.name).into();
        self.make_topic(&topic, partitions).await;
        topic
    }

    pub(crate) async fn make_topic(&self, topic: &Arc<str>, partitions: i32) {
        let spec = TopologySpec {
            topics: vec![TopicSpec {
                name: topic.clone(),
                role: Role::Pipeline(TopicRole::DeadLetter),
                partitions,
                partitions_as: None,
                replication: 1,
                retention: Some(Span::from_secs(7 * 86_400)),
                required_retention: Some(Span::from_secs(3_600)),
                sources: Vec::new(),
                largest: None,
                cleanup: Some(Cleanup::Delete),
            }],
        };
        topology::apply(&self.kafka.client(), &spec, DEADLINE)
            .await
            .unwrap();
    }

    /// Writes records into a partition; says where they stand.
    pub(crate) async fn put(&self, topic: &Arc<str>, partition: i32, records: Vec<Dead>) -> Vec<Position> {
        let outputs: Vec<Output> = records
            .into_iter()
            .map(|dead| output(topic, partition, dead))
            .collect();
        let sending = outputs.iter().map(|output| self.producer.send(output));
        let written = futures::future::try_join_all(sending).await.unwrap();
        written.into_iter().map(|written| written.position).collect()
    }

    /// Writes records in a transaction that is aborted once they stand in the topic.
    pub(crate) fn put_and_abort(&self, topic: &Arc<str>, partition: i32, records: Vec<Dead>) {
        let id = unique("aborted");
        let mut transactions = Transactions::new(self.kafka.transactional_producer(&id), &id, DEADLINE);
        eventually("a transactional producer", DEADLINE, || {
            let recovered = transactions.recover(Duration::from_secs(5));
            recovered.map_err(|setback| setback.to_string())
        });
        let outputs: Vec<Output> = records
            .into_iter()
            .map(|dead| output(topic, partition, dead))
            .collect();
        // Without a group there are no offsets to add, which is noticed when the records have been written.
        let setback = transactions
            .write(&outputs, &Default::default(), || None)
            .unwrap_err();
        assert!(setback.to_string().contains("asking for the group"), "{setback}");
    }

    /// Writes into the ledger by hand.
    pub(crate) async fn put_ledger(&self, id: &str, entry: Option<v1::LedgerEntry>) {
        let topic: Arc<str> = redeliver_dlq_inspector::ledger::TOPIC.into();
        let output = Output {
            topic,
            partition: None,
            key: Some(Bytes::copy_from_slice(id.as_bytes())),
            value: entry.map(|entry| entry.encode_to_vec().into()),
            headers: Headers::new(),
        };
        self.producer.send(&output).await.unwrap();
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = binary("dlq-inspector");
        command.env_clear();
        for (key, value) in &self.settings {
            command.arg("--set").arg(format!("{key}={value}"));
        }
        command
    }

    /// Starts a process and waits for nothing.
    pub(crate) fn start(&self) -> Inspector {
        Inspector {
            process: Process::spawn(self.command()).unwrap(),
            address: None,
        }
    }

    /// Starts a process and waits until it serves.
    pub(crate) async fn serve(&self) -> Inspector {
        let mut inspector = self.start();
        inspector.until_serving().await;
        inspector
    }
}

fn output(topic: &Arc<str>, partition: i32, dead: Dead) -> Output {
    Output {
        topic: topic.clone(),
        partition: Some(partition),
        key: dead.key,
        value: dead.value,
        headers: dead.headers,
    }
}

impl Inspector {
    /// `http://HOST:PORT` of the API, once the process has said it.
    pub(crate) fn url(&mut self) -> String {
        if self.address.is_none() {
            let said = self.said(" api=");
            self.address = Some(said);
        }
        format!("http://{}", self.address.as_deref().unwrap())
    }

    /// The word behind this text in what the process says.
    pub(crate) fn said(&mut self, before: &str) -> String {
        let output = self.process.wait_for_output(before, DEADLINE);
        let rest = output.split(before).nth(1).unwrap_or_default();
        rest.split_whitespace().next().unwrap_or_default().to_owned()
    }

    pub(crate) async fn channel(&mut self) -> Channel {
        let endpoint = tonic::transport::Endpoint::from_shared(self.url()).unwrap();
        endpoint.connect().await.unwrap()
    }

    pub(crate) async fn client(&mut self) -> Client {
        DeadLetterServiceClient::new(self.channel().await).max_decoding_message_size(64 << 20)
    }

    /// What the health service says, of the whole server and of its service.
    pub(crate) async fn health(&mut self) -> [Result<ServingStatus, Status>; 2] {
        let mut health = HealthClient::new(self.channel().await);
        let mut states = Vec::new();
        for service in ["", "redeliver.v1.DeadLetterService"] {
            let request = HealthCheckRequest {
                service: service.to_owned(),
            };
            let answer = health.check(request).await;
            states.push(answer.map(|answer| answer.into_inner().status()));
        }
        states.try_into().unwrap()
    }

    pub(crate) async fn until_serving(&mut self) {
        let serving = [Some(ServingStatus::Serving); 2];
        eventually_async("the inspector serves", DEADLINE, async || {
            let health = self.health().await.map(Result::ok);
            if health == serving {
                Ok(())
            } else {
                Err(format!("{health:?}\n{}", self.process.output()))
            }
        })
        .await;
    }

    /// All dead letters that match, the newest first.
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

    /// Waits until as many match.
    pub(crate) async fn until_listed(&mut self, filter: &str, count: usize) -> Vec<v1::DeadLetter> {
        eventually_async("as many dead letters are listed", DEADLINE, async || {
            let listed = self.list(filter).await;
            if listed.len() == count {
                Ok(listed)
            } else {
                Err(format!("{} of {count}", listed.len()))
            }
        })
        .await
    }

    /// What the admin port answers, as head and body in one text.
    pub(crate) fn admin(&mut self, path: &str) -> String {
        let address = self.said(" admin=");
        let mut stream = TcpStream::connect(address).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Asks the process to end and waits for it; gives its exit code.
    pub(crate) fn end(&mut self) -> Option<i32> {
        self.process.terminate();
        self.process.wait(DEADLINE).code()
    }
}

/// The ids of dead letters.
pub(crate) fn ids(letters: &[v1::DeadLetter]) -> Vec<&str> {
    letters.iter().map(|letter| letter.id.as_str()).collect()
}
