//! The metrics that all Prometheus clients have for their process
//! (<https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics>), and its threads. They have no prefix, so
//! that dashboards and alerts for any process work. They are read from `/proc` at each scrape.

use std::fmt;

use procfs::ProcResult;
use procfs::process::{LimitValue, Process};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// Reads the metrics of this process.
#[derive(Debug)]
pub(super) struct ProcessCollector;

struct Usage {
    cpu_seconds: f64,
    resident_bytes: u64,
    virtual_bytes: u64,
    threads: i64,
    open_fds: usize,
    /// Infinite without a limit.
    max_fds: f64,
    start_seconds: f64,
}

#[expect(
    clippy::cast_precision_loss,
    reason = "metrics are floating-point numbers, which are exact up to 2^53"
)]
impl Usage {
    fn read() -> ProcResult<Self> {
        let process = Process::myself()?;
        let stat = process.stat()?;
        let seconds = |ticks: u64| ticks as f64 / procfs::ticks_per_second() as f64;
        Ok(Self {
            cpu_seconds: seconds(stat.utime + stat.stime),
            resident_bytes: stat.rss * procfs::page_size(),
            virtual_bytes: stat.vsize,
            threads: stat.num_threads,
            open_fds: process.fd_count()?,
            max_fds: match process.limits()?.max_open_files.soft_limit {
                LimitValue::Value(limit) => limit as f64,
                LimitValue::Unlimited => f64::INFINITY,
            },
            start_seconds: procfs::boot_time_secs()? as f64 + seconds(stat.starttime),
        })
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let usage = match Usage::read() {
            Ok(usage) => usage,
            Err(error) => {
                tracing::debug!(%error, "cannot read the metrics of the process");
                return Ok(());
            }
        };
        let mut add = |name, help, unit: Option<Unit>, metric: &dyn EncodeMetric| {
            let encoder = encoder.encode_descriptor(name, help, unit.as_ref(), metric.metric_type())?;
            metric.encode(encoder)
        };
        add(
            "process_cpu",
            "Total user and system CPU time spent in seconds",
            Some(Unit::Seconds),
            &ConstCounter::new(usage.cpu_seconds),
        )?;
        add(
            "process_resident_memory",
            "Resident memory size in bytes",
            Some(Unit::Bytes),
            &ConstGauge::new(usage.resident_bytes),
        )?;
        add(
            "process_virtual_memory",
            "Virtual memory size in bytes",
            Some(Unit::Bytes),
            &ConstGauge::new(usage.virtual_bytes),
        )?;
        add(
            "process_threads",
            "Number of OS threads in the process",
            None,
            &ConstGauge::new(usage.threads),
        )?;
        add(
            "process_open_fds",
            "Number of open file descriptors",
            None,
            &ConstGauge::new(usage.open_fds),
        )?;
        add(
            "process_max_fds",
            "Maximum number of open file descriptors",
            None,
            &ConstGauge::new(usage.max_fds),
        )?;
        add(
            "process_start_time",
            "Start time of the process since the Unix epoch in seconds",
            Some(Unit::Seconds),
            &ConstGauge::new(usage.start_seconds),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn usage_is_of_this_process() {
        let before = Usage::read().unwrap();
        let files: Vec<File> = (0..100).map(|_| File::open("/proc/self/stat").unwrap()).collect();
        let pages = vec![1_u8; 64 << 20];
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (stop, stopped) = std::sync::mpsc::sync_channel::<()>(0);
                (stop, std::thread::spawn(move || stopped.recv()))
            })
            .collect();
        let during = Usage::read().unwrap();
        // Other tests of this process run at the same time, and close fewer files than this one opens.
        assert!(during.open_fds > before.open_fds + files.len() / 2);
        assert!(during.max_fds > during.open_fds as f64);
        assert!(during.resident_bytes > before.resident_bytes + pages.len() as u64 / 2);
        assert!(during.virtual_bytes > during.resident_bytes);
        assert!(during.threads > i64::try_from(threads.len()).unwrap());
        assert!(during.cpu_seconds > 0.0 && during.cpu_seconds >= before.cpu_seconds);
        // The kernel computes the time of the boot from the clock, which may be adjusted.
        assert!(during.start_seconds > 1_500_000_000.0);
        assert!((during.start_seconds - before.start_seconds).abs() < 60.0);
    }
}
