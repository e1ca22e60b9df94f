//! The programs in `examples/foreign-worker`: workers in Python and Java that know the protocol only, with the real retry tier
//! and the real scheduler.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use redeliver_core::headers::{
    ERROR_CODE, ERROR_MESSAGE, ERROR_TIMESTAMP, ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TIMESTAMP,
    ORIGINAL_TOPIC, PROCESS_AFTER, ReservedHeaders, is_reserved,
};
use redeliver_core::{Clock as _, Headers, HumanDuration, Position, Record, SystemClock, Timestamp};
use redeliver_kafka::reader::TopicClient;
use redeliver_testkit::languages::{java, python};
use redeliver_testkit::{
    ChaosPermit, Fate, Process, Reply, Request, Trouble, brokers, chaos_random, eventually, sleep_up_to,
};

use crate::chaos::load::under_load;
use crate::chaos::settle;
use crate::raw;
use crate::support::{DEADLINE, Draft, PLAN, Pipe, PipeBuilder, Sent, end_topics, text};

/// The partitions of a worker that is alone: four of the source and four of the due topic.
const ALL: &str = "assigned 8 partitions";
const HALF: &str = "assigned 4 partitions";
/// As [`ALL`], if each topic has one partition.
const BOTH: &str = "assigned 2 partitions";

#[derive(Clone, Copy, Debug)]
enum Language {
    Python,
    Java,
}

use Language::{Java, Python};

impl Language {
    fn name(self) -> &'static str {
        match self {
            Python => "python",
            Java => "java",
        }
    }

    fn program(self) -> Command {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/foreign-worker");
        let file = |name: &str| -> PathBuf { examples.join(name) };
        match self {
            Python => {
                let mut command = Command::new(python(&file("python/requirements.txt")).unwrap());
                command.arg(file("python/worker.py"));
                command.env("PYTHONDONTWRITEBYTECODE", "1");
                command
            }
            Java => java(&file("java/ForeignWorker.java")).unwrap(),
        }
    }
}

/// A process of a program, and how to start it again.
struct Foreign<'p> {
    language: Language,
    pipe: &'p Pipe,
    instance: &'static str,
    process: Process,
}

impl<'p> Foreign<'p> {
    fn spawn(language: Language, pipe: &'p Pipe, instance: &'static str) -> Self {
        Self {
            process: spawn(language, pipe, instance),
            language,
            pipe,
            instance,
        }
    }

    fn start(language: Language, pipe: &'p Pipe, instance: &'static str) -> Self {
        let mut worker = Self::spawn(language, pipe, instance);
        worker.until_alone();
        worker
    }

    /// Waits until it reads all partitions.
    #[track_caller]
    fn until_alone(&mut self) {
        self.until_printed(match self.pipe.env.partitions() {
            1 => BOTH,
            _ => ALL,
        });
    }

    fn start_again(&mut self) {
        self.process = spawn(self.language, self.pipe, self.instance);
    }

    /// Waits until the program has printed this. Starts it again whenever it has ended, as a supervisor does: for example, it
    /// cannot join the group before the session of a killed worker of another kind has ended.
    #[track_caller]
    fn until_printed(&mut self, words: &str) {
        eventually(&format!("{:?} prints {words:?}", self.language), DEADLINE, || {
            let output = self.process.output();
            if output.contains(words) {
                return Ok(());
            }
            if !self.process.is_running() {
                self.start_again();
            }
            Err(output)
        });
    }
}

fn spawn(language: Language, pipe: &Pipe, instance: &str) -> Process {
    let output = pipe.pipeline.output.as_deref().unwrap();
    let mut command = language.program();
    command.args([&brokers(), pipe.name(), output]);
    command.arg(format!("{}/records", pipe.endpoint.url()));
    command.arg(format!("{}-{instance}", pipe.name()));
    command.args(pipe.pipeline.policy.tiers().iter().map(HumanDuration::to_string));
    Process::spawn(command).unwrap()
}

/// Each record must have waited for as long as its attempt says, and none may have been released early.
#[track_caller]
fn waited_long_enough(pipe: &Pipe) {
    let tiers = pipe.pipeline.policy.tiers();
    let released = pipe.read(&[pipe.pipeline.due_topic()]);
    assert!(!released.is_empty());
    for record in released {
        let reserved = ReservedHeaders::read(&record).unwrap();
        let attempt = usize::try_from(reserved.retry_count().unwrap()).unwrap();
        let due = time(&record, ERROR_TIMESTAMP).after(tiers[attempt - 1].duration());
        assert_eq!(time(&record, PROCESS_AFTER), due, "{record:?}");
        assert!(record.timestamp >= Some(due), "{record:?}");
    }
}

#[track_caller]
fn time(record: &Record, name: &str) -> Timestamp {
    let value = text(record, name).unwrap();
    let parsed = value.as_deref().and_then(|value| value.parse().ok());
    parsed.unwrap_or_else(|| panic!("{name} is {value:?} in {record:?}"))
}

// The same records and the same failures, once with the enricher and once with a program.

/// The requested delay of throttled records.
const REQUESTED: Duration = Duration::from_secs(3);

fn golden(request: &Request) -> Reply {
    let earlier = request.earlier_calls_of_body;
    match request
        .body
        .split(|byte| *byte == b' ')
        .next()
        .unwrap_or_default()
    {
        b"once" if earlier == 0 => Reply::status(503),
        b"twice" if earlier < 2 => Reply::status(500),
        b"always" => Reply::status(503),
        b"refused" => Reply::status(422),
        // A client that followed it would get a success.
        b"moved" => {
            let headers = vec![("location".to_owned(), "/elsewhere".to_owned())];
            Reply::Status(302, headers, "moved".into())
        }
        b"endless" if earlier == 0 => Reply::Endless("the beginning".into()),
        b"large" => Reply::ok(vec![b'x'; 1_000_001]),
        b"busy" if earlier == 0 => Reply::status(429),
        b"later" if earlier == 0 => {
            let headers = vec![("retry-after".to_owned(), REQUESTED.as_secs().to_string())];
            Reply::Status(503, headers, "later".into())
        }
        _ => Reply::ok(request.body.clone()),
    }
}

fn golden_records() -> Vec<Draft> {
    let words = [
        "fine", "once", "twice", "always", "refused", "moved", "large", "busy", "later",
    ];
    let mut drafts: Vec<Draft> = Vec::new();
    for word in words {
        drafts.push(Draft::new(format!("key of {word}"), word));
        let mut headers = Headers::new();
        for (name, value) in [
            ("tenant", Some(&b"a"[..])),
            ("tenant", Some(b"b")),
            ("nothing", None),
            ("empty", Some(b"")),
            ("", Some(b"a header without a name")),
            ("binary", Some(&[0x00, 0xff, 0x80])),
            ("Process-After", Some(b"not ours: names are case-sensitive")),
            ("job-id", Some(b"01KAJQ6Z2B0003000000000A7X")),
            (
                "traceparent",
                Some(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ),
            // Left over from another pipeline.
            ("pipeline", Some(b"upstream")),
            ("retry-count", Some(b"77")),
            ("error-code", Some(b"http.404")),
            ("error-code", None),
        ] {
            headers.push(name, value);
        }
        drafts.push(Draft {
            key: None,
            value: Some(Bytes::from(format!("{word} with headers"))),
            headers,
        });
    }
    drafts.push(Draft {
        key: Some(Bytes::new()),
        value: None,
        headers: Headers::new(),
    });
    drafts.push(Draft::new("endless", "endless"));
    // Larger than the output accepts; than the dead-letter topic accepts; and with headers that are.
    let large = |word: &str, size: usize| format!("{word} {}", "x".repeat(size));
    drafts.push(Draft::new("large", large("fine", 5_000)));
    drafts.push(Draft::new("huge", large("fine", 20_000)).header("tenant", b"a"));
    drafts.push(Draft::new("refused", large("refused", 20_000)));
    let headers = Draft::new("headers", "fine with large headers");
    drafts.push(headers.header("large", &[b'x'; 20_000]));
    drafts
}

/// Timestamps of which `original-timestamp` can name the third to the fifth. -1 is none.
const TIMESTAMPS: [i64; 7] = [
    -1,
    -62_135_596_800_001,
    -62_135_596_800_000,
    0,
    253_402_300_799_999,
    253_402_300_800_000,
    // Microseconds instead of milliseconds.
    1_790_000_000_000_000,
];

/// Writes records that fail once, with [`TIMESTAMPS`].
#[track_caller]
fn produce_with_timestamps(pipe: &Pipe) -> Vec<Sent> {
    let source = &pipe.pipeline.source;
    let any = i64::MAX.to_string();
    let config = [("message.timestamp.after.max.ms", &*any), ("retention.ms", "-1")];
    raw::configure_topic(&brokers(), source, &config);
    let produced = TIMESTAMPS.map(|timestamp| {
        let value = format!("once at {timestamp}");
        let at = Timestamp::from_millis(timestamp);
        Sent {
            position: Position {
                topic: source.clone(),
                partition: 0,
                offset: raw::produce_at(&brokers(), source, at, value.as_bytes(), &[]),
            },
            draft: Draft {
                value: Some(value.into()),
                ..Draft::default()
            },
        }
    });
    produced.into()
}

/// Records of the due topic that no tier has released.
fn forged() -> Vec<Draft> {
    let future = SystemClock.now().after(Duration::from_secs(3_600)).to_string();
    let draft = |word: &str, changed: &[(&str, Option<&str>)]| {
        let mut headers = vec![
            ("tenant", Some("a")),
            ("pipeline", Some("forged")),
            ("original-topic", Some("upstream")),
            ("original-partition", Some("0")),
            ("original-offset", Some("7")),
            ("retry-count", Some("1")),
        ];
        for (name, value) in changed {
            headers.retain(|(kept, _)| kept != name);
            headers.push((name, *value));
        }
        let headers = headers
            .into_iter()
            .map(|(name, value)| (name, value.map(str::as_bytes)));
        Draft {
            headers: headers.collect(),
            ..Draft::new(word.to_owned(), word.to_owned())
        }
    };
    vec![
        draft("forged count", &[("retry-count", Some("100001"))]),
        draft("forged null", &[("retry-count", None)]),
        draft("forged lock", &[("process-after", Some(&future))]),
        draft("forged text", &[("process-after", Some("now"))]),
        draft(
            "forged offset",
            &[("original-offset", Some("-1")), ("retry-count", Some("0"))],
        ),
        draft(
            "forged time",
            &[
                ("original-timestamp", Some("2026-02-30T00:00:00.000Z")),
                ("retry-count", Some("0")),
            ],
        ),
        draft("forged twice", &[("error-class", Some("transient"))]).header("error-class", b"transient"),
        // Valid, and processed.
        draft("fine after all", &[]),
    ]
}

/// A record that a pipeline has written, without what differs between two pipelines.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Written {
    topic: String,
    key: Option<Bytes>,
    value: Option<Bytes>,
    headers: Vec<(String, Option<String>)>,
}

/// All records that a pipeline has written, with their error messages.
#[track_caller]
fn written(pipe: &Pipe, sent: &[Sent]) -> BTreeMap<Written, String> {
    let numbers: BTreeMap<String, usize> = sent
        .iter()
        .enumerate()
        .map(|(number, sent)| (sent.idempotency_key(), number))
        .collect();
    let pipeline = &pipe.pipeline;
    let (due, source) = (pipeline.due_topic(), pipeline.source.clone());
    let came: BTreeMap<String, Option<Timestamp>> = pipe
        .read(&[source, due.clone()])
        .into_iter()
        .map(|record| (id(&record.position), record.timestamp))
        .collect();
    let tiers = pipeline.policy.tiers();
    let mut topics = end_topics(pipeline);
    topics.push(due);
    topics.extend(tiers.iter().map(|tier| pipeline.tier_topic(*tier)));
    let mut written = BTreeMap::new();
    for record in pipe.read(&topics) {
        if numbers.contains_key(&id(&record.position)) {
            continue;
        }
        let without_names = |text: &str| {
            let text = text
                .replace(&pipe.endpoint.url(), "URL")
                .replace(pipe.name(), "NAME");
            let numbered = tiers.iter().enumerate();
            numbered.fold(text, |text, (number, tier)| {
                text.replace(&tier.to_string(), &format!("TIER {number}"))
            })
        };
        let origin = ReservedHeaders::read(&record).unwrap().origin().unwrap();
        let number = numbers.get(&origin.id());
        let mut message = String::new();
        let normalised = |(name, value): (&str, Option<&[u8]>)| {
            let Some(value) = value else {
                return (name.to_owned(), None);
            };
            let text = String::from_utf8_lossy(value).into_owned();
            let shown = match name {
                ORIGINAL_TOPIC | ORIGINAL_PARTITION | ORIGINAL_OFFSET => match number {
                    Some(number) => format!("of record {number}"),
                    None => text,
                },
                ORIGINAL_TIMESTAMP if number.is_some() => {
                    assert_eq!(came[&origin.id()], text.parse().ok(), "{record:?}");
                    "of the record".to_owned()
                }
                ERROR_TIMESTAMP => {
                    let failed_at = time(&record, name);
                    assert!(Some(failed_at) <= record.timestamp, "{record:?}");
                    assert_eq!(text, failed_at.to_string());
                    "a time".to_owned()
                }
                PROCESS_AFTER => {
                    let due = time(&record, name);
                    assert_eq!(text, due.to_string());
                    let wait = due.since(time(&record, ERROR_TIMESTAMP));
                    match tiers.iter().position(|tier| tier.duration() == wait) {
                        Some(tier) => format!("after tier {tier}"),
                        None => {
                            // The enricher prolongs requested delays.
                            assert!((REQUESTED..REQUESTED.mul_f64(1.21)).contains(&wait), "{record:?}");
                            "as requested".to_owned()
                        }
                    }
                }
                ERROR_MESSAGE => "a message".to_owned(),
                _ if is_reserved(name) => without_names(&text),
                _ => text,
            };
            (name.to_owned(), Some(shown))
        };
        let headers = record.headers.iter().map(normalised).collect();
        if let Some(text) = text(&record, ERROR_MESSAGE).unwrap() {
            assert!(!text.is_empty() && text.len() <= 1024, "{record:?}");
            message = without_names(&text);
        }
        let one = Written {
            topic: without_names(&record.position.topic),
            key: record.key.clone(),
            value: record.value.clone(),
            headers,
        };
        assert!(!written.contains_key(&one), "written twice: {one:?}");
        written.insert(one, message);
    }
    written
}

fn id(position: &Position) -> String {
    format!("{}-{}-{}", position.topic, position.partition, position.offset)
}

/// A pipeline whose output accepts only small records.
fn golden_pipe(name: &str) -> Pipe {
    // Foreign workers do not write the responses of their endpoints.
    let setup = PipeBuilder::new(name)
        .partitions(4)
        .behave(golden)
        .pipeline("http.error_response", "false");
    let output = format!("{}-out", setup.name());
    raw::create_topic(&brokers(), &output, &[("max.message.bytes", "2000")]);
    setup.create()
}

/// Sends records to the source and forged ones to the due topic, and waits until all have ended.
#[track_caller]
fn process(pipe: &Pipe) -> Vec<Sent> {
    // Services do not start with such a dead-letter topic, but it can become like this later.
    let dead_letters = pipe.pipeline.dead_letter_topic();
    raw::configure_topic(&brokers(), &dead_letters, &[("max.message.bytes", "10000")]);
    let mut sent = pipe.produce(golden_records());
    sent.extend(produce_with_timestamps(pipe));
    let of_source = sent.len();
    sent.extend(pipe.produce_to(&pipe.pipeline.due_topic(), forged()));
    let mut watch = pipe.watch();
    watch.until_ended(sent.len(), DEADLINE);
    let ends = pipe.settle(&sent[..of_source], DEADLINE);
    assert!(ends.report.min_margin_ms >= Some(0), "{}", ends.report);
    assert_eq!(watch.look().len(), sent.len(), "{}", ends.report);
    sent
}

fn writes_what_the_enricher_writes(language: Language) {
    let ours = golden_pipe("golden-enricher");
    let theirs = golden_pipe(&format!("golden-{}", language.name()));
    let _running = (
        ours.enricher("a"),
        ours.retry_tier("a"),
        theirs.retry_tier("a"),
        Foreign::start(language, &theirs, "a"),
    );
    let (ours_sent, theirs_sent) = thread::scope(|scope| {
        let ours = scope.spawn(|| process(&ours));
        let theirs = process(&theirs);
        (ours.join().unwrap(), theirs)
    });
    let (ours, theirs) = (written(&ours, &ours_sent), written(&theirs, &theirs_sent));
    let missing: Vec<_> = ours.keys().filter(|one| !theirs.contains_key(*one)).collect();
    let others: Vec<_> = theirs.keys().filter(|one| !ours.contains_key(*one)).collect();
    assert!(
        missing.is_empty() && others.is_empty(),
        "only the enricher wrote {missing:#?}\nonly {language:?} wrote {others:#?}"
    );
    // Messages are for humans. Those about a status are the same, except that the enricher names it and its settings.
    let mut compared = 0;
    for (one, message) in &ours {
        let is_status = |code: &str| code.starts_with("http.") && code != "http.timeout";
        let is_code = |(name, value): &(String, Option<String>)| {
            name == ERROR_CODE && value.as_deref().is_some_and(is_status)
        };
        if one.headers.iter().any(is_code) && !message.is_empty() {
            let (message, theirs) = (
                message.replace("max_response_bytes (1000000)", "1000000 bytes"),
                &theirs[one],
            );
            assert!(
                message.starts_with(theirs.as_str()),
                "{theirs:?} is not {message:?}"
            );
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared} messages in {ours:#?}");
}

#[test]
fn python_worker_writes_same_records() {
    writes_what_the_enricher_writes(Python);
}

#[test]
fn java_worker_writes_same_records() {
    writes_what_the_enricher_writes(Java);
}

// Exactly once.

fn chaos_pipe(language: Language, name: &str, partitions: u32, latency: Duration) -> Pipe {
    PipeBuilder::new(&format!("foreign-{name}-{}", language.name()))
        .partitions(partitions)
        .tiers(&[1_000, 2_000])
        .behave(move |request| match PLAN.reply(request) {
            success @ Reply::Status(200, ..) => Reply::Delay(latency, Box::new(success)),
            failure => failure,
        })
        .create()
}

/// Waits until the worker writes to the output, which means that its transaction has just begun.
#[track_caller]
fn until_writing(pipe: &Pipe) {
    let output = pipe.pipeline.output.clone().unwrap();
    let topics = TopicClient::new(&pipe.kafka).unwrap();
    let end = || topics.watermarks(&output, 0).unwrap().1;
    let (before, began) = (end(), Instant::now());
    while end() == before {
        assert!(began.elapsed() < DEADLINE, "nothing is written to {output}");
    }
}

fn is_killed_under_load(language: Language) {
    const KILLS: usize = 10;
    let permit = ChaosPermit::acquire();
    let mut random = chaos_random("foreign-kill");
    let pipe = chaos_pipe(language, "kill", 1, Duration::from_millis(5));
    let _tier = pipe.retry_tier("a");
    let mut worker = Foreign::start(language, &pipe, "a");
    let sent = under_load(&pipe, 150, |load| {
        for _ in 0..KILLS {
            load.until_ended(20);
            // A transaction takes a few milliseconds.
            until_writing(&pipe);
            sleep_up_to(&mut random, Duration::from_millis(8));
            worker.process.kill_9();
            worker.start_again();
            worker.until_alone();
        }
        load.until_ended(100);
    });
    drop(permit);
    settle(&pipe, &sent, &PLAN);
    waited_long_enough(&pipe);
    let audited = pipe.redeliver(&["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
}

#[test]
#[ignore = "long"]
fn killed_python_worker_writes_once() {
    is_killed_under_load(Python);
}

#[test]
#[ignore = "long"]
fn killed_java_worker_writes_once() {
    is_killed_under_load(Java);
}

/// One of two workers is frozen with records in hand for longer than its session. The other one takes over.
fn is_frozen_under_load(language: Language) {
    let permit = ChaosPermit::acquire();
    let pipe = chaos_pipe(language, "freeze", 4, Duration::from_millis(100));
    let _tier = pipe.retry_tier("a");
    let mut frozen = Foreign::start(language, &pipe, "a");
    let mut other = Foreign::spawn(language, &pipe, "b");
    let sent = under_load(&pipe, 100, |load| {
        frozen.until_printed(HALF);
        other.until_printed(HALF);
        load.until_ended(100);
        frozen.process.stop();
        other.until_printed(ALL);
        load.until_ended(100);
        frozen.process.cont();
        // Its transaction fails, so it ends, unless it had no records in hand.
        frozen.until_printed(HALF);
        load.until_ended(200);
    });
    drop(permit);
    settle(&pipe, &sent, &PLAN);
    waited_long_enough(&pipe);
}

#[test]
#[ignore = "long"]
fn frozen_python_worker_writes_nothing() {
    is_frozen_under_load(Python);
}

#[test]
#[ignore = "long"]
fn frozen_java_worker_writes_nothing() {
    is_frozen_under_load(Java);
}

// With the scheduler, and in place of the enricher.

fn processes_jobs(language: Language) {
    const JOBS: usize = 40;
    let setup = PipeBuilder::new(&format!("foreign-jobs-{}", language.name()))
        .partitions(4)
        .tiers(&[300, 600])
        .through_scheduler()
        .behave(|request| match request.earlier_calls_of_body {
            0 => Reply::status(503),
            _ => Reply::ok(request.body.clone()),
        });
    let source = setup.name().to_owned();
    let pipe = setup.set("scheduler.apps.demo.topic", &source).create();
    let _running = (pipe.scheduler("a"), pipe.retry_tier("a"));
    let _worker = Foreign::start(language, &pipe, "a");
    let job = |n: usize| {
        let request = format!(r#"{{"appName":"demo","delay":"500ms","jobData":"job {n}"}}"#);
        Draft::new(format!("key-{n}"), request)
    };
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    pipe.produce_to(&topics.ingest, (0..JOBS).map(job).collect());
    pipe.watch().until_ended(JOBS, DEADLINE);
    let dispatched = pipe.read(std::slice::from_ref(&pipe.pipeline.source));
    let sent: Vec<Sent> = dispatched.into_iter().map(Sent::from).collect();
    assert_eq!(sent.len(), JOBS);
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| Fate::Recovers {
        failures: 1,
        trouble: Trouble::Unavailable,
    });
    waited_long_enough(&pipe);
    for sent in &sent {
        let end = ends.of(sent);
        assert!(text(end, "job-id").unwrap().is_some(), "{end:?}");
        let scheduled = time(end, "scheduled-time");
        assert!(time(end, ORIGINAL_TIMESTAMP) >= scheduled, "{end:?}");
    }
}

#[test]
fn python_worker_retries_jobs() {
    processes_jobs(Python);
}

#[test]
fn java_worker_retries_jobs() {
    processes_jobs(Java);
}

/// The enricher completes records out of order, which a program cannot take over. It must wait until none is missing.
fn takes_over_from_the_enricher(language: Language) {
    const EACH: usize = 20;
    let pipe = PipeBuilder::new(&format!("foreign-instead-{}", language.name()))
        .partitions(1)
        .behave(|request| match request.earlier_calls_of_body {
            0 if request.body.starts_with(b"slow") => Reply::Hang,
            _ => Reply::ok(request.body.clone()),
        })
        .pipeline("http.timeout", "5m")
        // A program can join the group once the session of a killed enricher has ended.
        .set("kafka.session_timeout", "6s")
        .create();
    let drafts = |word: &str| -> Vec<Draft> {
        (0..EACH)
            .map(|n| Draft::new(format!("key-{n}"), format!("{word} {n}")))
            .collect()
    };
    let mut enricher = pipe.enricher("a");
    let mut sent = pipe.produce(vec![Draft::new("slow", "slow")]);
    sent.extend(pipe.produce(drafts("first")));
    pipe.watch().until_ended(EACH, DEADLINE);
    enricher.kill_9();
    let mut worker = Foreign::spawn(language, &pipe, "a");
    worker.until_printed("has processed records after the committed offset");
    let status = worker.process.wait(DEADLINE);
    assert_eq!(status.code(), Some(1), "{}", worker.process.output());

    enricher.start_again();
    pipe.watch().until_ended(sent.len(), DEADLINE);
    enricher.shut_down();
    worker.start_again();
    worker.until_alone();
    sent.extend(pipe.produce(drafts("second")));
    pipe.watch().until_ended(sent.len(), DEADLINE);

    // And back.
    worker.process.kill_9();
    enricher.start_again();
    sent.extend(pipe.produce(drafts("third")));
    pipe.settle(&sent, DEADLINE).meets_with(&sent, |_| Fate::Succeeds);
}

#[test]
#[ignore = "long"]
fn python_worker_replaces_enricher() {
    takes_over_from_the_enricher(Python);
}

#[test]
#[ignore = "long"]
fn java_worker_replaces_enricher() {
    takes_over_from_the_enricher(Java);
}

/// A compacted output refuses records without a key. The dead-letter topic refuses any record at first. Then a record comes
/// whose header names cannot be read.
fn ends_refused_records(language: Language) {
    let pipe = PipeBuilder::new(&format!("foreign-refused-{}", language.name()))
        .partitions(1)
        .create();
    let (output, dead_letters) = (
        pipe.pipeline.output.clone().unwrap(),
        pipe.pipeline.dead_letter_topic(),
    );
    raw::configure_topic(&brokers(), &output, &[("cleanup.policy", "compact")]);
    raw::configure_topic(&brokers(), &dead_letters, &[("max.message.bytes", "100")]);
    let value = |word: &str| Some(Bytes::from(word.to_owned()));
    let keyless = Draft {
        value: value("keyless"),
        ..Draft::default()
    };
    let drafts = vec![Draft::new("key", "first"), keyless, Draft::new("key", "last")];
    let sent = pipe.produce(drafts);
    let mut worker = Foreign::spawn(language, &pipe, "a");
    worker.until_printed("refuses every dead letter");
    let status = worker.process.wait(DEADLINE);
    assert_eq!(status.code(), Some(1), "{}", worker.process.output());

    raw::configure_topic(&brokers(), &dead_letters, &[("max.message.bytes", "10000")]);
    worker.start_again();
    worker.until_alone();
    let ends = pipe.settle(&sent, DEADLINE);
    let codes = sent.iter().map(|sent| {
        let end = ends.of(sent);
        (end.value.clone(), text(end, ERROR_CODE).unwrap())
    });
    let refused = Some("output.refused".to_owned());
    let expected = [
        (value("first"), None),
        (value("keyless"), refused),
        (value("last"), None),
    ];
    assert_eq!(codes.collect::<Vec<_>>(), expected);

    raw::produce(&brokers(), pipe.name(), b"unreadable", &[(b"\xff\xfe", b"x")]);
    let mut watch = pipe.watch();
    watch.until_ended(sent.len() + 1, DEADLINE);
    let mut ends = watch.records.iter();
    let end = ends.find(|end| end.value == value("unreadable")).unwrap();
    let code = text(end, ERROR_CODE).unwrap();
    assert_eq!(code.as_deref(), Some("header.name"), "{end:?}");
}

#[test]
fn python_worker_replaces_refused_records() {
    ends_refused_records(Python);
}

#[test]
fn java_worker_replaces_refused_records() {
    ends_refused_records(Java);
}
