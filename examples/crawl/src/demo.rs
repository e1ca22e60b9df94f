//! The demonstration: an embedded broker, the services and a site in one process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Record};
use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_kafka::reader::TopicTail;
use redeliver_runtime::cli::{CommonArgs, Start};
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_service::{Host, topics};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::crawler::TURN;
use crate::site::Site;
use crate::worker::Crawl;

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/crawl.yaml");
const PARTITIONS: i32 = 4;
/// Shorter than the default because one page does not respond.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long nothing must happen after all pages have ended. A page that is crawled twice would be seen by then.
const SETTLE: Duration = Duration::from_secs(3);

/// Starts the broker. The flags lead to it.
pub(crate) fn prepare() -> anyhow::Result<(EmbeddedBroker, CommonArgs)> {
    let config = Some(CONFIG.into());
    let mut common = CommonArgs {
        config,
        ..CommonArgs::default()
    };
    let spec = topics::of_all(&common.load()?);
    let names = spec.topics.iter().map(|topic| topic.name.to_string());
    let broker = EmbeddedBroker::start(&names.map(|name| (name, PARTITIONS)).collect::<Vec<_>>())?;
    let settings = [
        ("kafka.brokers", broker.brokers()),
        ("kafka.static_membership", "false"),
        ("admin.listen", "127.0.0.1:0"),
        ("telemetry.level", "error"),
    ];
    let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    common.set = settings.map(owned).to_vec();
    Ok((broker, common))
}

/// Runs the demonstration to its end.
pub(crate) async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("crawl-demo", start);
    // The embedded broker has no consumer groups.
    host.kafka.takes_all_partitions = true;
    redeliver_retry_tier::mount(&mut host)?;
    redeliver_scheduler::mount(&mut host, MemoryIndex::new()).await?;
    let crawl = Crawl::from_config(&host.config)?;
    crawl.mount(&mut host, vec!["127.0.0.1".to_owned()], TIMEOUT)?;
    let stop = host.tasks.shutdown().clone();
    let (site, serving) = Site::bind(&stop).await?;
    host.tasks.spawn("site", serving);
    println!(
        "The scheduler, the retry tier and the crawler run in this process, on an embedded broker. It is not durable \
         and does not demonstrate the delivery guarantees.\n"
    );
    let first_page = format!("{}/0", site.0[0].origin).parse()?;
    crawl.schedule(&host.kafka, &[first_page]).await?;
    let topics = crawl.pipeline.topics().into_iter();
    let topics: Vec<Arc<str>> = topics.map(|(topic, _)| topic).collect();
    let tail = TopicTail::new(&host.kafka, &topics)?;
    let observer = move || observe(tail, &crawl.pipeline, &site, &stop);
    host.tasks.spawn_thread("observer", observer)?;
    Ok(host.run().await?)
}

/// What happened to the pages, read from the pipeline's topics.
#[derive(Default)]
struct Outcomes {
    /// By URL, the status of each result and the error code of each dead letter.
    ends: BTreeMap<String, Vec<String>>,
    retries: u32,
    throttled: u32,
}

impl Outcomes {
    /// Adds a record, and describes it if it is worth printing.
    fn add(&mut self, pipeline: &Pipeline, record: &Record) -> Option<String> {
        #[derive(Deserialize)]
        struct Page {
            url: String,
            status: Option<u16>,
        }
        let topics = pipeline.topics();
        let (_, role) = topics.iter().find(|(topic, _)| *topic == record.position.topic)?;
        // Requests to the scheduler are results as well, but have no `url`.
        let Page { url, status } = serde_json::from_slice(record.value.as_deref()?).ok()?;
        let code = String::from_utf8_lossy(record.headers.last(ERROR_CODE).unwrap_or_default());
        let code = status.map_or(code.into_owned(), |status| status.to_string());
        match role {
            TopicRole::Source | TopicRole::Due => None,
            TopicRole::Tier(_) if code == TURN => {
                self.throttled += 1;
                None
            }
            TopicRole::Tier(tier) => {
                self.retries += 1;
                Some(format!("{url}  {code}; waiting in tier {tier}"))
            }
            TopicRole::Output | TopicRole::DeadLetter => {
                let event = format!("{url}  {code}");
                self.ends.entry(url).or_default().push(code);
                Some(event)
            }
        }
    }
}

/// Prints what happens, and a report after all pages have ended.
fn observe(
    mut tail: TopicTail,
    pipeline: &Pipeline,
    site: &Site,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let (start, mut last_record) = (Instant::now(), Instant::now());
    let (mut outcomes, expected) = (Outcomes::default(), site.expected());
    while outcomes.ends.len() < expected.len() || last_record.elapsed() < SETTLE {
        if stop.is_cancelled() {
            return Ok(());
        }
        if let Some(record) = tail.next(Duration::from_millis(100))? {
            last_record = Instant::now();
            if let Some(event) = outcomes.add(pipeline, &record) {
                println!("{:6.1}s  {event}", start.elapsed().as_secs_f64());
            }
        }
    }
    stop.cancel();
    println!("\nhost                    requests  delay    shortest interval");
    for host in &site.0 {
        let (requests, interval) = host.visits();
        let (origin, delay, millis) = (&host.origin, host.delay.as_millis(), interval.as_millis());
        println!("{origin:<22}  {requests:<8}  {delay:>4} ms  {millis:>4} ms");
        anyhow::ensure!(interval >= host.delay, "{} did not get its delay", host.origin);
    }
    let Outcomes {
        ends,
        retries,
        throttled,
    } = outcomes;
    let pages = expected.len();
    anyhow::ensure!(ends == expected, "expected {expected:#?}, got {ends:#?}");
    println!(
        "\nAll {pages} pages ended once, after {retries} retries and {throttled} waits for a busy host."
    );
    Ok(())
}
