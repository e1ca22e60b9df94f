//! A scheduler of the test's own, as a process, with topics, group and Redis keys of its own.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Record;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Process, binary, redis_url, unique};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};

/// How long a process may take to start, and a condition to come true, on a machine that is busy.
pub(crate) const SOON: Duration = Duration::from_secs(60);
const PARTITIONS: usize = 3;

pub(crate) struct Server {
    pub(crate) name: String,
    process: Process,
    address: String,
    kafka: KafkaSettings,
    http: reqwest::Client,
    _scratch: Scratch,
}

/// What REST answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) kind: String,
    pub(crate) location: Option<String>,
    pub(crate) text: String,
    pub(crate) body: Value,
}

impl Server {
    /// One that asks for no token.
    pub(crate) fn start() -> Self {
        Self::start_with("", &redis_url())
    }

    /// One with more settings of the scheduler, on this Redis. `{dir}` stands for a directory of its own.
    pub(crate) fn start_with(settings: &str, redis: &str) -> Self {
        let name = unique("api");
        let scratch = Scratch::new("api").unwrap();
        let brokers = redeliver_testkit::brokers();
        let directory = scratch.path().display().to_string();
        let settings = settings.replace("{dir}", &directory);
        std::fs::write(scratch.path().join("token"), "s3cret\n").unwrap();
        let text = format!(
            "instance: {name}\nadmin: {{ listen: 127.0.0.1:0 }}\n\
             kafka: {{ brokers: '{brokers}', topics: {{ create: true, partitions: {PARTITIONS} }} }}\n\
             redis: {{ url: '{redis}', prefix: '{name}' }}\n\
             scheduler:\n  listen: 127.0.0.1:0\n  group: {name}\n  apps: {{ sms: {{ topic: {name}-sms }} }}\n  \
             topics: {{ ingest: {name}-ingest, state: {name}-state, dlq: {name}-dlq, answers: {name}-answers }}\n\
             {settings}"
        );
        let file = scratch.path().join("redeliver.yaml");
        std::fs::write(&file, text).unwrap();
        let mut command = binary("scheduler");
        command.env_clear().arg("--config").arg(file);
        let mut process = Process::spawn(command).unwrap();
        let output = process.wait_for_output("serving the job API", SOON);
        let line = output.lines().find(|line| line.contains("serving the job API"));
        let address = line.and_then(|line| line.split_once("address=")).unwrap().1;
        Self {
            kafka: KafkaSettings::new(brokers, format!("{name}-test")),
            address: address.trim().to_owned(),
            http: http_client(),
            name,
            process,
            _scratch: scratch,
        }
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http
            .request(method, format!("http://{}{path}", self.address))
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        send(self.request(Method::GET, path)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        send(self.request(Method::DELETE, path)).await
    }

    /// Posts or patches JSON.
    pub(crate) async fn json(&self, method: Method, path: &str, body: &str) -> Answer {
        send(with_json(self.request(method, path), body)).await
    }

    pub(crate) async fn channel(&self) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
        endpoint.connect().await.unwrap()
    }

    pub(crate) async fn grpc(&self) -> JobServiceClient<Channel> {
        JobServiceClient::new(self.channel().await)
    }

    /// All that stands in a topic of this test.
    pub(crate) fn records(&self, topic: &str) -> Vec<Record> {
        let topic: Arc<str> = format!("{}-{topic}", self.name).into();
        let mut records = Vec::new();
        // Client and connection are blocking; the test's runtime has threads of its own for requests.
        let mut reader = TopicReader::new(&self.kafka, &[topic]).unwrap();
        reader.read_to_end(SOON, |record| records.push(record)).unwrap();
        records
    }

    /// Ends it in order.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.process.terminate();
        self.process.wait(SOON)
    }
}

pub(crate) fn with_json(request: RequestBuilder, body: &str) -> RequestBuilder {
    request
        .header("content-type", "application/json")
        .body(body.to_owned())
}

pub(crate) async fn send(request: RequestBuilder) -> Answer {
    let response = request.send().await.unwrap();
    let header = |name: &str| Some(response.headers().get(name)?.to_str().unwrap().to_owned());
    let (kind, location) = (header("content-type").unwrap_or_default(), header("location"));
    let status = response.status();
    let text = response.text().await.unwrap();
    Answer {
        status,
        kind,
        location,
        body: serde_json::from_str(&text).unwrap_or(Value::Null),
        text,
    }
}

impl Answer {
    /// The answer's status is this.
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        self
    }

    /// The answer is a problem with this code, whose text says this.
    #[track_caller]
    pub(crate) fn problem(self, status: u16, code: &str, says: &str) {
        let answer = self.is(status);
        assert_eq!(answer.kind, "application/problem+json", "{answer:?}");
        assert_eq!(answer.body["code"], code, "{answer:?}");
        assert!(
            answer.body["detail"].as_str().unwrap().contains(says),
            "{answer:?}"
        );
    }

    #[track_caller]
    pub(crate) fn text_of(&self, field: &str) -> &str {
        self.body[field]
            .as_str()
            .unwrap_or_else(|| panic!("no {field}: {self:?}"))
    }
}

/// A client for plain HTTP. Built beside packages that bring TLS for theirs, it wants a provider of cryptography all
/// the same.
fn http_client() -> reqwest::Client {
    // It may be there already: tests run side by side.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}
