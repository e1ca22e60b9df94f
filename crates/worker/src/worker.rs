//! Starts the lanes and drivers of a pipeline.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Pipeline;
use redeliver_kafka::{IfRecreated, LaneSpec, Waker};
use redeliver_runtime::Config;
use redeliver_runtime::config::PipelineConfig;
use redeliver_service::host::{Host, NewLane, lane_grace};

use crate::driver::{AttemptContext, Driver};
use crate::engine::{Engine, InFlight, LaneChannel, OutputTopics};
use crate::handler::Handler;
use crate::metrics::WorkerFamilies;

/// How a pipeline is processed.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// Number of lanes; each is a thread with its own consumer and producers. At least 1.
    pub lanes: usize,
    /// Approximate maximum number of records in one transaction.
    pub batch: usize,
    /// Maximum number of concurrent attempts over all lanes; each lane runs at least 1.
    pub concurrency: usize,
    /// Maximum number of records in flight per lane.
    pub in_flight: usize,
    /// Approximate maximum number of bytes of the records in flight and their results, per lane.
    pub in_flight_bytes: usize,
    /// How long a stopping lane may finish records in flight.
    pub grace: Duration,
}

impl WorkerSpec {
    /// The settings of a configured pipeline. `concurrency` is the maximum number of concurrent attempts.
    #[must_use]
    pub fn from_config(config: &Config, name: &str, pipeline: &PipelineConfig, concurrency: usize) -> Self {
        Self {
            pipeline: Arc::new(pipeline.pipeline(name, &config.scheduler)),
            lanes: config.kafka.lanes as usize,
            batch: config.kafka.batch as usize,
            concurrency,
            in_flight: pipeline.in_flight as usize,
            in_flight_bytes: usize::try_from(pipeline.in_flight_bytes).unwrap_or(usize::MAX),
            grace: lane_grace(config),
        }
    }
}

/// Starts the lanes of a pipeline as supervised tasks of `host`. They end when the host shuts down.
///
/// # Errors
/// When the operating system cannot create a thread.
pub fn spawn<H: Handler>(host: &mut Host, spec: &WorkerSpec, handler: &H) -> io::Result<()> {
    let lanes = spec.lanes.max(1);
    let has_due_topic = host.has_topic(&spec.pipeline.due_topic());
    let families = host.metric_families(WorkerFamilies::register);
    let metrics = Arc::new(families.of(&spec.pipeline.name));
    let watch = host.topic_watch()?;
    let missing_timeout = host.config.kafka.topics.missing_timeout.duration();
    let context = Arc::new(AttemptContext {
        pipeline: spec.pipeline.clone(),
        clock: host.clock.clone(),
        metrics: metrics.clone(),
        tracer: host.tracer.clone(),
    });
    for lane in 0..lanes {
        let name = format!("worker-{}-{lane}", spec.pipeline.name);
        let waker = Waker::new();
        let channel = Arc::new(LaneChannel::new(waker.clone()));
        let written = spec.pipeline.written_topics();
        // The lane is woken when one of these topics is deleted or created.
        watch.watch(written.iter().cloned(), &waker);
        let topics = OutputTopics {
            missing_for: Box::new({
                let watch = watch.clone();
                move |topic| watch.missing_for(topic)
            }),
            timeout: missing_timeout,
            gauges: families.missing_topics(&name, &written),
            written,
        };
        let engine = Engine::new(
            spec.pipeline.clone(),
            channel.clone(),
            metrics.clone(),
            families.in_flight(&name),
            topics,
            InFlight {
                records: spec.in_flight,
                bytes: spec.in_flight_bytes,
            },
        );
        let driver = Driver {
            handler: handler.clone(),
            channel,
            concurrency: share(spec.concurrency, lanes, lane),
            context: context.clone(),
        };
        let driver_name = format!("{name}-driver");
        let lane_ended = host.spawn_lane(NewLane {
            kafka: host.kafka.clone(),
            spec: LaneSpec {
                name,
                group: spec.pipeline.worker_group(),
                topics: spec.pipeline.worker_topics(has_due_topic),
                batch: spec.batch,
                grace: spec.grace,
                changelog: None,
                if_recreated: IfRecreated::ReadFromBeginning,
            },
            waker,
            processor: engine,
        })?;
        // The driver outlives its lane, because a stopping lane waits for attempts in progress.
        host.tasks.spawn(driver_name, async move {
            driver.run(lane_ended).await;
            Ok::<(), std::convert::Infallible>(())
        });
    }
    Ok(())
}

/// One lane's share of a total, at least 1.
fn share(total: usize, lanes: usize, lane: usize) -> usize {
    (total / lanes + usize::from(lane < total % lanes)).max(1)
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn shares_add_up() {
        assert_eq!((0..3).map(|lane| share(16, 3, lane)).sum::<usize>(), 16);
        assert_eq!(share(1, 4, 3), 1);
    }
}
