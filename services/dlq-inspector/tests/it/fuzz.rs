//! Whatever valid messages clients send, each call is answered, or refused for a reason that its caller can know.

use std::collections::BTreeMap;

use bytes::{Buf as _, BufMut as _, Bytes};
use fastrand::Rng;
use futures::future::join_all;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, MethodDescriptor, Value,
};
use redeliver_proto::error::reason;
use redeliver_proto::{DESCRIPTORS, Message as _, auth};
use redeliver_testkit::fuzz::FEW;
use redeliver_testkit::{brokers, chaos_random};
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::support::{DEADLINE, InspectorEnv, dead};

/// What the inspector serves.
const SERVICES: [&str; 7] = [
    "redeliver.v1.AccessService",
    "redeliver.v1.AuditService",
    "redeliver.v1.ControlService",
    "redeliver.v1.DeadLetterService",
    "redeliver.v1.OverviewService",
    "redeliver.v1.RedriveService",
    "redeliver.v1.WaitingService",
];
/// Methods that open a client of Kafka or write a transaction. They are called seldom, so that there is time for many requests.
const SLOW: [&str; 22] = [
    "AnnotateGroup",
    "CancelRedrive",
    "FindRecords",
    "GetOverview",
    "GetWaitingStats",
    "ListAuditEntries",
    "ListWaiting",
    "MuteGroup",
    "PauseControl",
    "PauseRedrive",
    "PlanRedrive",
    "ReleaseTier",
    "ReopenGroup",
    "ResetControl",
    "ResolveGroup",
    "ResumeControl",
    "ResumeRedrive",
    "SetControlRate",
    "SetRedriveRate",
    "StartRedrive",
    "TraceRecord",
    "WatchOverview",
];
/// The largest message that this service accepts, in bytes.
const CONTROL: (&str, usize) = ("ControlService", 4 << 10);
/// One of this many requests calls a slow method.
const SELDOM: usize = 20;
/// Calls at the same time.
const CLIENTS: usize = 16;
/// Texts of answers that are used in requests.
const LEARNED: usize = 200;
/// Characters with a meaning in filters, patterns, ids or tokens, and some that have none.
const SPECIAL: &[char] = &[
    '\0',
    '\n',
    '"',
    '\'',
    '\\',
    '%',
    '*',
    '(',
    ')',
    '=',
    '<',
    '>',
    ':',
    '-',
    '/',
    '.',
    ',',
    ';',
    '~',
    '?',
    '\u{e4}',
    '\u{1f600}',
    'a',
    '0',
];
/// Texts are repeated up to this length. All in a request must be smaller than the server accepts.
const LENGTH: usize = 10_000;
/// Messages are nested at most this deep.
const DEPTH: usize = 4;

/// Sends and receives messages as bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Makes random messages.
struct Generator {
    random: Rng,
    /// What has a meaning in texts: parts of filters, names, ids.
    words: Vec<String>,
    /// Texts of answers.
    learned: Vec<String>,
    /// Ids of answers, and those of dead letters.
    ids: Vec<String>,
}

impl Generator {
    fn message(&mut self, descriptor: &MessageDescriptor, depth: usize) -> DynamicMessage {
        let mut message = DynamicMessage::new(descriptor.clone());
        for field in descriptor.fields() {
            if self.random.bool() || (depth == 0 && matches!(field.kind(), Kind::Message(_))) {
                continue;
            }
            let value = self.field(&field, depth);
            message.set_field(&field, value);
        }
        message
    }

    fn field(&mut self, field: &FieldDescriptor, depth: usize) -> Value {
        let kind = field.kind();
        if field.name() == "id" && self.random.bool() {
            return Value::String(self.random.choice(&self.ids).cloned().unwrap_or_default());
        }
        if field.is_map() {
            let entry = kind.as_message().unwrap().map_entry_value_field();
            let entries = (0..self.random.usize(..3)).map(|index| {
                let key = MapKey::String(format!("key-{index}"));
                (key, self.value(&entry.kind(), depth))
            });
            return Value::Map(entries.collect());
        }
        if field.is_list() {
            let count = if self.random.u8(..20) == 0 {
                200
            } else {
                self.random.usize(..4)
            };
            return Value::List((0..count).map(|_| self.value(&kind, depth)).collect());
        }
        self.value(&kind, depth)
    }

    fn value(&mut self, kind: &Kind, depth: usize) -> Value {
        match kind {
            Kind::Bool => Value::Bool(self.random.bool()),
            Kind::Double => Value::F64(self.double()),
            Kind::Float => Value::F32(self.random.f32()),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(self.int()),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(self.long()),
            Kind::Uint32 | Kind::Fixed32 => Value::U32(self.int().cast_unsigned()),
            Kind::Uint64 | Kind::Fixed64 => Value::U64(self.long().cast_unsigned()),
            Kind::String => Value::String(self.text()),
            Kind::Bytes => Value::Bytes(self.text().into_bytes().into()),
            // Also numbers that mean nothing.
            Kind::Enum(ty) => {
                Value::EnumNumber(self.random.i32(-1..=i32::try_from(ty.values().len()).unwrap()))
            }
            Kind::Message(message) => Value::Message(self.message(message, depth.saturating_sub(1))),
        }
    }

    fn double(&mut self) -> f64 {
        let special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1e300,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::MIN_POSITIVE,
        ];
        self.random.choice(special).unwrap()
    }

    fn int(&mut self) -> i32 {
        i32::try_from(self.long()).unwrap_or_else(|_| self.random.i32(..))
    }

    fn long(&mut self) -> i64 {
        match self.random.u8(..4) {
            0 => self.random.i64(..),
            1 => self.random.i64(-3..3),
            2 => self.random.i64(0..2_000_000_000),
            _ => {
                let special = [
                    i64::MIN,
                    i64::MAX,
                    i64::from(i32::MIN),
                    i64::from(i32::MAX),
                    i64::from(u32::MAX),
                    // The ends of what a timestamp can say, in seconds.
                    -62_135_596_801,
                    253_402_300_800,
                    1_000_000_000,
                ];
                self.random.choice(special).unwrap()
            }
        }
    }

    fn text(&mut self) -> String {
        let known = if self.random.bool() {
            &self.learned
        } else {
            &self.words
        };
        let known = self.random.choice(known).cloned().unwrap_or_default();
        match self.random.u8(..16) {
            0 => String::new(),
            1..=8 => known,
            9 => {
                let words =
                    (0..self.random.usize(..8)).map(|_| self.random.choice(&self.words).unwrap().as_str());
                words.collect::<Vec<_>>().join(" ")
            }
            10 => known.repeat(self.random.usize(1..=1 + LENGTH / known.len().max(1))),
            11 => "(".repeat(self.random.usize(..100)) + &known,
            12 => (0..self.random.usize(..20))
                .map(|_| self.random.char(..))
                .collect(),
            _ => {
                let mut characters: Vec<char> = known.chars().collect();
                for _ in 0..self.random.usize(1..4) {
                    let at = self.random.usize(..=characters.len());
                    let special = *self.random.choice(SPECIAL).unwrap();
                    match (self.random.bool(), characters.get_mut(at)) {
                        (true, Some(character)) => *character = special,
                        _ => characters.insert(at, special),
                    }
                }
                characters.into_iter().collect()
            }
        }
    }

    /// Keeps the texts of an answer.
    fn learn(&mut self, answer: &DynamicMessage) {
        for (field, value) in answer.fields() {
            self.learn_value(value, field.name());
        }
    }

    fn learn_value(&mut self, value: &Value, name: &str) {
        match value {
            Value::String(text) if !text.is_empty() => {
                let texts = if name.ends_with("id") {
                    &mut self.ids
                } else {
                    &mut self.learned
                };
                if texts.len() >= LEARNED {
                    texts.swap_remove(self.random.usize(..LEARNED));
                }
                texts.push(text.clone());
            }
            Value::Message(message) => self.learn(message),
            Value::List(items) => items.iter().for_each(|item| self.learn_value(item, name)),
            _ => {}
        }
    }
}

/// The methods of the inspector.
pub(crate) fn methods() -> Vec<MethodDescriptor> {
    let pool = DescriptorPool::decode(DESCRIPTORS).unwrap();
    let services = SERVICES.map(|name| pool.get_service_by_name(name).unwrap());
    services
        .iter()
        .flat_map(|service| service.methods().collect::<Vec<_>>())
        .collect()
}

/// The first message of the answer, if any.
async fn call(
    channel: &Channel,
    method: &MethodDescriptor,
    message: &DynamicMessage,
    why: &str,
) -> Result<Option<Bytes>, Status> {
    let mut client = Grpc::new(channel.clone()).max_decoding_message_size(64 << 20);
    client
        .ready()
        .await
        .map_err(|error| Status::unknown(error.to_string()))?;
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let mut request = Request::new(Bytes::from(message.encode_to_vec()));
    if let Ok(why) = why.parse::<MetadataValue<_>>() {
        request.metadata_mut().insert(auth::REASON, why);
    }
    let mut answer = client
        .server_streaming(request, path.parse().unwrap(), Raw)
        .await?
        .into_inner();
    answer.message().await
}

/// Whether a caller can do something about a refusal, or knows that it is temporary.
fn is_documented(status: &Status) -> bool {
    let codes = [
        Code::InvalidArgument,
        Code::NotFound,
        Code::FailedPrecondition,
        Code::ResourceExhausted,
        Code::Aborted,
        Code::Unavailable,
    ];
    codes.contains(&status.code()) && reason(status).is_some()
}

async fn random_requests(name: &str, count: u32) {
    let yaml = "pipelines:\n  {name}-p:\n    output: {name}-out\n";
    let mut env = InspectorEnv::with_yaml_on(name, yaml, &brokers());
    env.base.set("dlq_inspector.json_fields", r#"["/order/id"]"#);
    // What is paused here runs elsewhere.
    let control = format!("{}-control", env.base.name());
    env.base.set("control.topic", &control);
    let topic = env.create_topic("orders", 2).await;
    let headers = [
        ("pipeline", env.base.name()),
        ("error-class", "permanent"),
        ("error-code", "http.422"),
        ("error-message", "no field 'a' in order 7"),
        ("tenant", "x"),
    ];
    for partition in 0..2 {
        let letters =
            (0..20).map(|index| dead("k", format!(r#"{{"order":{{"id":"o-{index}"}}}}"#), &headers));
        env.put(&topic, partition, letters.collect()).await;
    }
    let mut inspector = env.start().await;
    inspector.until_listed("", 40).await;
    let channel = inspector.channel().await;
    let (slow, fast): (Vec<_>, Vec<_>) = methods()
        .into_iter()
        .partition(|method| SLOW.contains(&method.name()));
    assert_eq!(slow.len(), SLOW.len());
    let words = [
        r#"error_class = "permanent" AND headers.tenant = "x" AND retry_count > 3"#,
        r#"NOT (partition=1 OR offset>=2) -state=OPEN dialect != SPRING"#,
        "error_message : 'a' OR error_code = http.422 key:* json./order/id = o-7",
        "failed_at > \"2026-01-01T00:00:00Z\"",
        "state = OPEN",
        "dead_at desc",
        "dead_at",
        "count desc",
        "dead-letters.*",
        "control.pause",
        "AND",
        "OR",
        "NOT",
        "why%20not",
        "o-7",
    ];
    let mut words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    words.extend([
        format!("{topic}/0/0"),
        format!("{topic}/1/99"),
        format!("topic = \"{topic}\""),
        topic.to_string(),
        format!("{}-p", env.base.name()),
        format!("pipeline/{}-p", env.base.name()),
        "tier/30s".to_owned(),
    ]);
    let mut random = chaos_random(name);
    let clients = (0..CLIENTS).map(|_| {
        let mut generator = Generator {
            random: random.fork(),
            words: words.clone(),
            learned: Vec::new(),
            ids: vec![
                format!("{topic}/0/0"),
                format!("{topic}/1/19"),
                format!("{topic}/1/99"),
            ],
        };
        let (slow, fast, channel) = (slow.clone(), fast.clone(), channel.clone());
        async move {
            let mut outcomes = BTreeMap::new();
            for number in 0..count / u32::try_from(CLIENTS).unwrap() {
                let is_slow = generator.random.usize(..SELDOM) == 0;
                let method = generator
                    .random
                    .choice(if is_slow { &slow } else { &fast })
                    .unwrap();
                let message = generator.message(&method.input(), DEPTH);
                let why: String = generator.text().chars().take(2_000).collect();
                let answer = timeout(DEADLINE, call(&channel, method, &message, &why));
                let Ok(answer) = answer.await else {
                    panic!("input {number}: {} does not answer to {message:?}", method.name());
                };
                let outcome = match answer {
                    Ok(answer) => {
                        if let Some(answer) = answer {
                            generator.learn(&DynamicMessage::decode(method.output(), answer).unwrap());
                        }
                        "OK".to_owned()
                    }
                    Err(status) if status.code() == Code::OutOfRange => {
                        let (service, limit) = CONTROL;
                        let is_limited = method.parent_service().name() == service;
                        assert!(is_limited && message.encoded_len() > limit, "{status:?}");
                        "TOO_LARGE".to_owned()
                    }
                    Err(status) => {
                        let problem = format!("input {number}: {} ({why:?}) of {message:?}", method.name());
                        assert!(is_documented(&status), "{problem}: {status:?}");
                        reason(&status).unwrap()
                    }
                };
                *outcomes
                    .entry((method.name().to_owned(), outcome))
                    .or_insert(0_u32) += 1;
            }
            outcomes
        }
    });
    let mut outcomes: BTreeMap<(String, String), u32> = BTreeMap::new();
    for (outcome, count) in join_all(clients).await.into_iter().flatten() {
        *outcomes.entry(outcome).or_default() += count;
    }
    // Otherwise, random requests would test little. Slow methods may not succeed at all in a short run.
    let slow = (count > FEW).then_some("GetWaitingStats");
    let fast = [
        "ListDeadLetters",
        "GetDeadLetter",
        "ListGroups",
        "ReadPayload",
        "WatchDeadLetters",
        "ListRedrives",
        "ListControls",
    ];
    for method in fast.into_iter().chain(slow) {
        assert!(
            outcomes.contains_key(&(method.to_owned(), "OK".to_owned())),
            "{method}: {outcomes:?}"
        );
    }
    let log = inspector.process.output();
    assert!(!log.contains("panicked"), "{log}");
    println!("{name}: {count} requests: {outcomes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn random_request_is_answered_or_refused() {
    random_requests("random-requests", FEW / 2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn many_random_requests_are_answered() {
    random_requests("many-random-requests", 20_000).await;
}
