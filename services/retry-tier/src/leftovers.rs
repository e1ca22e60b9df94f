//! Tiers that pipelines do not have any more: records wait in them until they are due, whatever the settings are now.
//!
//! Each leftover topic has a lane of its own, in the group of its tier, so that it goes on where the group stands.
//! The topics of a lane never change by it: other pipelines may have the tier still, and theirs have their own
//! lanes. A leftover is served for as long as its topic exists, because during a rolling restart a process with the
//! former configuration may still write to it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Pipeline, Span, pipeline};
use redeliver_kafka::backlog::{Backlog, backlogs};
use redeliver_kafka::topology::{self, TopologySpec};
use redeliver_kafka::{IfRecreated, KafkaSettings, LaneSpec, Waker};
use redeliver_runtime::Config;
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::health::Part;
use redeliver_runtime::telemetry::Tracer;
use redeliver_worker::host::{Host, LaneStarter, lane_grace};
use redeliver_worker::leftovers::{Leftover, leftovers};
use redeliver_worker::topics;
use tokio_util::sync::CancellationToken;

use crate::metrics::TierFamilies;
use crate::relay::{LookAhead, Relay, Served, is_missing};

/// How often the topics are looked over.
const EVERY: Duration = Duration::from_secs(10);
/// How soon again when Kafka did not answer.
const AGAIN: Duration = Duration::from_secs(1);
/// How long one look may take.
const LOOK: Duration = Duration::from_secs(10);
/// How long counting may take.
const COUNT: Duration = Duration::from_secs(20);

/// Looks for leftovers, starts and ends their lanes, and says what waits where nobody serves it.
pub(crate) struct Watch {
    config: Arc<Config>,
    kafka: KafkaSettings,
    look_ahead: LookAhead,
    pipelines: Vec<Pipeline>,
    needed: TopologySpec,
    families: TierFamilies,
    tracer: Tracer,
    lanes: LaneStarter,
    stop: CancellationToken,
    part: Part,
    /// The lanes that run, by the topic that each serves.
    running: BTreeMap<Arc<str>, CancellationToken>,
    /// What was empty when it was looked at last.
    empty: BTreeSet<Arc<str>>,
}

impl Watch {
    /// The process is not ready before the first look.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn new(
        host: &mut Host,
        kafka: KafkaSettings,
        look_ahead: LookAhead,
        families: TierFamilies,
    ) -> std::io::Result<Self> {
        Ok(Self {
            lanes: host.starter()?,
            look_ahead,
            pipelines: topics::pipelines(&host.config),
            needed: topics::of_all(&host.config),
            families,
            tracer: host.tracer.clone(),
            stop: host.tasks.shutdown().clone(),
            part: host.health.part("leftovers"),
            running: BTreeMap::new(),
            empty: BTreeSet::new(),
            config: host.config.clone(),
            kafka,
        })
    }

    /// Looks over the topics now and then, until the process ends.
    pub(crate) async fn run(mut self) -> Result<(), Infallible> {
        let mut is_first = true;
        while !self.stop.is_cancelled() {
            let stop = self.stop.clone();
            let looked = tokio::select! {
                looked = self.look(is_first) => looked,
                () = stop.cancelled() => break,
            };
            is_first &= !looked;
            tokio::select! {
                () = tokio::time::sleep(if looked { EVERY } else { AGAIN }) => {}
                () = stop.cancelled() => break,
            }
        }
        Ok(())
    }

    /// False when Kafka did not answer.
    async fn look(&mut self, is_first: bool) -> bool {
        let existing = match topology::names(&self.kafka.client(), LOOK).await {
            Ok(existing) => existing,
            Err(error) => {
                tracing::debug!(error = error_chain(&error), "looking for leftover tiers again");
                return false;
            }
        };
        let found = leftovers(&self.pipelines, &self.needed, &existing).into_iter();
        // What is not configured at all is for `redeliver topics check` to name: on a shared cluster it is others'.
        let (served, others): (Vec<_>, Vec<_>) = found
            .filter(|leftover| leftover.is_known)
            .partition(|leftover| self.serves(leftover));
        self.end_lanes(&served);
        for leftover in &served {
            self.serve(leftover, &existing).await;
        }
        self.part.ready();
        if is_first {
            self.warn_about(others).await;
        }
        self.say_what_is_empty(&served).await;
        true
    }

    fn serves(&self, leftover: &Leftover) -> bool {
        let settings = &self.config.retry_tier;
        let is_served = |tier| settings.serves_leftovers() && settings.serves(tier);
        leftover.tier.is_some_and(is_served)
    }

    /// Ends the lanes of topics that are gone.
    fn end_lanes(&mut self, served: &[Leftover]) {
        let remains = |topic: &Arc<str>| served.iter().any(|leftover| leftover.topic == *topic);
        self.running.retain(|topic, stop| {
            let remains = remains(topic);
            if !remains {
                tracing::info!(topic = &**topic, "leftover tier is gone");
                stop.cancel();
            }
            remains
        });
        self.empty.retain(remains);
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
        let has_due = existing.contains(&*pipeline.due_topic());
        let served = Served::new(Arc::new(pipeline.clone()), has_due);
        let stop = self.stop.child_token();
        match self.start_lane(tier, &leftover.topic, served, stop.clone()).await {
            Ok(()) => {
                tracing::info!(
                    topic = &*leftover.topic,
                    group = leftover.group(),
                    "serving a tier that its pipeline does not have any more"
                );
                self.running.insert(leftover.topic.clone(), stop);
            }
            Err(error) => {
                tracing::warn!(topic = &*leftover.topic, %error, "a leftover tier has no thread; trying again");
            }
        }
    }

    async fn start_lane(
        &self,
        tier: Span,
        topic: &str,
        served: Served,
        stop: CancellationToken,
    ) -> std::io::Result<()> {
        // Named after its one topic, so that under the same name a lane never reads another one.
        let name = format!("leftover-{topic}");
        let metrics = self.families.of(tier, &name);
        let is_missing = is_missing(self.lanes.topic_watch());
        let tracer = self.tracer.clone();
        let relay = Relay::new(tier, &[served], self.look_ahead, metrics, tracer, is_missing);
        let waker = Waker::new();
        self.lanes.topic_watch().watch(relay.written_topics(), &waker);
        let spec = LaneSpec {
            name,
            group: pipeline::retry_tier_group(tier),
            topics: relay.topics(),
            batch: self.config.kafka.batch as usize,
            grace: lane_grace(&self.config),
            changelog: None,
            if_recreated: IfRecreated::ReadFromBeginning,
        };
        let kafka = self.kafka.clone();
        self.lanes.start(kafka, spec, waker, stop, relay).await
    }

    /// Says of each once, where records wait that this process does not release.
    async fn warn_about(&self, others: Vec<Leftover>) {
        for (leftover, backlog) in self.count(others).await {
            let finding = leftover.finding(backlog).filter(|_| !backlog.is_empty());
            if let Some(finding) = finding {
                tracing::warn!(
                    topic = &*finding.topic,
                    problem = finding.problem,
                    remedy = finding.remedy,
                    "not served by this process"
                );
            }
        }
    }

    /// Says of each once, until something waits there again.
    async fn say_what_is_empty(&mut self, served: &[Leftover]) {
        for (leftover, backlog) in self.count(served.to_vec()).await {
            if !backlog.is_empty() {
                self.empty.remove(&leftover.topic);
            } else if self.empty.insert(leftover.topic.clone()) {
                tracing::info!(
                    topic = &*leftover.topic,
                    "leftover tier is empty; delete the topic once no process runs with the former configuration"
                );
            }
        }
    }

    async fn count(&self, leftovers: Vec<Leftover>) -> Vec<(Leftover, Backlog)> {
        if leftovers.is_empty() {
            return Vec::new();
        }
        let kafka = self.kafka.clone();
        let topics: Vec<_> = leftovers
            .iter()
            .map(|leftover| (leftover.group(), leftover.topic.clone()))
            .collect();
        let counted = tokio::task::spawn_blocking(move || backlogs(&kafka, &topics, COUNT)).await;
        match counted {
            Ok(Ok(mut counted)) => leftovers
                .into_iter()
                .filter_map(|leftover| Some((counted.remove(&leftover.topic)?, leftover)))
                .map(|(backlog, leftover)| (leftover, backlog))
                .collect(),
            Ok(Err(error)) => {
                tracing::debug!(
                    error = error_chain(&error),
                    "counting what waits in leftover tiers"
                );
                Vec::new()
            }
            Err(error) => {
                tracing::warn!(%error, "counting what waits in leftover tiers");
                Vec::new()
            }
        }
    }
}
