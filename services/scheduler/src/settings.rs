//! The settings that all shards of a process share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{ERROR_CLASS, ERROR_CODE, PIPELINE};
use redeliver_core::route::OPERATOR_DEAD;
use redeliver_core::{ErrorClass, Headers, Output, Pipeline};

use crate::codec::RetentionPolicy;
use crate::controls::{AppStates, LiveAppStates};
use crate::quota::Quotas;
use crate::rate::{Buckets, Rates};
use crate::request::Rules;
use crate::topics::Topics;

/// The settings of the shards.
pub(crate) struct Settings {
    pub(crate) rules: Rules,
    /// The ingest topic.
    pub(crate) ingest: Arc<str>,
    /// The state topic.
    pub(crate) state: Arc<str>,
    /// The dead-letter topic of the scheduler.
    pub(crate) dead_letters: Arc<str>,
    /// The answers topic.
    pub(crate) answers: Arc<str>,
    /// The number of partitions of the ingest topic and of the state topic.
    pub(crate) partitions: i32,
    pub(crate) retention: RetentionPolicy,
    /// Jobs that are due within this time are held in memory.
    pub(crate) window: Duration,
    /// The maximum number of jobs in the window.
    pub(crate) window_jobs: usize,
    /// The maximum size of the jobs in the window in bytes.
    pub(crate) window_bytes: usize,
    /// The maximum size of the changes that are applied to the index at once, in bytes.
    pub(crate) index_batch_bytes: usize,
    pub(crate) topics: Arc<dyn Topics>,
    /// How long after its due time a job waits for a missing topic.
    pub(crate) missing_topic_timeout: Duration,
    /// How many jobs of applications with a quota may wait in all shards.
    pub(crate) max_waiting: BTreeMap<Arc<str>, u64>,
    /// Which applications are paused or limited.
    pub(crate) app_states: LiveAppStates,
    /// The tokens of applications that are limited.
    pub(crate) buckets: Buckets,
}

impl Settings {
    /// Whether an output goes to the scheduler's dead-letter topic, or to that of the pipeline to which it belongs.
    pub(crate) fn is_dead_letter(&self, output: &Output) -> bool {
        let is_of_pipeline = || {
            let pipeline = self.pipeline_named_by(&output.headers);
            pipeline.is_some_and(|pipeline| output.topic == pipeline.dead_letter_topic())
        };
        output.topic == self.dead_letters || is_of_pipeline()
    }

    /// The pipeline that has written a record.
    pub(crate) fn pipeline_named_by(&self, headers: &Headers) -> Option<Arc<Pipeline>> {
        let name = std::str::from_utf8(headers.last(PIPELINE)?).ok()?;
        self.rules.pipeline(name)
    }

    /// How many jobs of each application a shard may dispatch per second.
    pub(crate) fn rates(&self, states: &AppStates, shard: i32) -> Rates {
        Rates::of_shard(&states.rates, shard, self.partitions, self.buckets.clone())
    }

    /// How many jobs of each application with a quota may wait in a shard.
    pub(crate) fn quotas(&self) -> Quotas {
        Quotas::of_shard(&self.max_waiting, self.partitions)
    }

    /// The error code under which an output is counted that is a dead letter.
    pub(crate) fn dead_letter_code<'o>(&self, output: &'o Output) -> Option<&'o str> {
        let text = |name| std::str::from_utf8(output.headers.last(name)?).ok();
        // Only what an operator has given up is exhausted here. Its code comes from an endpoint, so there can be any number of them.
        let code = match text(ERROR_CLASS) == Some(ErrorClass::Exhausted.as_str()) {
            true => OPERATOR_DEAD,
            false => text(ERROR_CODE)?,
        };
        self.is_dead_letter(output).then_some(code)
    }
}
