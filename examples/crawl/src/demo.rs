//! The demonstration: an embedded broker, the services and sites in one process.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Record};
use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_kafka::follow::{Follower, Origin};
use redeliver_retry_tier::RetryTierConfig;
use redeliver_runtime::cli::{CommonArgs, Start, report};
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_service::{Host, main_with, topics};
use redeliver_worker::Sections;
use tokio_util::sync::CancellationToken;

use crate::crawler::{TURN, field};
use crate::demo_sites::DemoSites;
use crate::fetch;
use crate::worker::Crawl;

/// How long nothing must happen after all pages have ended. A page that is crawled twice would be seen by then.
const SETTLE: Duration = Duration::from_secs(3);
/// After this time, a page is considered lost. The demonstration takes about 15 seconds.
const DEADLINE: Duration = Duration::from_secs(150);

pub(crate) fn main() -> ExitCode {
    match prepare() {
        Ok((_broker, common)) => main_with("crawl-demo", &common, |_| Ok(()), run),
        Err(error) => report(&*error),
    }
}

fn prepare() -> anyhow::Result<(EmbeddedBroker, CommonArgs)> {
    let mut common = CommonArgs {
        config: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/crawl.yaml").into()),
        ..CommonArgs::default()
    };
    let config = common.load::<Sections>()?;
    let spec = topics::of_all(&config);
    let names = spec.topics.iter().map(|topic| topic.name.to_string());
    let broker = EmbeddedBroker::start(&names.map(|name| (name, 4)).collect::<Vec<_>>())?;
    let settings = [
        ("kafka.brokers", broker.brokers()),
        ("kafka.static_membership", "false"),
        ("admin.listen", "127.0.0.1:0"),
        ("telemetry.level", "error"),
    ];
    common.set = settings.map(|(key, value)| (key.into(), value.into())).to_vec();
    Ok((broker, common))
}

async fn run(start: Start, own: Sections) -> anyhow::Result<()> {
    let mut host = Host::new("crawl-demo", start);
    // The embedded broker has no consumer groups.
    host.kafka.is_embedded = true;
    redeliver_retry_tier::mount(&mut host, &RetryTierConfig::default()).await?;
    redeliver_scheduler::mount(&mut host, MemoryIndex::new()).await?;
    let crawl = Crawl::from_config(&host.config, &own)?;
    crawl
        .mount(&mut host, vec!["127.0.0.1".to_owned()], fetch::client()?)
        .await?;
    let stop = host.tasks.shutdown().clone();
    let (sites, serving) = DemoSites::bind(&stop).await?;
    host.tasks.spawn("sites", serving);
    println!(
        "The scheduler, the retry tier and the crawler run in this process, on an embedded broker. It is not durable \
         and does not demonstrate the delivery guarantees.\n"
    );
    let first_page = format!("{}/0", sites.0[0].origin).parse()?;
    crawl.schedule(&host, &[first_page]).await?;
    let topics = crawl.spec.pipeline.topics().into_iter();
    let topics: Vec<Arc<str>> = topics.map(|(topic, _)| topic).collect();
    let follower = Follower::of_topics(&host.kafka, &topics, Origin::Beginning)?;
    let observer = move || observe(follower, &crawl.spec.pipeline, &sites, &stop);
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
        let topics = pipeline.topics();
        let (_, role) = topics.iter().find(|(topic, _)| *topic == record.position.topic)?;
        let content = record.value.as_deref()?;
        // Requests to the scheduler are results as well, but have no `url`.
        let url = field(content, "/url")?;
        let code = String::from_utf8_lossy(record.headers.last(ERROR_CODE).unwrap_or_default());
        let code = field(content, "/status").unwrap_or_else(|| code.into_owned());
        match role {
            TopicRole::Tier(_) if code == TURN => self.throttled += 1,
            TopicRole::Source | TopicRole::Due => (),
            TopicRole::Tier(tier) => {
                self.retries += 1;
                return Some(format!("{url}  {code}; waiting in tier {tier}"));
            }
            TopicRole::Output | TopicRole::DeadLetter => {
                let event = format!("{url}  {code}");
                self.ends.entry(url).or_default().push(code);
                return Some(event);
            }
        }
        None
    }
}

/// Prints what happens, and a report after all pages have ended.
fn observe(
    mut follower: Follower,
    pipeline: &Pipeline,
    sites: &DemoSites,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let (start, mut last_record) = (Instant::now(), Instant::now());
    let (mut outcomes, expected) = (Outcomes::default(), sites.expected());
    while outcomes.ends.len() < expected.len() || last_record.elapsed() < SETTLE {
        if stop.is_cancelled() {
            return Ok(());
        }
        let ends = &outcomes.ends;
        anyhow::ensure!(
            start.elapsed() < DEADLINE,
            "deadline exceeded: expected {expected:#?}, got {ends:#?}"
        );
        if let Some(record) = follower.next(Duration::from_millis(100))? {
            last_record = Instant::now();
            if let Some(event) = outcomes.add(pipeline, &record) {
                println!("{:6.1}s  {event}", start.elapsed().as_secs_f64());
            }
        }
    }
    stop.cancel();
    println!("\nsite                    requests  delay    shortest interval");
    for site in &sites.0 {
        let (requests, interval) = site.visits();
        let (origin, delay, millis) = (&site.origin, site.delay.as_millis(), interval.as_millis());
        println!("{origin:<22}  {requests:<8}  {delay:>4} ms  {millis:>4} ms");
        anyhow::ensure!(interval >= site.delay, "{origin} did not get its delay");
    }
    let (pages, ends) = (expected.len(), &outcomes.ends);
    anyhow::ensure!(*ends == expected, "expected {expected:#?}, got {ends:#?}");
    println!(
        "\nAll {pages} pages ended once, after {} retries and {} waits for a busy site.",
        outcomes.retries, outcomes.throttled
    );
    Ok(())
}
