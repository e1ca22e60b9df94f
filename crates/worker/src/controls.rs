//! What operators want of a pipeline: pauses its lanes, and limits its attempts.

use std::convert::Infallible;
use std::sync::Arc;

use redeliver_service::Host;
use redeliver_service::control::Control;
use redeliver_service::control::snapshot::PipelineState;
use tokio_util::sync::CancellationToken;

use crate::breaker::Gate;
use crate::engine::LaneChannel;
use crate::metrics::WorkerMetrics;
use crate::rate_limit::Limiter;

/// The controls of a pipeline, and what they apply to.
pub(crate) struct PipelineControls {
    control: Control,
    pipeline: Arc<str>,
    controlled: Controlled,
    channels: Vec<Arc<LaneChannel>>,
}

/// What controls apply to, besides the lanes.
pub(crate) struct Controlled {
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) gate: Gate,
    pub(crate) limiter: Arc<Limiter>,
}

impl PipelineControls {
    /// Call it before the lanes are started, so that no attempt starts faster than the rate.
    pub(crate) fn new(host: &mut Host, control: Control, pipeline: Arc<str>, controlled: Controlled) -> Self {
        host.report_paused(&pipeline, "paused pipelines", {
            let pipeline = pipeline.clone();
            move |snapshot| {
                let is_paused = snapshot.pipeline(&pipeline).is_paused;
                is_paused.then(|| pipeline.to_string()).into_iter().collect()
            }
        });
        let controls = Self {
            control,
            pipeline,
            controlled,
            channels: Vec::new(),
        };
        controls.controlled.limiter.set_wanted(controls.state().rate);
        controls
    }

    /// Applies to a lane. Call it before the lane is started, so that it never runs while the pipeline is
    /// paused.
    pub(crate) fn applies_to(&mut self, channel: Arc<LaneChannel>) {
        channel.set_paused(self.state().is_paused);
        self.channels.push(channel);
    }

    fn state(&self) -> PipelineState {
        self.control.snapshot().pipeline(&self.pipeline)
    }

    /// Follows the control topic. After `stop`, records in hand end as they do without a pause.
    pub(crate) async fn follow(self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut changes = self.control.changes();
        loop {
            self.apply(self.state());
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return Ok(()) },
                () = stop.cancelled() => return Ok(()),
            }
        }
    }

    fn apply(&self, PipelineState { is_paused, rate }: PipelineState) {
        let Controlled {
            metrics,
            gate,
            limiter,
        } = &self.controlled;
        metrics.paused.set(is_paused.into());
        if limiter.set_wanted(rate) {
            gate.rate_changed();
        }
        if !is_paused && self.channels.iter().any(|channel| channel.is_paused()) {
            // Before the first attempt.
            gate.resumed();
        }
        for channel in self
            .channels
            .iter()
            .filter(|channel| channel.is_paused() != is_paused)
        {
            channel.set_paused(is_paused);
        }
    }
}
