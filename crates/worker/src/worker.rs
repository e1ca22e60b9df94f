//! Putting a worker together: lanes and drivers of one pipeline.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Pipeline;
use redeliver_kafka::{IfRecreated, KafkaSettings, LaneSpec, Waker};
use tokio_util::sync::CancellationToken;

use crate::driver::{Driver, Surroundings};
use crate::engine::{Engine, Exchange, InFlight, Topics};
use crate::handler::Handler;
use crate::host::Host;

/// How a pipeline is worked on.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// How Kafka is reached.
    pub kafka: KafkaSettings,
    /// How many lanes (threads with a consumer and a producer each) work on it, at least 1.
    pub lanes: usize,
    /// About how many records one transaction holds at most.
    pub batch: usize,
    /// How many attempts run at the same time, over all lanes, at least 1 per lane.
    pub concurrency: usize,
    /// How many records one lane holds at most, from reading to commit.
    pub in_flight: usize,
    /// How many bytes of them and of their results, about.
    pub in_flight_bytes: usize,
    /// How long a stopping lane may finish what it has in hand.
    pub grace: Duration,
}

/// Starts the lanes of a pipeline as supervised tasks of `host`. They end when the host shuts down.
///
/// # Errors
/// When the system gives no thread.
pub fn spawn<H: Handler>(host: &mut Host, spec: &WorkerSpec, handler: &H) -> io::Result<()> {
    let lanes = spec.lanes.max(1);
    let has_due = host.has_topic(&spec.pipeline.due_topic());
    let metrics = Arc::new(host.workers.of(&spec.pipeline.name));
    let watch = host.topic_watch()?;
    let missing_timeout = host.config.kafka.topics.missing_timeout.duration();
    let surroundings = Arc::new(Surroundings {
        pipeline: spec.pipeline.clone(),
        clock: host.clock.clone(),
        metrics: metrics.clone(),
        tracer: host.tracer.clone(),
    });
    for lane in 0..lanes {
        let name = format!("worker-{}-{lane}", spec.pipeline.name);
        let waker = Waker::new();
        let exchange = Arc::new(Exchange::new(waker.clone()));
        let gauge = host.workers.in_flight(&name);
        let written = spec.pipeline.written_topics();
        watch.watch(written.iter().cloned(), &waker);
        let topics = Topics {
            missing_for: Box::new({
                let watch = watch.clone();
                move |topic| watch.missing_for(topic)
            }),
            timeout: missing_timeout,
            gauges: host.workers.missing_topics(&name, &written),
            written,
        };
        let engine = Engine::new(
            spec.pipeline.clone(),
            exchange.clone(),
            metrics.clone(),
            gauge,
            topics,
            InFlight {
                records: spec.in_flight,
                bytes: spec.in_flight_bytes,
            },
        );
        let driver = Driver {
            handler: handler.clone(),
            exchange,
            concurrency: share(spec.concurrency, lanes, lane),
            surroundings: surroundings.clone(),
        };
        let lane_ended = CancellationToken::new();
        host.tasks.spawn(format!("{name}-driver"), {
            let lane_ended = lane_ended.clone();
            async move {
                driver.run(lane_ended).await;
                Ok::<(), std::convert::Infallible>(())
            }
        });
        let lane = LaneSpec {
            name,
            group: spec.pipeline.worker_group(),
            topics: spec.pipeline.worker_topics(has_due),
            batch: spec.batch,
            grace: spec.grace,
            changelog: None,
            if_recreated: IfRecreated::ReadFromBeginning,
        };
        host.spawn_lane(
            spec.kafka.clone(),
            lane,
            waker,
            engine,
            Some(lane_ended.drop_guard()),
        )?;
    }
    Ok(())
}

/// The part of a total that falls to one of several lanes; at least 1.
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
