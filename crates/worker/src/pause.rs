//! Pauses the lanes of a pipeline while an operator wants it.

use std::convert::Infallible;
use std::sync::Arc;

use redeliver_service::Host;
use redeliver_service::control::Control;
use tokio_util::sync::CancellationToken;

use crate::breaker::Gate;
use crate::engine::LaneChannel;
use crate::metrics::WorkerMetrics;

/// Whether a pipeline is paused, and what must obey it.
pub(crate) struct Pause {
    control: Control,
    pipeline: Arc<str>,
    metrics: Arc<WorkerMetrics>,
    gate: Gate,
    channels: Vec<Arc<LaneChannel>>,
}

impl Pause {
    pub(crate) fn new(
        host: &mut Host,
        control: Control,
        pipeline: Arc<str>,
        metrics: Arc<WorkerMetrics>,
        gate: Gate,
    ) -> Self {
        host.report_paused(&pipeline, "paused pipelines", {
            let pipeline = pipeline.clone();
            move |snapshot| {
                let is_paused = snapshot.is_pipeline_paused(&pipeline);
                is_paused.then(|| pipeline.to_string()).into_iter().collect()
            }
        });
        Self {
            control,
            pipeline,
            metrics,
            gate,
            channels: Vec::new(),
        }
    }

    /// Makes a lane obey. Call it before the lane is started, so that it never runs while the pipeline is paused.
    pub(crate) fn applies_to(&mut self, channel: Arc<LaneChannel>) {
        channel.set_paused(self.is_paused());
        self.channels.push(channel);
    }

    fn is_paused(&self) -> bool {
        self.control.snapshot().is_pipeline_paused(&self.pipeline)
    }

    /// Follows the control topic. After `stop`, records in hand end as they do without a pause.
    pub(crate) async fn follow(self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut changes = self.control.changes();
        loop {
            let is_paused = self.is_paused();
            self.metrics.paused.set(is_paused.into());
            if !is_paused && self.channels.iter().any(|channel| channel.is_paused()) {
                // Before the first attempt.
                self.gate.resumed();
            }
            for channel in self
                .channels
                .iter()
                .filter(|channel| channel.is_paused() != is_paused)
            {
                channel.set_paused(is_paused);
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return Ok(()) },
                () = stop.cancelled() => return Ok(()),
            }
        }
    }
}
