//! A scheduler process with unique topics, group and Redis keys.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::try_join_all;
use redeliver_core::{Output, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_service::identity::{NewToken, new_token};
use redeliver_testkit::{EnvBuilder, ServiceProcess, TestEnv, ensure, eventually_async, http};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};

use super::identity::write_tokens;
use crate::env::{DEADLINE, api_address};

pub(crate) struct Server {
    process: ServiceProcess,
    env: TestEnv,
    address: String,
    kafka: KafkaSettings,
    http: reqwest::Client,
}

/// A REST response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) kind: String,
    pub(crate) location: Option<String>,
    pub(crate) retry_after: Option<String>,
    pub(crate) text: String,
    pub(crate) body: Value,
}

impl Server {
    /// A server that requires no token.
    pub(crate) fn start() -> Self {
        Self::start_with(|builder| builder)
    }

    /// A server with another configuration.
    pub(crate) fn start_with(configure: impl FnOnce(EnvBuilder) -> EnvBuilder) -> Self {
        Self::start_prepared(configure, |_| {})
    }

    /// A server with another configuration, and with files that exist before it starts.
    pub(crate) fn start_prepared(
        configure: impl FnOnce(EnvBuilder) -> EnvBuilder,
        prepare: impl FnOnce(&Path),
    ) -> Self {
        let mut server = Self::starting(configure, prepare);
        // Before that, nothing has an outcome, and a busy machine may need longer than a command waits.
        tokio::task::block_in_place(|| server.process.until_ready());
        server
    }

    /// As [`Server::start_prepared`], but maybe without an index yet.
    pub(crate) fn starting(
        configure: impl FnOnce(EnvBuilder) -> EnvBuilder,
        prepare: impl FnOnce(&Path),
    ) -> Self {
        let builder = EnvBuilder::new("api").partitions(3).creates_topics();
        let env = configure(builder.scheduler(&[("sms", "{name}-sms")])).build();
        std::fs::write(env.directory().join("token"), "s3cret\n").unwrap();
        prepare(env.directory());
        let mut process = env.spawn("scheduler", "a", &[]);
        Self {
            kafka: KafkaSettings::new(env.brokers().to_owned(), format!("{}-test", env.name())),
            address: api_address(&mut process),
            http: http::client(),
            env,
            process,
        }
    }

    /// A server, and a token for each of these callers with these scopes.
    pub(crate) fn for_callers<const N: usize>(
        callers: [(&str, &[&str]); N],
        configure: impl FnOnce(EnvBuilder) -> EnvBuilder,
    ) -> (Self, [NewToken; N]) {
        let tokens = callers.map(|_| new_token().unwrap());
        let entries = callers.iter().zip(&tokens);
        let entries: Vec<_> = entries
            .map(|((name, scopes), token)| (*name, token, *scopes))
            .collect();
        let server = Self::start_prepared(
            |builder| configure(builder).set("scheduler.auth.tokens_file", "{dir}/tokens"),
            |directory| write_tokens(&directory.join("tokens"), &entries),
        );
        (server, tokens)
    }

    /// What a caller with a token is answered.
    pub(crate) async fn ask(&self, token: &str, method: Method, path: &str, body: &str) -> Answer {
        send(with_json(self.request(method, path), body).bearer_auth(token)).await
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http
            .request(method, format!("http://{}{path}", self.address))
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        send(self.request(Method::GET, path)).await
    }

    /// Gets this path until the answer is as it should be: the index follows changes within milliseconds.
    pub(crate) async fn get_until(&self, path: &str, is_right: impl Fn(&Answer) -> bool) -> Answer {
        eventually_async(path, DEADLINE, async || {
            let answer = self.get(path).await;
            ensure(is_right(&answer), answer.text.clone()).map(|()| answer)
        })
        .await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        send(self.request(Method::DELETE, path)).await
    }

    /// Sends a request with a JSON body.
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

    /// The name of a topic of this test.
    pub(crate) fn topic(&self, topic: &str) -> String {
        format!("{}-{topic}", self.env.name())
    }

    /// All records of a topic of this test.
    pub(crate) fn records(&self, topic: &str) -> Vec<Record> {
        let topic: Arc<str> = self.topic(topic).into();
        let mut records = Vec::new();
        // This blocks a thread of the test's runtime, which has others for requests.
        let mut reader = TopicReader::new(&self.kafka, &[topic]).unwrap();
        reader
            .read_to_end(DEADLINE, |record| records.push(record))
            .unwrap();
        records
    }

    /// The URL of a path over TLS.
    pub(crate) fn https(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    /// The path of a file of this test.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.env.directory().join(name)
    }

    /// The value of a metric.
    pub(crate) fn metric(&mut self, series: &str) -> u64 {
        tokio::task::block_in_place(|| self.process.metric(series))
    }

    /// What the process has written so far.
    pub(crate) fn output(&self) -> String {
        self.process.output()
    }

    /// Host and port.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The process.
    pub(crate) fn process(&mut self) -> &mut ServiceProcess {
        &mut self.process
    }

    /// Kills the process, and starts it again after `meanwhile`.
    pub(crate) fn restart(&mut self, meanwhile: impl FnOnce(&Self)) {
        self.process.kill_9();
        meanwhile(self);
        self.process.start_again();
        self.address = api_address(&mut self.process);
    }

    /// Writes records to topics of this test.
    pub(crate) async fn write(&self, outputs: &[Output]) {
        let producer = Producer::new(&self.kafka).unwrap();
        try_join_all(outputs.iter().map(|output| producer.send(output)))
            .await
            .unwrap();
    }

    pub(crate) fn shut_down(mut self) {
        self.process.shut_down();
    }
}

pub(crate) fn with_json(request: RequestBuilder, body: &str) -> RequestBuilder {
    request
        .header("content-type", "application/json")
        .body(body.to_owned())
}

/// Sends a request; again while Kafka, on a busy machine, does not take what it changes: then nothing was written.
pub(crate) async fn send(request: RequestBuilder) -> Answer {
    eventually_async("Kafka takes the change", DEADLINE, async || {
        let request = request.try_clone().expect("a body that is in memory");
        let answer = answer_to(request).await;
        let is_taken = answer.body["code"] != "kafka_unavailable";
        ensure(is_taken, answer.text.clone()).map(|()| answer)
    })
    .await
}

pub(crate) async fn answer_to(request: RequestBuilder) -> Answer {
    let response = request.send().await.unwrap();
    let header = |name: &str| Some(response.headers().get(name)?.to_str().unwrap().to_owned());
    let (kind, location) = (header("content-type").unwrap_or_default(), header("location"));
    let retry_after = header("retry-after");
    let status = response.status();
    let text = response.text().await.unwrap();
    Answer {
        status,
        kind,
        location,
        retry_after,
        body: serde_json::from_str(&text).unwrap_or(Value::Null),
        text,
    }
}

impl Answer {
    /// Checks the status.
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        self
    }

    /// Checks that the response is a problem with this code, whose detail contains `says`.
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

    /// Checks texts of the body.
    #[track_caller]
    pub(crate) fn has(&self, fields: &[(&str, &str)]) {
        for (field, text) in fields {
            assert_eq!(self.text_of(field), *text, "{self:?}");
        }
    }

    #[track_caller]
    pub(crate) fn text_of(&self, field: &str) -> &str {
        self.body[field]
            .as_str()
            .unwrap_or_else(|| panic!("no {field}: {self:?}"))
    }
}
