//! Serves leftover tiers: their records are released when they are due, although the pipeline no longer has the tier.
//!
//! Each leftover topic has its own lane, in the consumer group of its tier, so that reading continues at the committed
//! offset. No other lane's subscription changes. A leftover is served until its topic is deleted, even if it is empty,
//! because during a rolling restart a process with the previous configuration may still write to it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Pipeline;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::backlog::{Backlog, backlogs};
use redeliver_kafka::topology::{self, TopologySpec};
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::health::Part;
use redeliver_service::host::{Host, LaneStarter};
use redeliver_service::leftovers::{Leftover, leftovers};
use redeliver_service::topics;
use tokio_util::sync::CancellationToken;

use crate::config::RetryTierConfig;
use crate::lanes::TierLanes;
use crate::relay::ServedPipeline;

const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The delay after a failed check.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
const COUNT_TIMEOUT: Duration = Duration::from_secs(20);

/// Finds leftovers, starts and stops their lanes, and logs where records wait that this process does not serve.
pub(crate) struct LeftoverWatch {
    settings: RetryTierConfig,
    kafka: KafkaSettings,
    pipelines: Vec<Pipeline>,
    /// Those of them that must not be served.
    refused: BTreeSet<Arc<str>>,
    needed: TopologySpec,
    lanes: TierLanes,
    starter: LaneStarter,
    stop: CancellationToken,
    part: Part,
    /// Cancels the lane of each served topic.
    running: BTreeMap<Arc<str>, CancellationToken>,
    /// Topics that were empty at the last check.
    empty: BTreeSet<Arc<str>>,
}

impl LeftoverWatch {
    /// The process is not ready until the first check has succeeded.
    ///
    /// # Errors
    /// See [`Host::topic_watch`].
    pub(crate) fn new(host: &mut Host, settings: RetryTierConfig, lanes: TierLanes) -> io::Result<Self> {
        let pipelines = topics::pipelines(&host.config);
        Ok(Self {
            starter: host.starter()?,
            refused: pipelines
                .iter()
                .map(|pipeline| pipeline.name.clone())
                .filter(|name| host.is_refused(name))
                .collect(),
            pipelines,
            needed: topics::of_all(&host.config),
            lanes,
            stop: host.tasks.shutdown().clone(),
            part: host.health.part("leftovers"),
            running: BTreeMap::new(),
            empty: BTreeSet::new(),
            settings,
            kafka: host.kafka.clone(),
        })
    }

    /// Checks periodically until the process shuts down.
    pub(crate) async fn run(mut self) -> Result<(), Infallible> {
        let mut is_first = true;
        while !self.stop.is_cancelled() {
            let stop = self.stop.clone();
            let succeeded = tokio::select! {
                succeeded = self.check(is_first) => succeeded,
                () = stop.cancelled() => break,
            };
            is_first &= !succeeded;
            let delay = if succeeded { CHECK_INTERVAL } else { RETRY_DELAY };
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = stop.cancelled() => break,
            }
        }
        Ok(())
    }

    /// Returns false if Kafka is unavailable.
    async fn check(&mut self, is_first: bool) -> bool {
        let existing = match topology::names(&self.kafka.client(), LIST_TIMEOUT).await {
            Ok(existing) => existing,
            Err(error) => {
                tracing::debug!(
                    error = error_chain(&error),
                    "cannot look for leftover tiers; retrying"
                );
                return false;
            }
        };
        // Leftovers of pipelines that are not configured are left to `redeliver topics check`: on a shared cluster they
        // may belong to other programs.
        let found = leftovers(&self.pipelines, &self.needed, &existing).into_iter();
        let (served, others): (Vec<_>, Vec<_>) = found
            .filter(|leftover| leftover.is_known)
            .partition(|leftover| self.serves(leftover));
        self.stop_lanes(&served);
        for leftover in &served {
            self.serve(leftover, &existing).await;
        }
        self.part.ready();
        if is_first {
            self.warn_about(others).await;
        }
        self.log_empty(&served).await;
        true
    }

    fn serves(&self, leftover: &Leftover) -> bool {
        let settings = &self.settings;
        let is_served = |tier| settings.serves_leftovers() && settings.serves(tier);
        leftover.tier.is_some_and(is_served) && !self.refused.contains(&leftover.pipeline)
    }

    /// Stops the lanes of topics that no longer exist.
    fn stop_lanes(&mut self, served: &[Leftover]) {
        let exists = |topic: &Arc<str>| served.iter().any(|leftover| leftover.topic == *topic);
        self.running.retain(|topic, stop| {
            let exists = exists(topic);
            if !exists {
                tracing::info!(topic = &**topic, "leftover tier deleted");
                stop.cancel();
            }
            exists
        });
        self.empty.retain(exists);
    }

    async fn serve(&mut self, leftover: &Leftover, existing: &BTreeSet<String>) {
        let pipeline = self
            .pipelines
            .iter()
            .find(|pipeline| pipeline.name == leftover.pipeline);
        let (Some(tier), Some(pipeline)) = (leftover.tier, pipeline) else {
            return;
        };
        if self.running.contains_key(&leftover.topic) {
            return;
        }
        let has_due_topic = existing.contains(&*pipeline.due_topic());
        let pipeline = ServedPipeline::new(Arc::new(pipeline.clone()), has_due_topic);
        // The name contains the topic, so that a static member never subscribes to another topic (KAFKA-12759).
        let name = format!("leftover-{}", leftover.topic);
        let lane = self.lanes.lane(name, tier, &[pipeline]);
        let stop = self.stop.child_token();
        match self.starter.start(lane, stop.clone()).await {
            Ok(()) => {
                tracing::info!(
                    topic = &*leftover.topic,
                    group = leftover.group(&self.kafka.id_prefix),
                    "serving a leftover tier"
                );
                self.running.insert(leftover.topic.clone(), stop);
            }
            Err(error) => {
                tracing::warn!(topic = &*leftover.topic, %error, "cannot start a thread for a leftover tier; retrying");
            }
        }
    }

    /// Logs each leftover that holds records and is not served by this process.
    async fn warn_about(&self, others: Vec<Leftover>) {
        for (leftover, backlog) in self.count(others).await {
            let finding = leftover.finding(backlog).filter(|_| !backlog.is_empty());
            if let Some(finding) = finding {
                tracing::warn!(
                    topic = &*finding.topic,
                    problem = finding.problem,
                    remedy = finding.remedy,
                    "leftover tier not served by this process"
                );
            }
        }
    }

    /// Logs each leftover once when it becomes empty.
    async fn log_empty(&mut self, served: &[Leftover]) {
        for (leftover, backlog) in self.count(served.to_vec()).await {
            if !backlog.is_empty() {
                self.empty.remove(&leftover.topic);
            } else if self.empty.insert(leftover.topic.clone()) {
                tracing::info!(
                    topic = &*leftover.topic,
                    "leftover tier is empty; delete the topic once no process runs with the previous configuration"
                );
            }
        }
    }

    /// Pairs leftovers with their backlogs. Those that cannot be counted are omitted.
    async fn count(&self, leftovers: Vec<Leftover>) -> Vec<(Leftover, Backlog)> {
        if leftovers.is_empty() {
            return Vec::new();
        }
        let kafka = self.kafka.clone();
        let topics: Vec<_> = leftovers
            .iter()
            .map(|leftover| (leftover.group(&self.kafka.id_prefix), leftover.topic.clone()))
            .collect();
        let counted = tokio::task::spawn_blocking(move || backlogs(&kafka, &topics, COUNT_TIMEOUT)).await;
        match counted {
            Ok(Ok(mut counted)) => leftovers
                .into_iter()
                .filter_map(|leftover| Some((counted.remove(&leftover.topic)?, leftover)))
                .map(|(backlog, leftover)| (leftover, backlog))
                .collect(),
            Ok(Err(error)) => {
                tracing::debug!(
                    error = error_chain(&error),
                    "cannot count the records of leftover tiers"
                );
                Vec::new()
            }
            Err(error) => {
                tracing::warn!(%error, "cannot count the records of leftover tiers");
                Vec::new()
            }
        }
    }
}
