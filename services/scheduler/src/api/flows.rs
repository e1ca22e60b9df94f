//! What the index knows of the flows of all shards: the list of applications, and whether jobs are left to dispatch, for the one-shot
//! mode.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_runtime::config::{Area, Verb};
use redeliver_service::host::Host;
use redeliver_service::idle::Dispatch;

use super::call::Call;
use super::completeness::{KafkaWait, read_complete};
use super::error::RequestError;
use super::jobs::Jobs;
use crate::controls::AppStates;
use crate::index::{FinishedRelease, FlowScan, Index, ScanRequest};
use crate::job::Flow;

/// Keeps a one-shot process running while jobs are left to dispatch. `ingest`: the id of the ingest topic.
pub(super) fn run_until_dispatched<I: Index>(host: &mut Host, jobs: &Arc<Jobs<I>>, ingest: Option<TopicId>) {
    let scheduler = &host.config.scheduler;
    let (states, group) = (
        scheduler.topics.state.as_str().into(),
        host.kafka.id(&scheduler.group),
    );
    let jobs = jobs.clone();
    host.dispatches(Dispatch {
        commands: jobs.ingest.clone(),
        group,
        states,
        left: Box::new(move |until| {
            let jobs = jobs.clone();
            Box::pin(async move {
                match jobs.left_to_dispatch(ingest, until).await {
                    Ok(left) => Ok(left),
                    Err(RequestError::IndexIncomplete) => {
                        Ok(Some("the index does not contain all jobs yet".to_owned()))
                    }
                    Err(error) => Err(anyhow::anyhow!(error.into_problem().body.detail)),
                }
            })
        }),
    });
}

impl<I: Index> Jobs<I> {
    /// The applications of the configuration that the caller may read, by name.
    pub(crate) async fn applications(&self, call: &Call) -> Result<Vec<v1::Application>, RequestError> {
        let caller = &call.caller;
        self.require_some(caller, Verb::Read, "list_applications")?;
        let states = self.app_states.current();
        let of_config = self.rules.apps.iter();
        let of_config = of_config.filter(|(name, _)| caller.may(Area::Jobs, Verb::Read, Some(name)));
        let mut apps: BTreeMap<&str, v1::Application> = of_config
            .map(|(name, topic)| {
                let sees_control = caller.may(Area::Control, Verb::Read, Some(name));
                let presence = self.topics.presence(topic);
                let problem = presence.is_unavailable().then(|| presence.to_string());
                let app = v1::Application {
                    name: name.clone(),
                    topic: topic.to_string(),
                    paused: sees_control.then(|| states.is_paused(name)),
                    rate_per_second: states.rates.get(name).copied().filter(|_| sees_control),
                    max_waiting: self.max_waiting.get(name.as_str()).copied(),
                    topic_problem: problem.unwrap_or_default(),
                    ..v1::Application::default()
                };
                (name.as_str(), app)
            })
            .collect();
        let mut next_due: BTreeMap<&str, Timestamp> = BTreeMap::new();
        let shards = self.flows(Timestamp::from_millis(i64::MAX)).await?;
        for FlowScan { flow, first, due, .. } in shards.iter().flatten().filter(|scan| is_of_jobs(&scan.flow))
        {
            if let Some(app) = apps.get_mut(&*flow.app) {
                app.due += due;
                let next = next_due.entry(&flow.app).or_insert(*first);
                *next = (*next).min(*first);
                app.next_due = Some(to_timestamp(*next));
            }
        }
        Ok(apps.into_values().collect())
    }

    /// What is left to dispatch until this time, paused applications apart.
    async fn left_to_dispatch(
        &self,
        ingest: Option<TopicId>,
        until: Timestamp,
    ) -> Result<Option<String>, RequestError> {
        let apps = self.app_states.current();
        let shards = self.flows(until).await?;
        if let Some(scan) = shards.iter().flatten().find(|scan| !is_paused(&scan.flow, &apps)) {
            let what = match &*scan.flow.app {
                "" => "recurring schedules".to_owned(),
                app if is_of_jobs(&scan.flow) => format!("jobs of `{app}`"),
                pipeline => format!("long waits of pipeline `{pipeline}`"),
            };
            return Ok(Some(format!("{what} are due, or will be within the duration")));
        }
        for (pipeline, release) in &apps.released_waits {
            for shard in 0..self.partitions {
                let before = release.before(ingest, shard);
                let Some(topic) = ingest.filter(|_| before > 0) else {
                    continue;
                };
                let wanted = FinishedRelease { topic, before };
                let (_, finished) = self.index.finished_release(shard, pipeline).await?;
                if !finished.is_some_and(|finished| finished.includes(&wanted)) {
                    return Ok(Some(format!(
                        "records of pipeline `{pipeline}` are being released"
                    )));
                }
            }
        }
        Ok(None)
    }

    /// The flows of each shard with jobs that are due until this time.
    async fn flows(&self, until: Timestamp) -> Result<Vec<Vec<FlowScan>>, RequestError> {
        let wait = KafkaWait::new();
        let request = ScanRequest {
            until,
            now: self.clock.now(),
            after: None,
            jobs_per_flow: 0,
            positions: Vec::new(),
            jobs: 0,
            bytes: 0,
            rotation: 0,
        };
        let reads = (0..self.partitions).map(async |shard| {
            read_complete(&self.partition_end(shard), &wait, || async {
                let scan = self.index.scan(shard, &request).await?;
                Ok((scan.applied, scan.flows))
            })
            .await
        });
        Self::read_shards(reads.collect()).await
    }
}

/// Whether a flow is one of jobs. Long waits and schedules have no topic; a pipeline can have the name of an application.
fn is_of_jobs(flow: &Flow) -> bool {
    !flow.topic.is_empty()
}

fn is_paused(flow: &Flow, apps: &AppStates) -> bool {
    is_of_jobs(flow) && apps.is_paused(&flow.app)
}
