//! The whole crawl in one process: the site, the worker, the first jobs, and the report in the end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::murmur2::shard_of;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader;
use redeliver_worker::host::Host;
use reqwest::Url;
use tokio_util::sync::CancellationToken;

use crate::crawler::Settings;
use crate::fetch::Limits;
use crate::hosts;
use crate::job::Scheduling;
use crate::report::Report;
use crate::site::{Plan, Site, SiteMap};
use crate::watch::{Watch, Watched};
use crate::worker::Crawl;

/// The site's hanging pages are given up after this.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is told how far the crawl is.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Crawls the demonstration's site to its end, or until the host is told to stop. The scheduler and the retry
/// tier run in this host, or elsewhere.
///
/// # Errors
/// When the site cannot be served, Kafka does not answer, or a task fails.
pub async fn run(mut host: Host, crawl: Crawl) -> anyhow::Result<Report> {
    let site = Site::bind(Plan::demonstration(), None)
        .await
        .context("serving the site")?;
    let (map, log) = (site.map().clone(), site.log());
    let stop = host.tasks.shutdown().clone();
    host.tasks.spawn("site", site.serve(stop.clone()));
    let settings = Settings {
        hosts: hosts::Settings::default(),
        limits: Limits {
            timeout: TIMEOUT,
            ..Limits::default()
        },
        scheduling: crawl.scheduling.clone(),
        within: vec!["127.0.0.1".to_owned()],
    };
    let pause = settings.hosts.delay;
    crawl.mount(&mut host, settings)?;

    let watched = Arc::new(Watched::default());
    let watch = Watch::new(&host.kafka, crawl.pipeline.clone(), watched.clone(), map.clone())?;
    // The watch goes on until everything else has ended, so that it sees the last records.
    let ended = CancellationToken::new();
    let watching = std::thread::Builder::new().name("watch".into()).spawn({
        let ended = ended.clone();
        move || watch.run(&ended)
    })?;
    let conductor = Conductor {
        kafka: host.kafka.clone(),
        scheduling: crawl.scheduling,
        map: map.clone(),
        watched: watched.clone(),
    };
    let closing = conductor.closing_pages().await?;
    host.tasks.spawn("conductor", {
        let closing = closing.clone();
        async move {
            tokio::select! {
                ended = conductor.conduct(&closing) => ended?,
                () = stop.cancelled() => {}
            }
            stop.cancel();
            anyhow::Ok(())
        }
    });
    let result = host.run().await;
    ended.cancel();
    watching
        .join()
        .map_err(|_| anyhow::anyhow!("the watch panicked"))??;
    result?;
    let closing: Vec<String> = closing.into_iter().map(String::from).collect();
    Ok(Report::new(&map, &log, &watched.ledger(), pause, &closing))
}

/// Begins the crawl and notices its end.
struct Conductor {
    kafka: KafkaSettings,
    scheduling: Scheduling,
    map: SiteMap,
    watched: Arc<Watched>,
}

impl Conductor {
    async fn conduct(&self, closing: &[Url]) -> anyhow::Result<()> {
        let producer = Producer::new(&self.kafka)?;
        for page in self.map.seeds() {
            producer.send(&self.scheduling.seed(&page)).await?;
        }
        self.all_ended(self.map.reachable().into_keys().collect()).await;
        // Every page has ended. Whether one of them was scheduled a second time is known only when the scheduler
        // has decided on all requests that stand before: a last job for each of its shards tells.
        for page in closing {
            producer.send(&self.scheduling.last(page)).await?;
        }
        self.all_ended(closing.iter().map(Url::to_string).collect()).await;
        Ok(())
    }

    async fn all_ended(&self, pages: Vec<String>) {
        let ended = self
            .watched
            .until(|ledger| pages.iter().all(|page| ledger.seen(page).has_ended()));
        let tell = async {
            let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + TELL_EVERY, TELL_EVERY);
            loop {
                ticks.tick().await;
                let ledger = self.watched.ledger();
                let done = pages.iter().filter(|page| ledger.seen(page).has_ended()).count();
                println!("--------  {done} of {} pages", pages.len());
            }
        };
        tokio::select! {
            () = ended => {}
            () = tell => {}
        }
    }

    /// One page for each shard of the scheduler.
    async fn closing_pages(&self) -> anyhow::Result<Vec<Url>> {
        let (kafka, topic) = (self.kafka.clone(), self.scheduling.ingest.clone());
        let partitions = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
            .await
            .context("looking at the ingest topic")??;
        let app = &self.scheduling.app;
        let of_shard = |shard: i32| {
            let pages = (0..).map(|number| self.map.closing_page(number));
            let mut pages = pages.filter(|page| shard_of(app, page.as_str(), partitions) == shard);
            pages.next()
        };
        Ok((0..partitions).filter_map(of_shard).collect())
    }
}
