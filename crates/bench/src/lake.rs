//! `bench lake`: a redeliver-lake process that appends attempts, next to loops that only write the same rows to the same Parquet files; a query of many small
//! files, before and after they are merged; lateness of rows.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use redeliver_core::{Clock, HumanDuration, Jitter, Pipeline, RetryPolicy, SystemClock};
use serde::Deserialize;

use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;
use crate::process::{Running, wait_until};
use crate::records::waiting;

const PARTITIONS: i32 = 4;
const ROWS: &str = "redeliver_lake_rows_total{table=\"attempts\"";
const TIMEOUT: Duration = Duration::from_secs(1_800);
/// At the rate of a backlog, this gives files of as many rows as a minute of a few hundred per second.
const SMALL_FILES: &str = "200ms";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Records that are appended as fast as possible
    #[arg(long, default_value_t = 2_000_000)]
    count: usize,
    /// Number of rounds; each round appends them once with the process, and once with each loop
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Rows that are queried, at least `count`
    #[arg(long, default_value_t = 10_000_000)]
    queried: usize,
    /// Records per second of the measurement of lateness
    #[arg(long, default_value_t = 5_000.0)]
    rate: f64,
    /// Seconds of this measurement; each one writes a file
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Python interpreter with `duckdb` and `duckdb_extension_delta`
    #[arg(long, env = "BENCH_PYTHON")]
    python: PathBuf,
}

/// A pipeline whose records wait in its only tier.
struct Source {
    pipeline: Pipeline,
    tier: HumanDuration,
}

/// What `lake_table.py` says about a table.
#[derive(Deserialize)]
struct Table {
    files: usize,
    rows: usize,
    lateness_ms: [f64; 3],
    query_ms: f64,
}

impl Source {
    async fn new(broker: &Broker, name: &str) -> anyhow::Result<Self> {
        let tier = HumanDuration::from_secs(3_600);
        let name = broker.name(name);
        let pipeline = Pipeline {
            policy: RetryPolicy::listed(vec![tier], None, Jitter::None)?,
            output: Some(format!("{name}-out").into()),
            ..Pipeline::new(&name)
        };
        broker.create_for(&pipeline, PARTITIONS).await?;
        Ok(Self { pipeline, tier })
    }

    fn directory(&self) -> PathBuf {
        std::env::temp_dir()
            .join("redeliver-bench")
            .join(&*self.pipeline.name)
    }

    /// Starts a process that appends the records of this pipeline to new tables.
    fn start(&self, broker: &Broker, flush_interval: &str) -> anyhow::Result<Running> {
        let directory = self.directory();
        if directory.exists() {
            std::fs::remove_dir_all(&directory).context("removing tables")?;
        }
        let (name, tier) = (&self.pipeline.name, self.tier);
        let config = format!(
            "instance: {name}
kafka: {{ brokers: '{}' }}
pipelines: {{ {name}: {{ output: '{name}-out', retry: {{ tiers: [{tier}] }} }} }}
dlq_inspector: {{ topics: ['{name}-dlq'] }}
lake: {{ location: '{}', flush_interval: {flush_interval} }}
",
            broker.address,
            directory.display(),
        );
        Running::start("redeliver-lake", name, &config)
    }

    /// Runs a command of redeliver-lake with the configuration of the process, and returns what it prints.
    fn command(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let program = std::env::current_exe()?.with_file_name("redeliver-lake");
        let output = Command::new(program)
            .arg("--config")
            .arg(self.directory().with_extension("yaml"))
            .args(arguments)
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "{arguments:?} failed: {}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    fn table(&self, python: &Path) -> anyhow::Result<Table> {
        let output = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/lake_table.py"))
            .arg(self.directory().join("attempts"))
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "reading the table: {}", output.status);
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let more = options.queried.checked_sub(options.count);
    let more = more.context("--queried is less than --count")?;
    let source = Source::new(broker, "lake").await?;
    let now = SystemClock.now();
    let record = |index| waiting(&source.pipeline, source.tier, index, now);
    broker.fill(options.count, record)?;
    throughput(broker, options, &source, figures)?;
    broker.fill(more, |index| record(options.count + index))?;
    query(broker, options, &source, figures)?;
    broker.delete_of(&source.pipeline).await?;
    std::fs::remove_dir_all(source.directory()).context("removing tables")?;

    let source = Source::new(broker, "lake-steady").await?;
    lateness(broker, options, &source, figures)?;
    broker.delete_of(&source.pipeline).await?;
    std::fs::remove_dir_all(source.directory()).context("removing tables")
}

fn throughput(
    broker: &Broker,
    options: &Options,
    source: &Source,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let (mut lake, mut read, mut in_memory) = (Vec::new(), Vec::new(), Vec::new());
    let (mut of_read, mut of_in_memory) = (Vec::new(), Vec::new());
    let (mut processor, mut peak, mut rows_per_file) = (Vec::new(), 0_f64, 0);
    for _ in 0..options.rounds {
        // The rows of a full buffer are committed earlier.
        let process = source.start(broker, "10s")?;
        let commits = commits(&process, options.count)?;
        processor.push(process.cpu_time().as_secs_f64() * 1e6 / options.count as f64);
        peak = peak.max(process.peak_rss_mib()?);
        process.stop()?;
        // From commit to commit: neither the start is measured, nor the wait for the last one, which is due by time.
        let [(from, first), .., (until, last), _] = commits[..] else {
            bail!("only {} commits; use a larger --count", commits.len());
        };
        let appended = rate(last - first, until - from);
        rows_per_file = (last - first) / (commits.len() - 2);

        let files = source.directory().join("baseline");
        std::fs::create_dir(&files)?;
        let printed = source.command(&[
            "baseline",
            &source.pipeline.tier_topic(source.tier),
            "--count",
            &options.count.to_string(),
            "--rows-per-file",
            &rows_per_file.to_string(),
            "--files",
            &files.display().to_string(),
        ])?;
        let rates: Result<Vec<f64>, _> = printed.split_whitespace().map(str::parse).collect();
        let [bare, only] = rates?[..] else {
            bail!("the baseline printed {printed}");
        };
        lake.push(appended);
        read.push(bare);
        in_memory.push(only);
        of_read.push(appended / bare);
        of_in_memory.push(appended / only);
    }
    figures.add(
        format!("loop that reads and writes Parquet, {rows_per_file} rows per file"),
        per_second(median(&read)),
    );
    figures.add(
        "loop that writes Parquet, records in memory",
        per_second(median(&in_memory)),
    );
    figures.add(
        "redeliver-lake",
        format!(
            "{}, {:.1} us of processor time per row; {:.2} of the loop that reads (goal: 0.8), {:.2} of the loop that does not",
            per_second(median(&lake)),
            median(&processor),
            median(&of_read),
            median(&of_in_memory)
        ),
    );
    figures.add("peak memory", format!("{peak:.0} MiB (goal: 400)"));
    Ok(())
}

fn query(broker: &Broker, options: &Options, source: &Source, figures: &mut Figures) -> anyhow::Result<()> {
    let rows = options.queried;
    let process = source.start(broker, SMALL_FILES)?;
    let started = Instant::now();
    commits(&process, rows)?;
    figures.add(
        format!("redeliver-lake, flush_interval {SMALL_FILES}"),
        format!(
            "{}, {:.0} MiB at most",
            per_second(rate(rows, started.elapsed())),
            process.peak_rss_mib()?
        ),
    );
    process.stop()?;
    let before = source.table(&options.python)?;
    let started = Instant::now();
    source.command(&["maintain"])?;
    let maintained = started.elapsed().as_secs_f64();
    let after = source.table(&options.python)?;
    for (table, when) in [(&before, "before"), (&after, "after")] {
        ensure!(table.rows == rows, "{} of {rows} rows", table.rows);
        figures.add(
            format!("query of {rows} rows {when} maintenance"),
            format!("{:.0} ms, {} files", table.query_ms, table.files),
        );
    }
    figures.add("maintenance", format!("{maintained:.0} s"));
    Ok(())
}

/// When a process has committed how many rows, until it has committed all.
fn commits(process: &Running, count: usize) -> anyhow::Result<Vec<(Instant, usize)>> {
    process.wait_until_ready()?;
    let mut commits = Vec::new();
    wait_until("all rows are in the table", TIMEOUT, || {
        let rows = process.metric(ROWS)? as usize;
        if rows > commits.last().map_or(0, |(_, rows)| *rows) {
            commits.push((Instant::now(), rows));
        }
        Ok(rows >= count)
    })?;
    Ok(commits)
}

fn lateness(
    broker: &Broker,
    options: &Options,
    source: &Source,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let process = source.start(broker, "1s")?;
    process.wait_until_ready()?;
    let stop = AtomicBool::new(false);
    let sent = std::thread::scope(|scope| {
        let trickle = scope.spawn(|| {
            broker.trickle(options.rate, &stop, |index| {
                waiting(&source.pipeline, source.tier, index, SystemClock.now())
            })
        });
        std::thread::park_timeout(Duration::from_secs(options.seconds));
        stop.store(true, Ordering::SeqCst);
        trickle.join().expect("the load does not panic")
    })?;
    commits(&process, sent)?;
    process.stop()?;
    let table = source.table(&options.python)?;
    ensure!(table.rows == sent, "{} of {sent} rows", table.rows);
    let [p50, p99, max] = table.lateness_ms;
    figures.add(
        format!(
            "lateness of rows at {}, flush_interval 1s",
            per_second(options.rate)
        ),
        format!("p50 {p50:.0}, p99 {p99:.0} (goal: 2000), max {max:.0} ms ({sent} rows)"),
    );
    figures.add(
        format!("files in {} intervals", options.seconds),
        format!(
            "{}; {:.0} per hour with an interval of 1m",
            table.files,
            table.files as f64 / options.seconds as f64 * 60.0
        ),
    );
    Ok(())
}
